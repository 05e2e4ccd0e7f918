"""The file of the precision collector: its one key ``precision_collector``, every field, and what contradicts what.

Fields, defaults and meanings are those of the collector that Huawei Cloud documents for verl ("VeRL: msprobe accuracy
tool", pages ``modelarts_llm_train_591018`` and ``…_591019`` of the ModelArts best practice, state of 15 December 2025:
https://support.huaweicloud.com/bestpractice-modelarts/modelarts_llm_train_591018.html). ``mock_random_seed`` is a mode;
the second of these pages names three:

=================== ====================================================================================
``None``            real steps: what was recorded at a step is loaded at this step
``-1``              cycle: the steps ``mock_step_start`` … ``mock_step_end`` in order, again and again
any other number    random: a sequence drawn from these steps with this seed
=================== ====================================================================================

Steps are counted from 0 here, as the collector does: step 0 is the first training step.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alignment.errors import InputError
from alignment.files import parse_yaml

KEY = "precision_collector"
CYCLE = -1
"""``mock_random_seed`` of the cycling mode."""

LAYER_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "actor_infer_dump": ("actor_generate_sequences",),
    "actor_train_dump": ("actor_compute_log_prob", "actor_update"),
    "reference_dump": ("reference_compute_log_prob",),
    "critic_train_dump": ("critic_compute_values", "critic_update"),
}
"""The stages whose model layers each switch dumps."""


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """What is dumped, and what is replayed.

    Attributes:
        msprobe: master switch: without it neither dumps nor mock inference act.
        memory_dump: memory of every dumped stage into ``dump_path/memory_snapshot``; needs a layer dump.
        dump_path: where everything goes.
        configurations_dump: the training configuration into ``configurations.json``.
        key_data_dump: responses, input_ids, attention_mask, prompts, position_ids, old_log_probs, entropys: values and
            statistics.
        reference_dump: layers of the reference's log-prob pass.
        actor_train_dump: layers of the actor's log-prob pass and update.
        actor_infer_dump: layers of generation, for the tokens of the token range.
        critic_train_dump: layers of the critic's passes, where there is a critic.
        step_start, step_end: steps that are collected, both included, from 0.
        token_range_start, token_range_end: generated tokens that are collected, both included, from 0.
        level: ``L0`` modules, ``L1`` operators, ``mix`` both.
        task: ``statistics``, or ``tensor`` for the tensors too.
        enable_mock_inference: replay recorded responses instead of generating.
        mock_random_seed: the mode of the replay, see above.
        mock_data_path: the ``dump_path`` of the recording.
        mock_step_start, mock_step_end: recorded steps that are loaded, both included, from 0.

    Raises:
        InputError: a value out of range, or settings that contradict each other.
    """

    msprobe: bool = False
    memory_dump: bool = False
    dump_path: str = "./collector_save_path"
    configurations_dump: bool = False
    key_data_dump: bool = False
    reference_dump: bool = False
    actor_train_dump: bool = False
    actor_infer_dump: bool = False
    critic_train_dump: bool = False
    step_start: int = 0
    step_end: int = 0
    token_range_start: int = 0
    token_range_end: int = 0
    level: Literal["L0", "L1", "mix"] = "L0"
    task: Literal["statistics", "tensor"] = "statistics"
    enable_mock_inference: bool = False
    mock_random_seed: int | None = None
    mock_data_path: str = "./collector_saved_path"
    mock_step_start: int = 0
    mock_step_end: int = 0

    def __post_init__(self) -> None:
        for first, last in (("step_start", "step_end"), ("token_range_start", "token_range_end"),
                            ("mock_step_start", "mock_step_end")):  # fmt: skip
            for name in (first, last):
                if getattr(self, name) < 0:
                    raise _wrong("the value is out of range", name, expected="0 or more", found=getattr(self, name))
            if getattr(self, last) < getattr(self, first):
                raise _wrong(
                    "the range ends before it starts", last, expected=f"{first} = {getattr(self, first)} or more",
                    found=getattr(self, last),
                )  # fmt: skip
        if self.mock_random_seed is not None and self.mock_random_seed < CYCLE:
            raise _wrong(
                "this is no mode of mock inference", "mock_random_seed",
                expected="None (real steps), -1 (cycle) or a seed of 0 or more (random)", found=self.mock_random_seed,
            )  # fmt: skip
        for name in ("dump_path", "mock_data_path"):
            if not getattr(self, name).strip() or "\0" in getattr(self, name):
                raise _wrong("a folder has to be named", name, found=repr(getattr(self, name)))
        if self.memory_dump and not any(getattr(self, switch) for switch in LAYER_SWITCHES):
            raise _wrong(
                "memory is dumped for the stages whose layers are dumped, and there are none", "memory_dump",
                expected="one of " + ", ".join(LAYER_SWITCHES),
            )  # fmt: skip
        if self.enable_mock_inference and self.actor_infer_dump:
            raise _wrong(
                "mock inference generates nothing, so there is no inference to dump", "actor_infer_dump",
                expected="False with enable_mock_inference", found=True,
                next_step="record with actor_infer_dump, then replay without it",
            )  # fmt: skip
        if self.enable_mock_inference and Path(self.dump_path).resolve() == Path(self.mock_data_path).resolve():
            raise _wrong(
                "the replay would write over the recording it reads", "dump_path",
                expected="another folder than mock_data_path", found=self.dump_path,
            )  # fmt: skip

    # --- what acts ---------------------------------------------------------------------------------------------------

    @property
    def dumps(self) -> bool:
        """Whether anything is written."""
        return self.msprobe and (self.configurations_dump or self.key_data_dump or bool(self.layer_stages))

    @property
    def mocks(self) -> bool:
        """Whether inference is replayed."""
        return self.msprobe and self.enable_mock_inference

    @property
    def layer_stages(self) -> tuple[str, ...]:
        """The stages whose layers are dumped, by the collector's names."""
        if not self.msprobe:
            return ()
        return tuple(stage for switch, stages in LAYER_SWITCHES.items() if getattr(self, switch) for stage in stages)

    def located(self, folder: Path) -> CollectorConfig:
        """The same with absolute paths, relative ones below ``folder``: workers may run elsewhere."""
        return dataclasses.replace(
            self, dump_path=str((folder / self.dump_path).resolve()),
            mock_data_path=str((folder / self.mock_data_path).resolve()),
        )  # fmt: skip

    # --- from and to text --------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, fields: Any, *, where: object = KEY) -> CollectorConfig:
        """From what stands under the key.

        Raises:
            InputError: an unknown field (with the nearest known one) or a value of another type.
        """
        if not isinstance(fields, Mapping):
            raise InputError("the settings are a mapping", where=where, found=type(fields).__name__)
        hints = typing.get_type_hints(cls)
        for name in fields:
            if name not in hints:
                near = difflib.get_close_matches(str(name), hints, n=1, cutoff=0.0)
                raise InputError(
                    "there is no such field", where=f"{where}.{name}", next_step=f"the nearest known field is {near[0]}"
                )
        return cls(**{name: _typed(hints[name], value, f"{where}.{name}") for name, value in fields.items()})

    def to_json(self) -> str:
        """What :meth:`from_json` reads."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CollectorConfig:
        """The inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))


