"""A small model dumped by the real msprobe, and by this suite's own writer. Run as a script in a process of its own:
``msprobe_run.py msprobe|ours OUT TASK LEVEL DTYPE FAULT``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, mask=None, scale=1.0):
        return {"hidden": self.down(torch.relu(self.up(x)) * scale), "aux": (x, mask)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, ids, scale):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask=ids != 0, scale=scale)["hidden"]
        return self.head(x)


def train(step, model: nn.Module, scale: float) -> None:
    loss = model(torch.tensor([[1, 2, 3 + step]]), scale).float().pow(2).sum()
    loss.backward()
    model.zero_grad()


def main(how: str, out: Path, task: str, level: str, dtype: str, fault: str) -> None:
    torch.manual_seed(0)
    model = Net().to(getattr(torch, dtype))
    scale = 1.5 if fault == "scale" else 1.0
    if how == "msprobe":
        config = {"task": task, "dump_path": str(out), "rank": [], "step": [], "level": level}
        one = {"scope": [], "list": [], "data_mode": ["all"]}
        config |= {"statistics": {**one, "summary_mode": "statistics"}, "tensor": one}
        path = out.with_suffix(".json")
        path.write_text(json.dumps(config))
        from msprobe.pytorch import PrecisionDebugger

        debugger = PrecisionDebugger(config_path=str(path))
        for step in range(STEPS):
            debugger.start(model=model)
            train(step, model, scale)
            debugger.stop()
            debugger.step()
        return
    from alignment.capture.config import CaptureConfig
    from alignment.capture.msprobe_writer import write_msprobe
    from alignment.capture.own_format import OwnCapture
    from alignment.capture.session import capture

    own = out.with_suffix(".own")
    detail = "tensor" if task == "tensor" else "statistics"
    with capture(model, CaptureConfig(level=level, detail=detail, values=False), directory=own) as session:
        for step in range(STEPS):
            with session.step(step):
                train(step, model, scale)
    for step in range(STEPS):
        rows = OwnCapture(own).rows(step, "train", 0)
        write_msprobe(out / f"step{step}" / "rank0", rows, level=level, task=task)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
