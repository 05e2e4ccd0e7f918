"""Small captures of every format that is read, made with the tools that write them where those are installed here."""

from __future__ import annotations

import io
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from alignment.capture.own_format import RowColumns, write_about, write_part, write_rows
from alignment.capture.readers.event_files import masked_crc32c


def entry(value: torch.Tensor | float | bool | None, name: str = "", folder: Path | None = None) -> dict | None:
    """What msprobe writes of one value."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return {"type": type(value).__name__, "value": value}
    counts = value.is_floating_point() and value.dtype is not torch.float64
    found = {
        "type": "torch.Tensor",
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "Max": value.max().item(),
        "Min": value.min().item(),
        "Mean": value.mean().item() if counts else None,
        "Norm": value.norm().item() if counts else None,
        "requires_grad": False,
    }
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / f"{name}.pt")
        found["data_name"] = f"{name}.pt"
    return found


def msprobe(root: Path, *, tensors: bool = False) -> Path:
    """A dump of level mix: one linear module that calls one operator, forward and backward, two ranks."""
    for rank in range(2):
        folder = root / "step0" / f"rank{rank}"
        folder.mkdir(parents=True)
        data = folder / "dump_tensor_data" if tensors else None
        x, w, y = (torch.arange(n, dtype=torch.float32).reshape(-1, 2) / 7 + rank for n in (6, 4, 6))
        call = "Module.layers.0.proj.Linear"

        def one(value, name, data=data):
            return entry(value, name, data)

        calls = {
            "Functional.linear.0.forward": {
                "input_args": [one(x, "a"), one(w, "b"), None, entry(2.5), entry(True)],
                "input_kwargs": {},
                "output": [one(y.to(torch.bfloat16), "c")],
            },
            f"{call}.forward.0": {
                "input_args": [one(x, "d")],
                "input_kwargs": {"mask": one(torch.tensor([True, False]), "e")},
                "output": [{"hidden": one(y, "f"), "aux": [one(x, "g"), None]}],
                "parameters": {"weight": one(w, "h")},
            },
            f"{call}.backward.0": {"input": [one(y, "i"), None], "output": [one(x, "j")]},
            f"{call}.parameters_grad.0": {"weight": [one(w, "k")]},
        }
        head = {"task": "tensor" if tensors else "statistics", "level": "mix", "framework": "pytorch"}
        where = {"dump_data_dir": str(data) if data else None}
        (folder / "dump.json").write_text(json.dumps({**head, **where, "data": calls}, indent=1))
        tree = {
            "Functional.linear.0.forward": f"{call}.forward.0",
            f"{call}.forward.0": None,
            f"{call}.backward.0": None,
        }
        (folder / "construct.json").write_text(json.dumps(tree))
        (folder / "stack.json").write_text(json.dumps({"0": [[f"{call}.forward.0"], ["File a.py, line 1"]]}))
    return root


def collector(root: Path) -> Path:
    """Key data of two steps and two ranks, in three spellings, and one layer dump."""
    msprobe(root / "actor_update")
    for step in range(2):
        for rank in range(2):
            for key, name in (("responses", "response0"), ("prompts", "prompts0"), ("entropys", "entropys.0")):
                folder = root / "data" / key / f"step{step}" / f"rank{rank}" / "micro_step0"
                folder.mkdir(parents=True)
                values = (
                    np.arange(6, dtype=np.float32 if key == "entropys" else np.int64).reshape(2, 3) + step + 10 * rank
                )
                np.save(folder / f"{name}.npy", values)
                found = {"max": 5.0, "min": 0.0, "mean": 2.5, "norm": 7.4, "shape": [2, 3]}
                (folder / f"{name}.json").write_text(json.dumps({"data": [found]} if "." in name else found))
    return root


def lines(root: Path) -> Path:
    """Two steps of ``rollout_data_dir``."""
    root.mkdir(parents=True)
    for step in (1, 2):
        samples = [
            {"input": f"{i // 2} + 1 =", "output": f" {i}é", "gts": "2", "score": i - 0.5, "step": step, "acc": i > 1}
            for i in range(4)
        ]
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        (root / f"{step}.jsonl").write_text(text, encoding="utf-8")
    return root


class _Pretender:
    """Pickles as an object of a class that is not installed here."""

    def __init__(self, state: tuple) -> None:
        self.state = state

    def __reduce__(self):
        return DataProto, (), self.state


class DataProto:
    """Stands for verl's class of the name."""


DataProto.__module__ = "verl.protocol"


