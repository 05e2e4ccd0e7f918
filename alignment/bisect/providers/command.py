"""A user's own way into a stack: a script that is sourced, as CANN's `set_env.sh` is."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignment.bisect.providers.base import Environment, NotBuilt
from alignment.bisect.stack import Stack

PREFIX = "ALIGNMENT_STACK_"


@dataclass(frozen=True, kw_only=True)
class Activated(Environment):
    """Everything runs in a shell in which ``activation`` was executed first."""

    activation: str = ""

    def command(self, argv: Sequence[str], *, cwd: Path | None, variables: Mapping[str, str]) -> list[str]:
        return ["bash", "-c", f'set -e\n{self.activation}\nset +e\nexec "$@"', "bash", *argv]


@dataclass
class CommandProvider:
    """``activation`` is shell text (``source /usr/local/Ascend/ascend-toolkit/set_env.sh``); it sees the wanted stack
    as variables: ``ALIGNMENT_STACK_TORCH_NPU=2.7.1``, ``ALIGNMENT_STACK_CANN=8.2.RC2``, ``ALIGNMENT_STACK_DATE``,
    ``ALIGNMENT_STACK_IMAGE``, and for git pins ``…_REVISION``. ``python`` is the interpreter by its name after
    activation.
    """

    activation: str
    python: str = "python3"
    name: str = "command"

    @property
    def identity(self) -> str:
        return json.dumps([self.name, self.activation, self.python])

    def prepare(self, stack: Stack, *, slot: int = 0) -> Environment:
        began = time.monotonic()
        variables = {**stack_variables(stack), "ALIGNMENT_STACK_SLOT": str(slot), "PYTHONDONTWRITEBYTECODE": "1"}
        environment = Activated(stack=stack, python=self.python, variables=variables, activation=self.activation)
        done = environment.run(["true"], timeout=3600)
        if done.code != 0:
            raise NotBuilt(
                "build", f"the activation failed with code {done.code}: {done.tail}", transient=done.code == 75
            )
        return Activated(
            stack=stack,
            python=self.python,
            variables=variables,
            activation=self.activation,
            seconds=time.monotonic() - began,
        )


def stack_variables(stack: Stack) -> dict[str, str]:
    """A stack as variables of the environment."""
    found = {f"{PREFIX}DATE": stack.date, f"{PREFIX}IMAGE": stack.image, f"{PREFIX}NAME": stack.name}
    for name, pin in stack.pins.items():
        key = PREFIX + re.sub(r"\W", "_", name).upper()
        found[key] = pin.version
        if pin.kind == "git":
            found[f"{key}_REVISION"] = pin.revision
    return {k: v for k, v in found.items() if v}


def sourced(script: Path) -> str:
    """The activation that sources one script."""
    return f"source {shlex.quote(str(script))}"
