"""A checkpoint examined before it is trusted: every file, key and count that a resume would only miss halfway.

No weight is loaded: headers of safetensors files, indices, JSON and the optimizer's step counters say enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.backends.megatron_dist_checkpoint import MARK
from alignment.backends.megatron_dist_checkpoint import check as check_distributed
from alignment.diagnose.run_data import world_size
from alignment.errors import InputError
from alignment.files import read_json
from alignment.rl.checkpoint import LATEST, STATE, finished
from alignment.rl.lora import UNMERGED
from alignment.weights.checkpoint import INDEX_FILE, SINGLE_FILE, expected_shapes, load_config
from alignment.weights.indexed_save import read_index

MEGATRON, FSDP, GOLDEN = "megatron.json", "fsdp.json", "schedule.json"
_STEP = "global_step_"
_POLICY = "actor_rollout_ref.actor."
_SECTIONS = ("config", "layout", "data")
_COUNTS = frozenset(
    {
        "step", "world_size", "trainer.n_gpus_per_node", "trainer.nnodes", "data.train_batch_size",
        f"{_POLICY}ppo_mini_batch_size", "critic.ppo_mini_batch_size", f"{_POLICY}ppo_epochs", "critic.ppo_epochs",
        "gkd.steps_per_generation",
    }
)  # fmt: skip
_MOST = 2**20
_GENERATORS = frozenset({"python", "numpy", "torch"})
_UNTRAINED = ("e_score_correction_bias",)
"""Steered by the load of the experts, not by a gradient: it has no moments."""
_RANKS_OF_ADAPTERS = ("actor_rollout_ref.model.lora_rank", "gkd.lora.rank")
_FACTORS = ("up.", "down.")


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """Something that a resume from the checkpoint, or a save like it, would stumble over or lose."""

    where: str
    problem: str
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        tail = "; ".join(f"{k} {v}" for k, v in (("expected", self.expected), ("found", self.found)) if v)
        return f"{self.where}: {self.problem}" + (f"; {tail}" if tail else "")


def examine_checkpoint(path: Path, *, ranks: int | None = None) -> tuple[Symptom, ...]:
    """Every symptom of a checkpoint; none where it can be trusted.

    Args:
        path: a Hugging Face checkpoint, one ``global_step_<N>`` of a run, the folder of all of them, or a distributed
            checkpoint of megatron-core that :mod:`alignment.backends.megatron_dist_checkpoint` wrote.
        ranks: of the run that will resume; as many as saved where it is not said.

    Raises:
        InputError: the path is no checkpoint at all.
    """
    path = Path(path)
    if (path / STATE).is_file():
        return tuple(_run_checkpoint(path, ranks))
    if finished(path):
        return tuple(_root(path, ranks))
    if (path / "config.json").is_file():
        return tuple(_weights(path))
    if (path / MARK).is_file() or (path / ".metadata").is_file():
        return tuple(_distributed(path))
    raise InputError(
        "there is no checkpoint here",
        where=path,
        expected=f"config.json, {STATE}, {MARK} or {_STEP}<N>",
        found="none of them",
    )


def _distributed(path: Path) -> Iterator[Symptom]:
    """Of megatron-core's own format: every file as it was written. Its keys are in pickles, which are not read.

    Raises:
        InputError: another program wrote it.
    """
    if not (path / MARK).is_file():
        check_distributed(path, {})
    mark = _document(path / MARK)
    try:
        check_distributed(path, mark.get("config") or {})
    except InputError as damage:
        yield Symptom(
            where=str(damage.where or path),
            problem=damage.problem,
            expected=str(damage.expected or ""),
            found=str(damage.found or ""),
        )
    for name in ("source", "config"):
        if not mark.get(name):
            yield Symptom(where=f"{path / MARK}: {name}", problem="nothing says whose weights these are")


def _root(path: Path, ranks: int | None) -> Iterator[Symptom]:
    steps = finished(path)
    latest = path / LATEST
    named = latest.read_text().strip() if latest.is_file() else ""
    if named != str(steps[-1]):
        yield Symptom(
            where=str(latest),
            problem="names another checkpoint than the newest",
            expected=str(steps[-1]),
            found=named or "nothing",
        )
    for leftover in sorted(path.glob(f".unfinished_{_STEP}*")):
        yield Symptom(
            where=str(leftover), problem="a save that was killed; it is never read, and the next save removes it"
        )
    yield from _run_checkpoint(path / f"{_STEP}{steps[-1]}", ranks)


def _run_checkpoint(path: Path, ranks: int | None) -> Iterator[Symptom]:
    state = _document(path / STATE)
    step = int(path.name.removeprefix(_STEP)) if path.name.startswith(_STEP) else state.get("step")
    if state.get("step") != step:
        yield Symptom(
            where=f"{path / STATE}: step",
            problem="another step than the folder's name",
            expected=str(step),
            found=str(state.get("step")),
        )
    yield from _data(path, state, step)
    roles = sorted(child.name for child in path.iterdir() if child.is_dir())
    if not roles:
        yield Symptom(where=str(path), problem="no trained role was saved", expected="actor", found="nothing")
    saved = world_size(state.get("config") or {})
    wanted = ranks or saved
    if ranks is not None and ranks != saved:
        yield Symptom(
            where=str(path), problem="saved by another number of ranks", expected=str(ranks), found=str(saved)
        )
    generators = sorted(path.glob("rng_*.safetensors"))
    groups = {file.stem.rpartition("_")[0] for file in generators}
    for group in groups or {"rng"}:
        missing = [rank for rank in range(wanted) if not (path / f"{group}_{rank}.safetensors").is_file()]
        if missing:
            yield Symptom(
                where=str(path),
                problem="the generators of a rank are missing",
                expected=f"{group}_{missing[0]}.safetensors",
            )
    for file in generators:
        damage = list(_readable(file))
        yield from damage
        lacking = sorted(_GENERATORS - set(() if damage else _keys(file)))
        if lacking and not damage:
            yield Symptom(where=str(file), problem=f"the generator of {lacking[0]} is missing")
    for role in roles:
        adapted = role == "actor" and any((state.get("config") or {}).get(key) for key in _RANKS_OF_ADAPTERS)
        updates = _updates_per_step(state, role)
        yield from _engine(path / role, wanted, step=step, updates=updates, adapted=adapted)
    if "actor" in roles:
        yield from _layout(path / "actor", state.get("config") or {})


def _layout(folder: Path, config: Mapping[str, Any]) -> Iterator[Symptom]:
    """The layout of the optimizer state against the run's: equally many ranks may hold other parts of it."""
    expected: dict[str, Any] = {}
    if (folder / MEGATRON).is_file():
        what, layout = MEGATRON, _document(folder / MEGATRON)
        prefix = f"{_POLICY}megatron."
        for key, value in config.items():
            name = key.removeprefix(prefix).removeprefix("override_transformer_config.")
            if key.startswith(prefix) and name in layout:
                expected[name] = value
    elif (folder / FSDP).is_file():
        what, layout = FSDP, _document(folder / FSDP).get("layout") or {}
        expected["model"] = config.get(f"{_POLICY}fsdp_config.model")
    else:
        return
    dtype = config.get("actor_rollout_ref.model.dtype")
    if dtype is not None:
        expected["dtype"] = f"torch.{dtype}"
    for name, value in sorted(expected.items()):
        if name in layout and layout[name] != value:
            yield Symptom(
                where=f"{folder / what}: {name}",
                problem="the optimizer state has another layout than the run that saved it",
                expected=str(value),
                found=str(layout[name]),
            )


