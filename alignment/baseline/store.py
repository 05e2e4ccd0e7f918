"""Baselines on disk: one JSON beside one safetensors file per operator, device kind and chip.

``<root>/<kind>/<chip>/<layer>/<operator>.json`` holds, for every case of the operator and every subject, what the case
was, the noise and the bounds; ``….safetensors`` holds the float64 golden tensors as ``<case>/<quantity>``. Both carry
content hashes, so a damaged or edited file is told from a good one before anything is judged by it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from alignment.baseline.provenance import SOURCE_ROOT, Provenance, content_hash, tensors_hash
from alignment.errors import InputError
from alignment.files import read_json, write_atomically, write_json
from alignment.numerics.budget import Budget, Noise

SCHEMA = 1
CASE_LAYERS = ("unit", "layer")
RECORD_COMMAND = "alignment baseline record"


def default_root() -> Path:
    """``baselines/`` where one works, else that of the repository the package lives in."""
    here = Path("baselines")
    return here if here.is_dir() else SOURCE_ROOT / "baselines"


def chip_slug(chip: str) -> str:
    """The name of a chip as a folder: ``Intel(R) Xeon(R) CPU`` becomes ``intel-r-xeon-r-cpu``."""
    return re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") or "unknown"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The baseline of one case by one subject.

    Attributes:
        case_id: the case.
        subject: whose results the noise was measured on.
        case: :meth:`alignment.backends.case.Case.identity` at recording.
        inputs: hash of the judged inputs.
        hashes: of the configuration, and of the weights and the data among the inputs.
        golden: hash of the golden tensors.
        runs: seed and kind of every perturbed run the noise was measured on.
        quantities: per quantity its shape, root mean square, the ``runs`` it was measured on (by place) and per metric the
            budget with the metric's value in each of these runs.
        provenance: where and when it was recorded.
    """

    case_id: str
    subject: str
    case: Mapping[str, object]
    inputs: str
    hashes: Mapping[str, str]
    golden: str
    runs: tuple[Mapping[str, object], ...]
    quantities: Mapping[str, Mapping[str, object]]
    provenance: Provenance

    @property
    def key(self) -> str:
        return f"{self.case_id}/{self.subject}"

    def budgets(self) -> dict[str, dict[str, Budget]]:
        """The stored budgets by quantity and metric, each with the noise behind it."""
        return {
            name: {metric: self._budget(name, metric, facts["runs"], data) for metric, data in facts["budgets"].items()}
            for name, facts in self.quantities.items()
        }

    def _budget(self, name: str, metric: str, places: Sequence[int], data: Mapping) -> Budget:
        runs = [self.runs[place] for place in places]
        noise = Noise(
            values=tuple(data["noise"]),
            seeds=tuple(run["seed"] for run in runs),
            perturbation=tuple(run["kind"] for run in runs),
            device=self.provenance.fingerprint["label"],
        )
        return Budget(
            metric=f"{name} {metric}", value=data["value"], unit=data["unit"], origin=data["origin"], noise=noise
        )


def packed(
    budgets: Mapping[str, Mapping[str, Budget]],
) -> tuple[tuple[dict[str, object], ...], dict[str, dict[str, object]]]:
    """The perturbed runs behind ``budgets``, each once, and per quantity ``runs`` and ``budgets`` as :class:`Entry` has them."""
    noises = [budget.noise for metrics in budgets.values() for budget in metrics.values()]
    runs = sorted({run for noise in noises for run in noise.runs})
    place = {run: index for index, run in enumerate(runs)}
    quantities = {
        name: {
            "runs": [place[run] for run in next(iter(metrics.values())).noise.runs] if metrics else [],
            "budgets": {
                metric: {"value": b.value, "unit": b.unit, "origin": b.origin, "noise": list(b.noise.values)}
                for metric, b in metrics.items()
            },
        }
        for name, metrics in budgets.items()
    }
    return tuple({"seed": seed, "kind": kind} for seed, kind in runs), quantities


@dataclass(frozen=True, kw_only=True)
class BaselineFile:
    """All entries of one operator on one chip, with their golden tensors by ``<case>/<quantity>``."""

    path: Path
    kind: str
    chip: str
    layer: str
    operator: str
    entries: Mapping[str, Entry]
    tensors: Mapping[str, torch.Tensor]

    def golden(self, case_id: str) -> dict[str, torch.Tensor]:
        prefix = f"{case_id}/"
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


