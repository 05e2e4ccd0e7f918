"""What a stack is made of: the components this product knows, from the driver up, and how a user adds another."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from alignment.bisect.keys import only_known
from alignment.bisect.outcomes import BisectError, Ending
from alignment.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a stack.

    ``distribution`` is its name on a package index and ``module`` what is imported; ``repository`` is where its commits
    are, below its ``subdirectory`` where it holds several packages. An ``external`` component is a fact of the
    machine or image, closed to us: it is searched by version only.
    """

    name: str
    distribution: str = ""
    module: str = ""
    repository: str = ""
    subdirectory: str = ""
    external: bool = False


def _package(name: str, module: str = "", repository: str = "", distribution: str = "") -> Component:
    return Component(name=name, distribution=distribution or name, module=module or name, repository=repository)


# From the ground up: where nothing else orders a change, what lies lower is changed first.
COMPONENTS: dict[str, Component] = {
    component.name: component
    for component in (
        Component(name="driver", external=True),
        Component(name="firmware", external=True),
        Component(name="CANN", external=True),
        Component(name="python"),
        _package("numpy", repository="https://github.com/numpy/numpy"),
        _package("torch", repository="https://github.com/pytorch/pytorch"),
        _package("torch_npu", distribution="torch-npu", repository="https://gitcode.com/Ascend/pytorch"),
        _package("triton-ascend", "triton", "https://gitcode.com/Ascend/triton-ascend"),
        _package("transformers", repository="https://github.com/huggingface/transformers"),
        _package("ray", repository="https://github.com/ray-project/ray"),
        _package("vllm", repository="https://github.com/vllm-project/vllm"),
        _package("vllm-ascend", "vllm_ascend", "https://github.com/vllm-project/vllm-ascend"),
        _package("megatron-core", "megatron.core", "https://github.com/NVIDIA/Megatron-LM"),
        _package("MindSpeed", "mindspeed", "https://gitcode.com/Ascend/MindSpeed", distribution="mindspeed"),
        _package("mbridge", repository="https://github.com/ISEEKYAN/mbridge"),
        _package("verl", repository="https://github.com/volcengine/verl"),
    )
}


def plain(name: str) -> str:
    """The spelling under which names are the same: ``torch-npu``, ``Torch_NPU`` and ``torch_npu`` are one."""
    return name.lower().replace("_", "-").replace(".", "-")


def find_component(name: str, defined: Mapping[str, Component] = {}, *, where: object = None) -> Component:
    """The component of that name, among the known ones and those a stack file defines.

    Raises:
        BisectError: nobody knows it; the nearest name is proposed.
    """
    exact = defined.get(name) or COMPONENTS.get(name)
    if exact is not None:
        return exact
    known = {plain(c.name): c for c in (*COMPONENTS.values(), *defined.values())}
    found = known.get(plain(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(plain(name), known, n=1)
    raise BisectError(
        "there is no such component",
        ending=Ending.UNKNOWN_COMPONENT,
        where=where,
        expected=f"{known[near[0]].name}?" if near else ", ".join(c.name for c in known.values()),
        found=name,
        next_step="add a package of your own under `define:` in the stack file",
    )


def define_components(data: object, *, where: object) -> dict[str, Component]:
    """The ``define:`` section of a stack file: name → ``{distribution, module, repository, external}``."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InputError(
            "`define` is not a mapping", where=where, expected="name: {distribution: …, module: …}", found=data
        )
    allowed = [f.name for f in fields(Component) if f.name != "name"]
    made = {}
    for name, entry in data.items():
        entry = dict(only_known(entry or {}, allowed, where=f"{where}: define.{name}", what="definition"))
        if not entry.get("external"):
            entry.setdefault("distribution", str(name))
            entry.setdefault("module", str(name).replace("-", "_"))
        made[str(name)] = Component(name=str(name), **entry)
    return made


def rank(name: str) -> tuple[int, str]:
    """Where a component stands in the stack, from the ground up; a user's own come last."""
    names = list(COMPONENTS)
    return (names.index(name) if name in COMPONENTS else len(names), name)