def data_proto(tensors: dict[str, torch.Tensor], others: dict[str, np.ndarray]) -> bytes:
    """The bytes that verl's ``save_to_disk`` writes, as far as its reader is concerned."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    out = io.BytesIO()
    pickler = pickle._Pickler(out, 4)

    def save_global(obj, name=None):
        pickler.save("verl.protocol")
        pickler.save("DataProto")
        pickler.write(pickle.STACK_GLOBAL)
        pickler.memoize(obj)

    original = pickler.save_global
    pickler.save_global = lambda obj, name=None: save_global(obj) if obj is DataProto else original(obj, name)
    pickler.dispatch = {**pickle._Pickler.dispatch, type: lambda self, obj: pickler.save_global(obj)}
    pickler.dump(_Pretender((buffer.getvalue(), others, {"timing": 1.0})))
    return out.getvalue()


def skipped(root: Path) -> Path:
    """Two steps of verl's skip-rollout."""
    for step in (1, 2):
        folder = root / f"exp_project/GBS2_N2_in3_out4/genstep_{step:06d}"
        folder.mkdir(parents=True)
        tensors = {"prompts": torch.arange(6).view(2, 3) + step, "rm_scores": torch.ones(2, 4)}
        others = {"uid": np.array(["a", "b"], dtype=object), "acc": np.array([0.0, 1.0])}
        (folder / "gen_batch.dp").write_bytes(data_proto(tensors, others))
        (folder / "meta.json").write_text(json.dumps({"global_steps": step}))
    return root


def _field(number: int, kind: int, payload: bytes) -> bytes:
    return bytes([number << 3 | kind]) + (bytes([len(payload)]) if kind == 2 else b"") + payload


def event(step: int, tag: str, value: float) -> bytes:
    """One scalar as TensorBoard writes it, without the frame of the record."""
    summary = _field(1, 2, _field(1, 2, tag.encode()) + _field(2, 5, struct.pack("<f", value)))
    return _field(1, 1, struct.pack("<d", 1.5)) + _field(2, 0, bytes([step])) + _field(5, 2, summary)


def record(data: bytes) -> bytes:
    """``data`` as a TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def events(root: Path) -> Path:
    """Three steps of two curves."""
    root.mkdir(parents=True)
    version = _field(1, 1, struct.pack("<d", 1.0)) + _field(3, 2, b"brain.Event:2")
    parts = [version, *(event(s, tag, s + v) for s in range(3) for tag, v in (("actor/loss", 0.5), ("reward", -1.0)))]
    (root / "events.out.tfevents.1.host.1.0").write_bytes(b"".join(map(record, parts)))
    return root


def tensors(root: Path) -> Path:
    """One file of every kind."""
    root.mkdir(parents=True)
    torch.save(
        {"weight": torch.arange(6.0).view(2, 3).t(), "deep": [{"bias": torch.ones(2, dtype=torch.bfloat16)}]},
        root / "a.pt",
    )
    save_file({"x": torch.arange(4).to(torch.bfloat16), "none": torch.zeros(0, 2)}, root / "b.safetensors")
    np.save(root / "c.npy", np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    np.save(root / "d.npy", np.arange(3, dtype=np.int16))
    return root


def own(root: Path) -> Path:
    """This suite's own format: a row with a sketch per sample and one with a sketch of all, and settings."""
    write_about(root, {"level": "L0", "detail": "tensor", "sketch_size": 4, "stage_order": ["update_actor"]})
    columns = RowColumns()
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    part = write_part(root, 1, "update_actor", 0, 0, {"t0": ("float32", values.shape, values)})
    for role, sketches in (("input", 2), ("output", -1)):
        columns.append(
            module="layers.0", class_name="Linear", kind="module", direction="forward", call=0, role=role,
            path="output", order=0, parent="", dtype="float32", shape=(2, 3), shard=(0, 0, 2, 4), keys=0,
            statistics=0, sketch=0, sketch_count=sketches, tensor="0/t0",
        )  # fmt: skip
    write_rows(
        root, 1, "update_actor", 0, columns, statistics=np.array([[5.0, 0, 2.5, 7.4, 0, 0, 6]]),
        sketches=np.ones((2, 4), "<f4"), key_groups=[["k0", "k1"]], key_bounds=[((2, 3), ((0, 3), (1, 3)))],
        parts=[part], settings={"layers.0": ("Linear", {"eps": 1e-6, "act_fn": "silu()", "top_k": 2})},
    )  # fmt: skip
    return root


SAMPLES = {
    "alignment": own,
    "msprobe": msprobe,
    "msprobe-tensors": lambda root: msprobe(root, tensors=True),
    "collector": collector,
    "skip-rollout": skipped,
    "rollout_data_dir": lines,
    "tensorboard": events,
    "tensors": tensors,
}
"""Name of the sample to what writes it; the format is its name up to a dash that the format has not."""


def format_of(sample: str) -> str:
    """The format of a sample."""
    return sample.removesuffix("-tensors")