def load_collector_config(path: str | Path) -> CollectorConfig:
    """The settings in a YAML file whose one key is ``precision_collector``.

    Raises:
        InputError: the file is missing or not YAML, or has other keys, or settings that are refused.
    """
    import yaml

    path = Path(path)
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"the file of the precision collector cannot be read ({error.strerror})", where=path,
            next_step="create it, or set ascend_precision_collector to None",
        ) from None  # fmt: skip
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"the file is not YAML ({error})", where=path) from None
    found = sorted(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
    if not isinstance(tree, Mapping) or set(tree) != {KEY}:
        raise InputError("the file has one key", where=path, expected=KEY, found=found)
    try:
        return CollectorConfig.from_dict(tree[KEY] if tree[KEY] is not None else {})
    except InputError as error:
        raise InputError(
            error.problem, where=f"{path}: {error.where}", expected=error.expected, found=error.found,
            next_step=error.next_step,
        ) from None  # fmt: skip


def _typed(hint: Any, value: Any, where: str) -> Any:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise InputError("there is no such choice", where=where, expected=" | ".join(choices), found=value)
        return value
    if hint == (int | None):
        # YAML has no None: the documented file carries it as a text.
        if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
            return None
        hint = int
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        kind = {bool: "True or False", int: "a whole number", str: "a text"}[hint]
        raise InputError("the value has another type", where=where, expected=kind, found=repr(value))
    return value


def _wrong(problem: str, field: str, **details: Any) -> InputError:
    return InputError(problem, where=f"{KEY}.{field}", **details)
