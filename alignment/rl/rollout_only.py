"""The rollout stage alone: bring up the engine of a configuration, generate, and say whether the text is garbled.

Training does not start. What is left out of the question is the trainer: if text is garbled here, the engine, its
weights or their sync is at fault, and the engine's own two paths are compared to tell which.
"""

from __future__ import annotations

import math
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from alignment.errors import InputError
from alignment.numerics.budget import Budget
from alignment.numerics.random import portable_key
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict
from alignment.rl import stages
from alignment.rl.batch import Batch
from alignment.rl.config import TrainConfig
from alignment.rl.data import prompt_batch
from alignment.rl.tokenizer import Tokenizer

# Above this ratio of raw to compressed bytes a text repeats itself: the value with which Whisper gives a transcript up
# (Radford et al. 2022, arXiv:2212.04356, section 4.5).
COMPRESSION_RATIO = 2.4
# −log p per token relative to ln(vocabulary): 0 when every token is certain, 1 when the model knows nothing; half-way.
SURPRISAL_RATIO = 0.5
# Well-formed text has no replacement, control, unassigned or private characters.
UNREADABLE = 0.0
# What is true of more than half of the responses is said of the rollout.
MAJORITY = 0.5


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response: prompt, text, tokens, whether an end of text came before the limit, and its statistics."""

    prompt_id: str
    prompt: str
    text: str
    tokens: int
    ended: bool
    compression_ratio: float
    surprisal_ratio: float
    unreadable: float


@dataclass(frozen=True, kw_only=True)
class RolloutOnly:
    """What the rollout stage made, on which engine, and the verdicts on it."""

    engine: str
    samples: tuple[Sample, ...]
    verdicts: tuple[Verdict, ...]


def rollout_only(config: TrainConfig, *, prompts: int = 4, device: str | None = None) -> RolloutOnly:
    """Generate ``rollout.n`` responses to each of the first ``prompts`` prompts of the data.

    With ``load_format=dummy`` the weights of ``model.path`` arrive by a sync, as in training; otherwise the engine
    reads them itself. Comparing the two tells a broken sync from a broken engine.

    Raises:
        InputError: settings that cannot work; UnavailableError: an engine or device this machine does not have.
    """
    from alignment.rl.run import load_prompts, located
    from alignment.rl.worker import Worker, WorkerSetting
    from alignment.weights.checkpoint import iter_tensors

    if prompts < 1:
        raise InputError("there is nothing to generate", where="prompts", expected="at least 1", found=prompts)
    config = located(config)
    tokenizer = Tokenizer(Path(config.actor_rollout_ref.model.path))
    chosen = list(load_prompts(config, tokenizer))[:prompts]
    setting = WorkerSetting(config=config, device=device or config.trainer.device)
    worker = Worker(setting, roles=("rollout",), rank=0, world_size=1, rendezvous=None)
    try:
        if config.actor_rollout_ref.rollout.load_format == "dummy":
            held = {name: tensor.dtype for name, tensor in worker.engine.named_parameters()}
            stream = iter_tensors(config.actor_rollout_ref.model.path)
            worker.engine.update_weights((name, tensor.to(held.get(name, tensor.dtype))) for name, tensor in stream)
        n = config.actor_rollout_ref.rollout.n
        batch = prompt_batch(
            chosen, pad_token_id=tokenizer.pad_token_id, prompt_length=config.data.max_prompt_length
        ).repeat(n)
        keys = [portable_key(0, 0, p, i % n) for i, p in enumerate(batch["prompt_id"])]
        facts = {"n": n, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "step": 0}
        made = stages.generate(worker.engine, batch.add(meta={"sample_key": keys}, info=facts), config)
        where = {"subject": config.engine.rollout, "device": worker.device.label}
        probed = worker.engine.probe(made["input_ids"], made["attention_mask"], made["responses"].shape[1])
        samples = describe(made, tokenizer, probed.prefill.cpu(), limit=config.data.max_response_length)
        verdicts = (
            check_paths(probed.prefill.cpu(), probed.decode.cpu(), made["response_mask"], worker.engine, **where),
            check_text(samples, **where),
        )
    finally:
        worker.close()
    return RolloutOnly(engine=config.engine.rollout, samples=samples, verdicts=verdicts)


def describe(batch: Batch, tokenizer: Tokenizer, log_probs: Tensor, *, limit: int) -> tuple[Sample, ...]:
    """The statistics of every response; ``log_probs`` [b,r] at temperature 1."""
    samples = []
    for row, prompt_id in enumerate(batch["prompt_id"]):
        count = int(batch["response_mask"][row].sum())
        ids = batch["responses"][row, :count].tolist()
        asked = batch["prompts"][row][batch["prompt_mask"][row] != 0].tolist()
        text = tokenizer.decode_response(ids)
        samples.append(
            Sample(
                prompt_id=prompt_id,
                prompt=tokenizer.decode_response(asked),
                text=text,
                tokens=count,
                ended=count < limit or ids[-1:] == [tokenizer.eos_token_id],
                compression_ratio=compression_ratio(text),
                surprisal_ratio=float(-log_probs[row, :count].double().mean()) / math.log(tokenizer.vocab_size),
                unreadable=unreadable(text),
            )
        )
    return tuple(samples)


def compression_ratio(text: str) -> float:
    """Bytes over bytes compressed; 0 for no text."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def unreadable(text: str) -> float:
    """Share of characters that well-formed text does not have. One cut off by the length limit is not counted."""
    kept = text.rstrip("\ufffd")
    bad = sum(c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Cn", "Co") and c not in "\n\r\t") for c in kept)
    return bad / len(kept) if kept else 0.0


def check_text(samples: Sequence[Sample], *, subject: str, device: str) -> Verdict:
    """FAIL when most responses are garbled by one measure, INCONCLUSIVE when most only run into the length limit."""
    shares = {
        "repeats itself": (
            [s.compression_ratio > COMPRESSION_RATIO for s in samples],
            f"raw/compressed bytes > {COMPRESSION_RATIO} (Whisper)",
        ),
        "is no language": ([s.unreadable > UNREADABLE for s in samples], "characters that text does not have"),
        "is near uniform": (
            [s.surprisal_ratio > SURPRISAL_RATIO for s in samples],
            f"-log p above {SURPRISAL_RATIO} ln(vocabulary)",
        ),
        "is pinned at the length limit": ([not s.ended for s in samples], "no end of text within max_response_length"),
    }
    total = len(samples)
    measures = tuple(
        Measure(
            name=f"share that {what}",
            value=sum(flags) / total,
            bound=MAJORITY,
            unit="of responses",
            origin=f"majority; {rule}",
        )
        for what, (flags, rule) in shares.items()
    )
    over = [what for (what, _), measure in zip(shares.items(), measures) if not measure.within]
    garbled = [what for what in over if "length" not in what]
    outcome = Outcome.FAIL if garbled else Outcome.INCONCLUSIVE if over else Outcome.PASS
    reason = f"most text {' and '.join(garbled or over)}" if over else "the text shows no sign of being garbled"
    return Verdict(
        check="rollout.text",
        layer="e2e",
        stage="rollout",
        subject=subject,
        device=device,
        outcome=outcome,
        reason=reason,
        measures=measures,
        where=Divergence(stage="rollout", module="model", quantity="responses", detail=reason) if garbled else None,
        next_command="pytest tests/e2e/test_weight_sync.py" if over else None,
    )


def check_paths(prefill: Tensor, decode: Tensor, mask: Tensor, engine, *, subject: str, device: str) -> Verdict:
    """The engine against itself: log-probs of its own responses by prefill and by decode steps, which must agree.

    They part in fault A, where derived weights of the decode path are stale. Judged is the median over tokens, because
    rounding may send a single token to other experts. There is no reference run to measure noise on: the bound is unit
    roundoff grown over a layer's longest sum and the number of layers.
    """
    real = mask.bool()
    gaps = (prefill.double() - decode.double()).abs()
    config = engine.config
    budget = Budget.from_roundoff(
        metric="median |prefill − decode| log p",
        dtype=engine.dtype,
        reduction_length=config.hidden_size * config.num_hidden_layers,
        unit="nats",
        scale=float(prefill[real].abs().max()),
    )
    # A token that was drawn right after the prompt comes from the prefill in both.
    behind = real.clone()
    behind[:, 0] = False
    judged = gaps[behind if bool(behind.any()) else real]
    measure = budget.judge(float(judged.median()), run_seed=0)
    good = measure.within
    return Verdict(
        check="rollout.paths",
        layer="e2e",
        stage="rollout",
        subject=subject,
        device=device,
        outcome=Outcome.PASS if good else Outcome.FAIL,
        reason="prefill and decode agree" if good else "prefill and decode disagree about the same tokens",
        measures=(measure, Measure(name="max |prefill − decode| log p", value=float(gaps[real].max()), unit="nats")),
        where=None
        if good
        else Divergence(
            stage="rollout",
            module="model",
            quantity="decode log_prob",
            detail="the decode path computes with other weights or another kernel than prefill: check derived tensors",
        ),
        next_command=None if good else "pytest tests/e2e/test_weight_sync.py",
    )
