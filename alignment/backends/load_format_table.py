"""Does the initialisation of a rollout engine matter? Dummy against safetensors at every stage of the first sync."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from alignment.backends.rollout import RolloutEngine
from alignment.backends.sync_probe import ProbeCase
from alignment.backends.weight_sync import STAGE, bytes_of, module_of, quantity_of
from alignment.numerics.verdict import Divergence, Outcome, Verdict


@dataclass(frozen=True, kw_only=True)
class LoadFormatRow:
    """One comparison of a dummy-initialised engine with a checkpoint-initialised one.

    ``differing`` names the tensors (or response tokens) that differ among ``compared``.
    """

    stage: str
    quantity: str
    compared: int
    differing: tuple[str, ...]
    expected_equal: bool

    @property
    def as_expected(self) -> bool:
        """True when the two are equal exactly where they should be."""
        return self.expected_equal == (not self.differing)

    def row(self) -> tuple[str, str, str, str, str]:
        """(stage, quantity, found, expected, first difference) for a table."""
        found = f"{len(self.differing)} of {self.compared} differ" if self.differing else "equal"
        expected = "equal" if self.expected_equal else "differ"
        return self.stage, self.quantity, found, expected, self.differing[0] if self.differing else ""


@dataclass(frozen=True, kw_only=True)
class LoadFormatTable:
    """Whether the initialisation of the rollout engine matters: dummy against safetensors at every stage of the first
    sync.

    After the trainer's weights arrived it must not. ``init`` is expected to differ (else the table shows nothing).
    """

    rows: tuple[LoadFormatRow, ...]

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """Rows of (stage, quantity, found, expected, first difference)."""
        return [row.row() for row in self.rows]

    def verdict(self, *, subject: str = "golden", device: str = "cpu") -> Verdict:
        """PASS when only init differs, INCONCLUSIVE when it does not, FAIL naming the first difference behind it."""
        wrong = [row for row in self.rows if not row.as_expected]
        after = next((row for row in wrong if row.expected_equal), None)
        if after is not None:
            outcome, reason = Outcome.FAIL, f"the initialisation matters: {after.quantity} differ {after.stage}"
        elif wrong:
            outcome, reason = (
                Outcome.INCONCLUSIVE,
                "both engines started with equal weights, so the table shows nothing",
            )
        else:
            outcome, reason = Outcome.PASS, "the initialisation of the engine does not matter"
        where = after and Divergence(
            stage=STAGE,
            module=module_of(after.differing[0]),
            quantity=quantity_of(after.differing[0]),
            detail=f"{after.stage}: dummy and safetensors differ",
        )
        return Verdict(
            check="weight_sync.load_format",
            layer="e2e",
            stage=STAGE,
            subject=subject,
            device=device,
            outcome=outcome,
            reason=reason,
            where=where,
            next_command="pytest tests/e2e/test_weight_sync.py" if outcome is not Outcome.PASS else None,
        )


def load_format_table(
    build: Callable[[str], RolloutEngine],
    source: Callable[[], Iterable[tuple[str, Tensor]]],
    case: ProbeCase,
    *,
    sleep_level: int | None = 2,
    post_process: bool = True,
) -> LoadFormatTable:
    """Run the first sync of a dummy and of a checkpoint-initialised engine, one after the other, and compare all
    stages.

    The stages are the source material's: at ``init``; ``before sharding``, the weights as they are streamed; ``after
    sharding``, as the engine holds them, derived tensors apart; and the ``first forward`` by prefill and by decode.
    Only digests are kept, so both engines never exist at once.

    Args:
        build: makes an engine for a ``load_format``.
        source: makes the trainer's stream; called once per engine.
        case: the sequences of the first forward.
        sleep_level: how the engine sleeps between start-up and the first sync; None for an engine that cannot sleep.
        post_process: False reproduces engines that compute derived tensors at start-up only.
    """
    runs = {f: _first_sync(build(f), source, case, sleep_level, post_process) for f in ("dummy", "safetensors")}
    rows = []
    for (stage, quantity), dummy in runs["dummy"].items():
        real = runs["safetensors"][stage, quantity]
        differing = tuple(k for k in [*dummy, *(k for k in real if k not in dummy)] if dummy.get(k) != real.get(k))
        rows.append(
            LoadFormatRow(
                stage=stage,
                quantity=quantity,
                compared=len(dummy | real),
                differing=differing,
                expected_equal=stage != "at init",
            )
        )
    return LoadFormatTable(rows=tuple(rows))


def _first_sync(engine: RolloutEngine, source, case: ProbeCase, sleep_level: int | None, post_process: bool):
    def parameters() -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in engine.named_parameters()}

    def derived() -> dict[str, str]:
        return {name: digest(one.tensor) for name, one in engine.derived_tensors().items()}

    stages = {("at init", "parameters"): parameters(), ("at init", "derived tensors"): derived()}
    streamed: dict[str, str] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source():
            streamed[name] = digest(tensor)
            yield name, tensor

    if sleep_level is not None:
        engine.sleep(sleep_level)
        engine.wake()
    engine.update_weights(noted(), post_process=post_process)
    stages["before sharding", "parameters"] = streamed
    stages["after sharding", "parameters"] = parameters()
    stages["after sharding", "derived tensors"] = derived()
    probe = engine.probe(case.input_ids, case.attention_mask, case.response_length)
    for path, values in (("prefill", probe.prefill), ("decode", probe.decode)):
        stages["in the first forward", f"{path} log-probs"] = {
            f"model.{path} log_prob of token {t}": digest(values[:, t]) for t in range(values.shape[1])
        }
    return stages


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, dtype and shape."""
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.sha256(head + bytes_of(tensor).clone().numpy().tobytes()).hexdigest()
