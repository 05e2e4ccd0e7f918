"""What to capture: one frozen configuration, and its ``capture.*`` overrides on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from alignment.errors import InputError
from alignment.numerics.sketch import SKETCH_SEED, SKETCH_SIZE

Level = Literal["L0", "L1", "mix"]
Detail = Literal["statistics", "sketch", "tensor"]
PREFIX = "capture."
STAGE_ORDER = (
    "rollout", "reward", "old_log_prob", "ref_log_prob", "values", "advantage", "update_critic", "update_actor",
    "teacher_log_prob", "update_student", "weight_sync",
)  # fmt: skip
"""The stages in the order they run in a step; a capture says so to its readers."""


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """What a capture holds. Where a field is None, everything is captured.

    Attributes:
        level: ``L0`` modules, ``L1`` operators (with their module as parent), ``mix`` both.
        detail: ``statistics``; ``sketch``, which adds 1024 numbers per tensor that show any difference at its size; or
            ``tensor``, which adds the tensor itself.
        stages: names of stages.
        step_start, step_end: steps, both ends included.
        ranks: ranks that write.
        modules: patterns of dotted module names, shell style (``model.layers.*.mlp``) or, after ``re:``, a regular
            expression that has to match the whole name.
        token_start, token_end: of the rollout, which generated tokens are captured, both ends included. Token 0 comes
            out of the prompt's pass.
        backward: gradients of module inputs and outputs.
        parameters, parameter_gradients: of the captured modules, parameters where they have changed.
        settings: plain numbers and names that modules compute with (an ε, a scale, a k).
        values: the pipeline's fields (responses, old_log_probs, advantages, …), with their tensors.
        real_tokens: leave padding out of the statistics and sketches of tensors that are made of samples and tokens,
            and take each sample at a place of its own: such rows are compared whatever the order, the micro batches and
            the padding. Known by ``input_ids`` and ``attention_mask`` of the model's call.
        samples: one sketch per sample instead of one of all of them. Costs a sketch per sample.
        sketch_size, sketch_seed: see :mod:`alignment.numerics.sketch`. Only equal ones can be compared.
        deduplicate: reduce a tensor once for all the modules it passes through. ``auto`` switches it off where
            collective communication may write into a tensor behind the version counter's back.
        queue_bytes: how much may wait for the disk before the run waits.
    """

    level: Level = "L0"
    detail: Detail = "sketch"
    stages: tuple[str, ...] | None = None
    step_start: int | None = None
    step_end: int | None = None
    ranks: tuple[int, ...] | None = None
    modules: tuple[str, ...] | None = None
    token_start: int = 0
    token_end: int = 0
    backward: bool = True
    parameters: bool = True
    parameter_gradients: bool = True
    values: bool = True
    settings: bool = True
    real_tokens: bool = True
    samples: bool = False
    sketch_size: int = SKETCH_SIZE
    sketch_seed: int = SKETCH_SEED
    deduplicate: Literal["auto", "always", "never"] = "auto"
    queue_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        for name, low in (("step_start", 0), ("step_end", 0), ("token_start", 0), ("token_end", 0), ("queue_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError("out of range", where=PREFIX + name, expected=f"≥ {low}", found=value)
        for first, last in (("step_start", "step_end"), ("token_start", "token_end")):
            a, b = getattr(self, first), getattr(self, last)
            if a is not None and b is not None and b < a:
                raise InputError("the range ends before it starts", where=PREFIX + last, expected=f"≥ {a}", found=b)
        if self.sketch_size < 4 or self.sketch_size & (self.sketch_size - 1):
            raise InputError(
                "the size of a sketch is a power of two", where=PREFIX + "sketch_size", expected="4, 8, …, 1024, …",
                found=self.sketch_size,
            )  # fmt: skip
        for pattern in self.modules or ():
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise InputError(
                        f"this is no regular expression ({error})", where=PREFIX + "modules", found=pattern
                    ) from None

    def takes_step(self, step: int) -> bool:
        """Whether ``step`` lies in the range."""
        return (self.step_start is None or step >= self.step_start) and (self.step_end is None or step <= self.step_end)

    def takes_stage(self, stage: str) -> bool:
        """Whether ``stage`` was asked for."""
        return self.stages is None or stage in self.stages

    def takes_rank(self, rank: int) -> bool:
        """Whether ``rank`` writes."""
        return self.ranks is None or rank in self.ranks

    def takes_module(self, name: str) -> bool:
        """Whether a module of this dotted name is captured."""
        if self.modules is None:
            return True
        return any(
            re.fullmatch(p[3:], name) if p.startswith("re:") else fnmatch.fnmatchcase(name, p) for p in self.modules
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def to_json(self) -> str:
        """What :meth:`from_json` reads."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CaptureConfig:
        """The inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CaptureConfig:
        """Checks names and types.

        Raises:
            InputError: an unknown key (the nearest known one is named) or a value of another type.
        """
        kinds = typing.get_type_hints(cls)
        for name in fields:
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=1)
                raise InputError(
                    "there is no such key", where=PREFIX + name, expected=", ".join(sorted(kinds)),
                    next_step=f"did you mean {PREFIX}{near[0]}?" if near else None,
                )  # fmt: skip
        return cls(**{name: _fitting(value, kinds[name], PREFIX + name) for name, value in fields.items()})


def split_overrides(overrides: Sequence[str]) -> tuple[CaptureConfig | None, list[str]]:
    """The capture that ``capture.*=value`` overrides ask for, and the overrides that are left.

    ``capture=true`` switches it on as it is by default; None where no override names it.

    Raises:
        InputError: an unknown key or a value that does not fit.
    """
    import yaml

    fields: dict[str, Any] = {}
    rest, asked = [], False
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip().lstrip("+")
        if not separator or not (key == PREFIX[:-1] or key.startswith(PREFIX)):
            rest.append(override)
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"the value is not YAML ({error})", where=key, found=text) from None
        if key == PREFIX[:-1]:
            if not isinstance(value, bool):
                raise InputError("capture is on or off", where="capture", expected="true | false", found=text)
            asked, fields = value, {} if not value else fields
        else:
            asked, fields[key[len(PREFIX) :]] = True, value
    return (CaptureConfig.from_dict(fields) if asked else None), rest


def _fitting(value: Any, kind: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        [kind] = [a for a in arguments if a is not type(None)]
        return _fitting(value, kind, where)
    if origin is Literal:
        if value not in arguments:
            near = difflib.get_close_matches(str(value), [str(a) for a in arguments], n=1)
            raise InputError(
                "there is no such choice", where=where, expected=" | ".join(map(str, arguments)), found=value,
                next_step=f"did you mean {near[0]}?" if near else None,
            )  # fmt: skip
        return value
    if origin is tuple:
        entries = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_fitting(entry, arguments[0], where) for entry in entries)
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError("a value of another type", where=where, expected=kind.__name__, found=repr(value))
    return value
