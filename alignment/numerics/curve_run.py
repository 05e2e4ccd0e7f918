"""What a training run records for the comparison of curves: per step and prompt, before any filter.

Statistics are those of the *pre-filter* samples. Dynamic sampling selects on the outcome: after it, a true −0.80
against −0.60 reads −0.52 against −0.41.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from alignment.errors import InputError
from alignment.numerics.known_keys import known_keys

CURVE_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """Mean and sample variance (divisor G − 1) of one quantity over the G samples of each of P prompts."""

    mean: tuple[float, ...]
    variance: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(_number(v, "mean") for v in self.mean))
        object.__setattr__(self, "variance", tuple(_number(v, "variance") for v in self.variance))

    @property
    def grand_mean(self) -> float:
        """Mean over prompts; NaN where any is."""
        return sum(self.mean) / len(self.mean)


@dataclass(frozen=True, kw_only=True)
class CurveStep:
    """One training step.

    ``prompt_ids`` [P] in the order they were consumed, ``group_size`` G samples per prompt, ``groups`` quantity →
    statistics of P prompts (``reward`` always; ``response_length``, ``correctness``, …), ``scalars`` what is one number
    a step (``kept_fraction``, ``generation_batches``, ``log_prob_gap``, …).

    Raises:
        InputError: no prompt, no group size, or statistics of another number of prompts.
    """

    step: int
    prompt_ids: tuple[str, ...]
    group_size: int
    groups: Mapping[str, GroupStatistics]
    scalars: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"step {self.step}"
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise InputError("a step is a number", where="CurveStep.step", expected="int", found=repr(self.step))
        object.__setattr__(self, "prompt_ids", tuple(str(p) for p in self.prompt_ids))
        object.__setattr__(self, "groups", dict(self.groups))
        object.__setattr__(self, "scalars", {k: _number(v, k) for k, v in self.scalars.items()})
        if not self.prompt_ids:
            raise InputError("a step without prompts", where=where, expected="at least one prompt id", found=0)
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise InputError("group_size counts samples", where=where, expected="≥ 1", found=self.group_size)
        for name, stats in self.groups.items():
            for part in (stats.mean, stats.variance):
                if len(part) != len(self.prompt_ids):
                    expected = f"{len(self.prompt_ids)} prompts"
                    raise InputError(
                        "statistics per prompt", where=f"{where}, {name}", expected=expected, found=len(part)
                    )

    @property
    def prompt_hash(self) -> str:
        """SHA-256 over the ordered prompt ids: equal hashes mean the same prompts in the same order."""
        return hashlib.sha256(json.dumps(self.prompt_ids).encode()).hexdigest()

    @classmethod
    def from_samples(
        cls,
        *,
        step: int,
        prompt_ids: Sequence[str],
        values: Mapping[str, Sequence[float]],
        uids: Sequence[str] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> CurveStep:
        """Groups samples [N] by ``uids`` (None: by prompt id), in order of first appearance.

        Args:
            prompt_ids: the prompt of every sample, before filtering.
            values: quantity → value of every sample, e.g. ``{"reward": …, "response_length": …}``.

        Raises:
            InputError: groups of unequal size, a group with two prompts, or values of another length.
        """
        where = f"step {step}"
        prompts = [str(p) for p in prompt_ids]
        groups: dict[str, list[int]] = {}
        for i, uid in enumerate(prompts if uids is None else uids):
            groups.setdefault(str(uid), []).append(i)
        sizes = {len(members) for members in groups.values()}
        if len(sizes) != 1:
            raise InputError("every prompt has the same number of samples", where=where, found=sorted(sizes))
        mixed = [uid for uid, members in groups.items() if len({prompts[i] for i in members}) != 1]
        if mixed:
            raise InputError("a group holds samples of two prompts", where=where, found=mixed[0])
        statistics = {}
        for name, series in values.items():
            if len(series) != len(prompts):
                raise InputError(
                    "one value per sample", where=f"{where}, {name}", expected=len(prompts), found=len(series)
                )
            parts = [_mean_and_variance([_number(series[i], name) for i in members]) for members in groups.values()]
            statistics[name] = GroupStatistics(mean=tuple(m for m, _ in parts), variance=tuple(v for _, v in parts))
        return cls(
            step=step,
            prompt_ids=tuple(prompts[members[0]] for members in groups.values()),
            group_size=sizes.pop(),
            groups=statistics,
            scalars=scalars or {},
        )


@dataclass(frozen=True, kw_only=True)
class CurveRun:
    """One run, as recorded: who ran, under which configuration, and every step in order.

    ``seed`` is the sampling seed and ``device`` the label: together they identify the run. ``config`` is the
    fingerprint of everything that has to be equal for runs to be comparable (not seed, not device), ``filtered``
    whether dynamic sampling was on, ``total_steps`` T the declared length. Values may be non-finite and steps may be
    missing: a run is stored as it was; the gates of :mod:`alignment.numerics.curves` refuse what cannot be compared.
    """

    seed: int
    device: str
    config: str
    total_steps: int
    filtered: bool
    steps: tuple[CurveStep, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("seed", int), ("total_steps", int), ("filtered", bool), ("device", str), ("config", str)):
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise InputError("wrong type", where=f"CurveRun.{name}", expected=kind.__name__, found=repr(value))
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "provenance", dict(self.provenance))

    @property
    def identity(self) -> tuple[str, int]:
        """(device, seed)."""
        return self.device, self.seed

    @property
    def label(self) -> str:
        """How messages name the run."""
        return f"{self.device}, seed {self.seed}"

    def curve(self, metric: str) -> list[float]:
        """Mean over prompts at every step."""
        return [step.groups[metric].grand_mean for step in self.steps]

    def to_json(self) -> str:
        """Sorted keys, full-precision floats, non-finite ones as strings: :meth:`from_json` reads back every bit."""
        data = _strict({"schema": CURVE_SCHEMA, **asdict(self)})
        return json.dumps(data, sort_keys=True, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CurveRun:
        """The inverse of :meth:`to_json`.

        Raises:
            InputError: no JSON, another schema, unknown or missing keys.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError("not a JSON document", where="CurveRun", found=str(error)) from None
        if not isinstance(data, dict) or data.get("schema") != CURVE_SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise InputError("unknown curve schema", where="CurveRun", expected=CURVE_SCHEMA, found=found)
        del data["schema"]
        arguments = known_keys(cls, data)
        try:
            arguments["steps"] = tuple(_step(step) for step in arguments["steps"])
            return cls(**arguments)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError("unreadable curve", where="CurveRun", found=f"{type(error).__name__}: {error}") from None


def _step(data: Mapping) -> CurveStep:
    arguments = known_keys(CurveStep, data)
    groups = {
        name: GroupStatistics(**known_keys(GroupStatistics, stats)) for name, stats in arguments["groups"].items()
    }
    return CurveStep(**{**arguments, "groups": groups})


def _mean_and_variance(values: list[float]) -> tuple[float, float]:
    n = len(values)
    mean = sum(values) / n
    return mean, sum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else 0.0


def _number(value: object, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError("not a number", where=name, expected="a float", found=repr(value)) from None


def _strict(value):
    if isinstance(value, Mapping):
        return {key: _strict(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    # strict JSON has no NaN; float() reads these strings back
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