def _data(path: Path, state: Mapping[str, Any], step: int | None) -> Iterator[Symptom]:
    data = state.get("data")
    if not isinstance(data, Mapping):
        yield Symptom(where=f"{path / STATE}: data", problem="the position in the data is missing")
        return
    config = state.get("config") or {}
    for name, key in (("seed", "data.seed"), ("shuffle", "data.shuffle")):
        if name in data and config.get(key) is not None and data[name] != config[key]:
            yield Symptom(
                where=f"{path / STATE}: data.{name}",
                problem="the position is one in another order of prompts than the run's",
                expected=str(config[key]),
                found=str(data[name]),
            )
    position, batch, epoch = data.get("position"), data.get("batch_size"), data.get("epoch")
    # One generation of distillation feeds several steps.
    per_batch = int((state.get("config") or {}).get("gkd.steps_per_generation") or 1)
    needed = None if step is None or not isinstance(batch, int) else -(-step // per_batch) * batch
    # Without dynamic sampling a step takes one batch; with it, one or more.
    if needed is not None and isinstance(position, int) and epoch == 0 and position < needed:
        yield Symptom(
            where=f"{path / STATE}: data.position",
            problem="fewer prompts were used than the steps need",
            expected=f"at least {needed}",
            found=str(position),
        )


def _engine(folder: Path, ranks: int, *, step: int | None, updates: int | None, adapted: bool) -> Iterator[Symptom]:
    weights = folder / "model" if (folder / MEGATRON).is_file() else folder
    if (folder / MEGATRON).is_file():
        layout, pattern, what = _document(folder / MEGATRON), "optimizer_rank_{}.safetensors", MEGATRON
        size = layout.get("world_size")
    elif (folder / FSDP).is_file():
        layout, pattern, what = _document(folder / FSDP), "shard_rank_{}.safetensors", FSDP
        size = (layout.get("layout") or {}).get("world_size")
    else:
        layout, pattern, what = {}, "optimizer.safetensors", GOLDEN
        size = 1
        if not (folder / GOLDEN).is_file():
            yield Symptom(
                where=str(folder / GOLDEN), problem="the schedule is missing: the learning rate would start anew"
            )
        else:
            layout = _document(folder / GOLDEN)
    if what != GOLDEN and size != ranks:
        yield Symptom(
            where=f"{folder / what}: world_size",
            problem="the optimizer state has another layout",
            expected=str(ranks),
            found=str(size),
        )
    made = layout.get("updates")
    if updates is not None and step is not None and made is not None and made != step * updates:
        yield Symptom(
            where=f"{folder / what}: updates",
            problem="the optimizer took another number of steps than the run",
            expected=str(step * updates),
            found=str(made),
        )
    for rank in range(int(size or 1)):
        file = folder / pattern.format(rank)
        if not file.is_file():
            yield Symptom(where=str(file), problem="the optimizer state of a rank is missing")
            continue
        damage = list(_readable(file))
        yield from damage
        if not damage:
            yield from _moments(file, started=bool(made), adapted=adapted)
            yield from _counters(file, made)
    if (weights / "config.json").is_file():
        yield from _weights(weights)
        if adapted and what == GOLDEN:
            yield from _unmerged(folder)
    else:
        yield Symptom(where=str(weights / "config.json"), problem="the weights have no configuration")


def _unmerged(folder: Path) -> Iterator[Symptom]:
    """The model and the adapter apart: nothing takes the merged weights apart again."""
    file, optimizer = folder / UNMERGED, folder / "optimizer.safetensors"
    if not file.is_file():
        yield Symptom(
            where=str(file),
            problem="the adapter is missing: the weights beside it are merged, and no resume can take them apart",
        )
        return
    damage = list(_readable(file))
    yield from damage
    if damage:
        return
    wanted = {f"base_model.{name}" for name in expected_shapes(load_config(folder), where=folder / "config.json")}
    if optimizer.is_file() and not list(_readable(optimizer)):
        wanted |= {key.removeprefix("exp_avg.") for key in _keys(optimizer) if key.startswith("exp_avg.")}
    lost = sorted(wanted.difference(_keys(file)))
    if lost:
        yield Symptom(where=str(file), problem=f"{lost[0]} is missing", found=f"{len(lost)} such keys are not there")


def _moments(file: Path, *, started: bool, adapted: bool) -> Iterator[Symptom]:
    """Every parameter that has one moment has the other, and its main weight where others have theirs.

    Where an adapter is trained, the weights under it are frozen and have a main weight alone.
    """
    kinds: dict[str, set[str]] = {}
    for key in _keys(file):
        for kind in ("exp_avg_sq", "exp_avg", "main", "master_param"):
            # The golden engine and FSDP put the kind first, megatron-core's states last.
            if key.startswith(f"{kind}."):
                kinds.setdefault(key[len(kind) + 1 :], set()).add(kind)
                break
            if key.endswith(f".{kind}"):
                kinds.setdefault(key[: -len(kind) - 1], set()).add(kind)
                break
    everything = set().union(*kinds.values()) if kinds else set()
    if started and not {"exp_avg", "exp_avg_sq"} <= everything:
        yield Symptom(
            where=str(file),
            problem="there are no moments although updates were made",
            found=", ".join(sorted(everything)) or "nothing",
        )
    for name, held in sorted(kinds.items()):
        lacking = sorted(everything - held)
        frozen = name.endswith(_UNTRAINED) or (adapted and not name.startswith(_FACTORS))
        if held == {"main"} and frozen:
            continue
        if lacking:
            yield Symptom(
                where=str(file),
                problem=f"the state of {name} is not whole",
                expected=", ".join(sorted(everything)),
                found=f"no {lacking[0]}",
            )
            return


def _counters(file: Path, updates: Any) -> Iterator[Symptom]:
    """The steps that the optimizer itself has counted, where its state says so: a file of another checkpoint shows."""
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        for key in opened.keys():
            if not key.endswith(".step") or opened.get_slice(key).get_shape():
                continue
            counted = float(opened.get_tensor(key))
            if updates is not None and counted != updates:
                yield Symptom(
                    where=f"{file}: {key}",
                    problem="the optimizer has counted another number of steps: the file is another checkpoint's",
                    expected=str(updates),
                    found=f"{counted:g}",
                )
                return


def _weights(folder: Path) -> Iterator[Symptom]:
    """Every key of every file of the index, and what a save like it would silently leave out."""
    config = load_config(folder)
    if not (folder / INDEX_FILE).is_file() and (folder / SINGLE_FILE).is_file():
        # Without an index the file's own header is the list of what there is.
        damage = list(_readable(folder / SINGLE_FILE))
        if damage:
            yield from damage
            return
    index = read_index(folder)
    shapes = expected_shapes(config, where=folder / "config.json")
    held: dict[str, set[str]] = {}
    for name in sorted(set(index.values())):
        file = folder / name
        if not _is_file(file):
            yield Symptom(
                where=str(file),
                problem=f"a file of the index is missing, with {sum(f == name for f in index.values())} tensors",
            )
            continue
        damage = list(_readable(file))
        yield from damage
        if damage:
            continue
        held[name] = set(_keys(file))
        lost = sorted(key for key, place in index.items() if place == name and key not in held[name])
        if lost:
            yield Symptom(
                where=str(file),
                problem=f"the index promises {lost[0]} in it",
                found=f"{len(lost)} such keys are not there",
            )
        stray = sorted(key for key in held[name] if index.get(key) != name)
        if stray and (folder / INDEX_FILE).is_file():
            yield Symptom(where=str(file), problem=f"holds {stray[0]}, which the index places elsewhere or not at all")
    for key in sorted(shapes.keys() - index.keys()):
        yield Symptom(where=str(folder), problem=f"the model's tensor {key} is in no file")
        break
    never = sorted(key for key in index if key not in shapes)
    for key in never[:1]:
        siblings = sum(1 for other, file in index.items() if file == index[key] and other in shapes)
        yield Symptom(
            where=str(folder / index[key]),
            problem=f"training never produces {key}: a writer that waits for every key of this file would silently not "
            f"write it, and lose {siblings} trained tensors" + (f" ({len(never)} such keys)" if len(never) > 1 else ""),
        )
    yield from _shapes(folder, index, shapes, held)


def _shapes(
    folder: Path, index: Mapping[str, str], shapes: Mapping[str, tuple], held: Mapping[str, set]
) -> Iterator[Symptom]:
    from safetensors import safe_open

    for name, keys in held.items():
        with safe_open(folder / name, framework="np") as file:
            for key in sorted(keys & shapes.keys()):
                found = tuple(file.get_slice(key).get_shape())
                if found != shapes[key]:
                    yield Symptom(
                        where=f"{folder / name}: {key}",
                        problem="the shape does not fit the configuration",
                        expected=str(list(shapes[key])),
                        found=str(list(found)),
                    )
                    return


def _document(path: Path) -> dict[str, Any]:
    """The JSON object at ``path``, whose sections are objects and whose counts are numbers.

    Raises:
        InputError: it is not so.
    """
    found = read_json(path)
    for name, section in (("", found), *((n, found.get(n)) for n in _SECTIONS if isinstance(found, dict))):
        if section is None:
            continue
        if not isinstance(section, dict):
            place = f"{path}: {name}" if name else path
            raise InputError("a JSON object is expected", where=place, found=repr(section)[:80])
        for key in _COUNTS & section.keys():
            value = section[key]
            if value is not None and not (type(value) is int and 0 <= value <= _MOST):
                raise InputError("a count is expected", where=f"{path}: {key}", found=repr(value)[:80])
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name of a file
        return False


def _keys(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        return list(opened.keys())


def _readable(file: Path) -> Iterator[Symptom]:
    from safetensors import SafetensorError

    try:
        _keys(file)
    except (SafetensorError, OSError) as error:
        yield Symptom(where=str(file), problem=f"truncated or not safetensors ({error})")


def _updates_per_step(state: Mapping[str, Any], role: str) -> int | None:
    config = state.get("config") or {}
    section = {"critic": "critic"}.get(role, "actor_rollout_ref.actor")
    batch, mini = config.get("data.train_batch_size"), config.get(f"{section}.ppo_mini_batch_size")
    epochs = config.get(f"{section}.ppo_epochs") or 1
    return batch // mini * epochs if batch and mini and "gkd.lmbda" not in config else None
