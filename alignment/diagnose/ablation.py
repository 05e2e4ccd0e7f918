"""What each change does to the curve: one at a time, and all together, on the same prompts with the same seeds.

A factor is a set of overrides. Its effect is the difference of the curve's level (mean of the last quarter of the
steps) between runs that share prompts and seed, so what the draw of a seed does to both cancels; the interval is
Student's over the seeds. In the full factorial the main effect of a factor is its mean effect over all settings of the
others, and the interaction of two is how much the effect of one depends on the other (Box, Hunter and Hunter,
*Statistics for Experimenters*, chapter 5). What cannot be answered is refused before the first run: a factor that
changes nothing, or only what the engine of the run does not read, would otherwise have an effect of exactly none.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.errors import InputError

if TYPE_CHECKING:
    from alignment.rl.config import TrainConfig

CONFIDENCE = 0.95
TAIL = 4
"""The level of a curve is the mean over its last ``1/TAIL``."""

MEGATRON = "actor_rollout_ref.actor.megatron."
NAMED: Mapping[str, tuple[str, ...]] = {
    "mbridge": (f"{MEGATRON}use_dist_checkpointing=false",),
    "dist_ckpt": (f"{MEGATRON}use_dist_checkpointing=true",),
    "cp": (f"{MEGATRON}context_parallel_size=2",),
    "deterministic": ("trainer.deterministic=true",),
    "nondeterministic": ("trainer.deterministic=false",),
}
"""Factors known by name: the way the first weights take into megatron-core, context parallelism, determinism."""
SEED = "trainer.seed"
_READ_BY = {MEGATRON: "megatron", "actor_rollout_ref.actor.fsdp_config.": "fsdp"}
"""Settings that one engine reads and the others ignore."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A named change: overrides that are applied together."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of a factor (or the interaction of two) on the level, with its interval over the seeds.

    ``low`` and ``high`` are infinite where there is one seed only. ``decided`` is whether the interval leaves zero out.
    """

    name: str
    value: float
    low: float
    high: float
    seeds: int

    @property
    def decided(self) -> bool:
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict:
        return {**asdict(self), "decided": self.decided}


def parse_factor(text: str) -> Factor:
    """``name:key=value[,key=value…]``, or a name of :data:`NAMED`.

    Raises:
        InputError: no name, or nothing that is an override.
    """
    if text.strip() in NAMED:
        return Factor(name=text.strip(), overrides=NAMED[text.strip()])
    name, separator, changes = text.partition(":")
    overrides = tuple(part.strip() for part in changes.split(",") if part.strip())
    if not separator or not name.strip() or not overrides or not all("=" in part for part in overrides):
        expected = f"name:key=value, or one of {', '.join(NAMED)}"
        raise InputError("a factor is a name and overrides", where="--factor", expected=expected, found=text)
    return Factor(name=name.strip(), overrides=overrides)


def designs(factors: Sequence[Factor], *, full: bool) -> list[frozenset[str]]:
    """The settings to run, by the factors that are on: the base first, then one at a time or every combination.

    Raises:
        InputError: no factor, two of one name, or more than can be crossed.
    """
    names = [factor.name for factor in factors]
    if not names or len(set(names)) != len(names):
        raise InputError("factors have names of their own", where="--factor", found=", ".join(names) or "none")
    if not full:
        return [frozenset(), *(frozenset({name}) for name in names)]
    if len(names) > 6:
        raise InputError("too many factors to cross", where="--full", expected="at most 6", found=len(names))
    for one, other in itertools.combinations(factors, 2):
        both = {o.partition("=")[0].strip() for o in one.overrides} & {
            o.partition("=")[0].strip() for o in other.overrides
        }
        if both - {"faults"}:
            raise InputError(
                "two factors that set one field cannot be crossed",
                where="--full",
                expected=f"factors of which one sets {min(both)}",
                found=f"{one.name}, {other.name}",
                next_step="run them one at a time, without --full",
            )
    return [
        frozenset(name for name, on in zip(names, setting) if on)
        for setting in sorted(itertools.product((False, True), repeat=len(names)), key=sum)
    ]


def check_settings(configs: Mapping[frozenset[str], tuple[Sequence[str], TrainConfig]]) -> None:
    """Refuses, before anything runs, settings whose effect would be none for another reason than that there is none.

    Args:
        configs: the faults that are on and the configuration of every setting, that of the base (no factor) among them.

    Raises:
        InputError: a factor that changes nothing, the seed, or what its engine does not read; parallel sizes that do
            not fit the ranks or the model; a distributed checkpoint that holds other weights.
        UnavailableError: a setting takes megatron-core, which is not installed.
    """
    from alignment.rl.config import flatten

    base_faults, base = configs[frozenset()]
    before = flatten(base.to_dict())
    for setting, (faults, config) in configs.items():
        now = flatten(config.to_dict())
        changed = sorted(key for key in now if now[key] != before.get(key))
        if len(setting) == 1:
            where = f"--factor {next(iter(setting))}"
            if not changed and list(faults) == list(base_faults):
                raise InputError("the factor changes nothing: the base has these values", where=where)
            if SEED in changed:
                raise InputError(
                    f"the factor changes {SEED}, which every setting takes in turn from the seeds that all share",
                    where=where,
                    expected="a factor without it",
                    found=f"{SEED}={config.trainer.seed}",
                    next_step="--seeds N says how many seeds",
                )
            for key in changed:
                engine = next((e for prefix, e in _READ_BY.items() if key.startswith(prefix)), config.engine.train)
                if engine != config.engine.train:
                    raise InputError(
                        f"the factor changes {key}, which is not read by this engine",
                        where=where,
                        expected=f"engine.train={engine}",
                        found=f"engine.train={config.engine.train}",
                    )
        if config.engine.train == "megatron":
            _check_megatron(config)
    if any(config.engine.train == "megatron" for _, config in configs.values()):
        from alignment.backends.megatron_model import installed_version

        installed_version()


def _check_megatron(config: TrainConfig) -> None:
    from alignment.backends.megatron_dist_checkpoint import check, check_source
    from alignment.rl.megatron_policy import megatron_settings
    from alignment.rl.mock_rollout import hash_checkpoint
    from alignment.weights.checkpoint import load_config

    policy = config.actor_rollout_ref
    model, megatron = load_config(policy.model.path), policy.actor.megatron
    sizes = megatron_settings(megatron, seed=config.trainer.seed).sizes
    sizes.check(model, world_size=config.dp_size)
    if megatron.use_dist_checkpointing and megatron.dist_checkpointing_path:
        folder = Path(megatron.dist_checkpointing_path)
        check(folder, model.to_hf())
        check_source(folder, hash_checkpoint(Path(policy.model.path)))


def first_other_prompts(base: Path, run: Path) -> int | None:
    """The first step in which a run trained on other prompts than the base's of the same seed; None: in no step."""
    from alignment.rl.tracking import GROUPS

    ids = [
        [json.loads(line)["prompt_ids"] for line in (folder / GROUPS).read_text().splitlines()]
        for folder in (base, run)
    ]
    steps = itertools.zip_longest(*ids)
    return next((step for step, (one, other) in enumerate(steps, start=1) if one != other), None)