class BaselineStore:
    """A folder of baselines."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, *, kind: str, chip: str, layer: str, operator: str) -> Path:
        return self.root / kind / chip_slug(chip) / layer / f"{operator}.json"

    def paths(self, *, kind: str = "*", layer: str = "*", operator: str = "*") -> list[Path]:
        """The files there are, sorted; the runs of the e2e layer are files of their own kind (:mod:`.runs`)."""
        layers = CASE_LAYERS if layer == "*" else (layer,)
        return sorted(path for name in layers for path in self.root.glob(f"{kind}/*/{name}/{operator}.json"))

    def files(self, **chosen: str) -> Iterator[BaselineFile]:
        for path in self.paths(**chosen):
            yield load(path)

    def put(self, entries: list[Entry], tensors: Mapping[str, torch.Tensor]) -> list[Path]:
        """Adds or replaces entries, file by file; ``tensors`` are their golden ones by ``<case>/<quantity>``."""
        grouped: dict[Path, list[Entry]] = {}
        for entry in entries:
            fingerprint, case = entry.provenance.fingerprint, entry.case
            if fingerprint.get("emulated"):
                raise InputError(
                    "results of an emulated device are never a baseline",
                    where=entry.key,
                    found=fingerprint.get("label"),
                    next_step="record on the device itself",
                )
            path = self.path(
                kind=fingerprint["kind"], chip=fingerprint["chip"], layer=case["layer"], operator=case["operator"]
            )
            grouped.setdefault(path, []).append(entry)
        for path, group in grouped.items():
            before = load(path) if path.exists() else None
            kept = dict(before.entries) if before else {}
            kept.update({entry.key: entry for entry in group})
            merged = dict(before.tensors) if before else {}
            merged.update({n: t for n, t in tensors.items() if any(n.startswith(f"{e.case_id}/") for e in group)})
            fingerprint = group[0].provenance.fingerprint
            write(
                BaselineFile(
                    path=path,
                    kind=fingerprint["kind"],
                    chip=fingerprint["chip"],
                    layer=group[0].case["layer"],
                    operator=group[0].case["operator"],
                    entries=kept,
                    tensors=merged,
                )
            )
        return list(grouped)


def write(file: BaselineFile) -> None:
    """Writes both files, the tensors first; each is replaced whole."""
    tensors_path = file.path.with_suffix(".safetensors")
    tensors = {name: file.tensors[name].contiguous() for name in sorted(file.tensors)}
    write_atomically(tensors_path, lambda beside: save_file(tensors, beside))
    provenance = {content_hash(e.provenance.to_dict())[:16]: e.provenance.to_dict() for e in file.entries.values()}
    data = {
        "schema": SCHEMA,
        "device": {"kind": file.kind, "chip": file.chip},
        "layer": file.layer,
        "operator": file.operator,
        "tensors": _file_hash(tensors_path),
        "provenance": provenance,
        "entries": {key: _entry_dict(entry) for key, entry in sorted(file.entries.items())},
    }
    write_json(file.path, {**data, "content": content_hash(data)})


def load(path: Path) -> BaselineFile:
    """The baseline file at ``path`` with its tensors.

    Raises:
        InputError: it is no baseline, of another schema, damaged, edited by hand, or its tensors are missing or damaged.
    """
    data = read_json(path)
    if not isinstance(data, dict) or "schema" not in data or "entries" not in data:
        raise InputError("the file is not a baseline", where=path, expected="the keys schema, device, entries, …")
    if data["schema"] != SCHEMA:
        raise InputError(
            "a baseline of another schema", where=path, expected=SCHEMA, found=data["schema"], next_step=RECORD_COMMAND
        )
    stated = data.pop("content", None)
    if stated != content_hash(data):
        raise InputError(
            "the baseline file is damaged or was edited: its content does not match its hash",
            where=path,
            expected=stated,
            found=content_hash(data),
            next_step=f"restore it from version control, or record it again: {RECORD_COMMAND}",
        )
    try:
        provenance = {key: Provenance.from_dict(value) for key, value in data["provenance"].items()}
        entries = {
            key: Entry(**{**value, "provenance": provenance[value["provenance"]]}) for key, value in data["entries"].items()
        }
        return BaselineFile(
            path=Path(path),
            kind=data["device"]["kind"],
            chip=data["device"]["chip"],
            layer=data["layer"],
            operator=data["operator"],
            entries=entries,
            tensors=_load_tensors(Path(path).with_suffix(".safetensors"), data["tensors"]),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"the baseline file lacks a field ({error})", where=path) from None


def _load_tensors(path: Path, expected: str) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise InputError("the tensors of the baseline are missing", where=path, next_step=RECORD_COMMAND)
    found = _file_hash(path)
    if found != expected:
        raise InputError(
            "the tensors of the baseline are damaged: the file does not match its hash",
            where=path,
            expected=expected,
            found=found,
            next_step=f"restore it from version control, or record it again: {RECORD_COMMAND}",
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"the tensors of the baseline cannot be read ({error})", where=path) from None


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry_dict(entry: Entry) -> dict:
    data = {key: value for key, value in asdict(entry).items() if key != "provenance"}
    return {**data, "provenance": content_hash(entry.provenance.to_dict())[:16]}


def golden_tensors(case_id: str, observed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Golden observations under the names they are stored by."""
    return {f"{case_id}/{name}": tensor.detach().cpu().double().clone() for name, tensor in observed.items()}


def require_same_case(entry: Entry, identity: Mapping[str, object], inputs: str, *, where: object) -> None:
    """Refuses a baseline that was recorded for another configuration or from other inputs.

    Raises:
        InputError: the first field that differs, with both values.
    """
    for key in sorted({*entry.case, *identity}):
        if entry.case.get(key) != identity.get(key):
            raise InputError(
                f"the baseline belongs to another configuration: {key!r} differs",
                where=f"{where}: {entry.key}",
                expected=identity.get(key),
                found=entry.case.get(key),
                next_step=f"{RECORD_COMMAND} --case {entry.case_id}",
            )
    if entry.inputs != inputs:
        raise InputError(
            "the baseline was recorded from other inputs",
            where=f"{where}: {entry.key}",
            expected=inputs,
            found=entry.inputs,
            next_step=f"{RECORD_COMMAND} --case {entry.case_id}",
        )


def entry_hashes(identity: Mapping[str, object], inputs: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Hashes of the configuration, the weights and the data of a case, each on its own for review."""
    weights = {name: tensor for name, tensor in inputs.items() if name.startswith("weight")}
    data = {name: tensor for name, tensor in inputs.items() if name not in weights}
    return {"config": content_hash(identity), "weights": tensors_hash(weights), "data": tensors_hash(data)}


def inputs_hash(inputs: Mapping[str, torch.Tensor]) -> str:
    """Hash of the judged inputs, which every machine must build alike."""
    return tensors_hash(inputs)