def run_designs(
    factors: Sequence[Factor],
    seeds: Sequence[int],
    *,
    full: bool,
    level: Callable[[frozenset[str], tuple[str, ...], int], float],
) -> dict[tuple[frozenset[str], int], float]:
    """The level of the curve of every setting and seed; ``level`` runs one, given the factors, overrides and seed."""
    by_name = {factor.name: factor for factor in factors}
    return {
        (setting, seed): level(setting, tuple(o for name in sorted(setting) for o in by_name[name].overrides), seed)
        for setting in designs(factors, full=full)
        for seed in seeds
    }


def effects(
    factors: Sequence[Factor], seeds: Sequence[int], levels: Mapping[tuple[frozenset[str], int], float], *, full: bool
) -> list[Effect]:
    """The effect of every factor, and in the full factorial of every pair's interaction."""
    names = [factor.name for factor in factors]
    settings = designs(factors, full=full)
    found = []
    for name in names:
        pairs = [(s, s | {name}) for s in settings if name not in s and s | {name} in settings]
        found.append(_effect(name, seeds, lambda seed: _mean(levels[b, seed] - levels[a, seed] for a, b in pairs)))
    if full:
        for one, other in itertools.combinations(names, 2):
            rest = [s for s in settings if not s & {one, other}]

            def interaction(seed: int) -> float:
                return _mean(
                    (
                        levels[s | {one, other}, seed]
                        - levels[s | {other}, seed]
                        - levels[s | {one}, seed]
                        + levels[s, seed]
                    )
                    / 2
                    for s in rest
                )

            found.append(_effect(f"{one} × {other}", seeds, interaction))
    return found


def curve_level(values: Sequence[float]) -> float:
    """The mean over the last quarter of a curve (its last value where there are fewer than four).

    Raises:
        InputError: an empty curve, or a value that is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise InputError("the curve is empty or not finite", where="ablation")
    return _mean(values[-max(1, len(values) // TAIL) :])


def _effect(name: str, seeds: Sequence[int], difference: Callable[[int], float]) -> Effect:
    from scipy import stats

    values = [difference(seed) for seed in seeds]
    mean, count = _mean(values), len(values)
    if count < 2:
        return Effect(name=name, value=mean, low=-math.inf, high=math.inf, seeds=count)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count)
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * deviation
    return Effect(name=name, value=mean, low=mean - margin, high=mean + margin, seeds=count)


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
