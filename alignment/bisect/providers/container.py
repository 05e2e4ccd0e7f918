"""Containers: one image per stack, by docker, podman or a Kubernetes job, with the NPUs and the driver of the node."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from alignment.bisect.process import Finished, run_process, without_addresses
from alignment.bisect.providers.base import Environment, NotBuilt
from alignment.bisect.stack import Stack
from alignment.errors import InputError

ENGINES = ("docker", "podman", "k8s")
# What an Ascend container needs of its node: the management devices, the driver, and the tools that read it.
ASCEND_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
ASCEND_MOUNTS = (
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
)
PULL_SECONDS = 7200.0


@dataclass(frozen=True, kw_only=True)
class Container(Environment):
    """Commands run in a fresh container of the stack's image, with the suite and the records mounted at their own
    paths.
    """

    provider: ContainerProvider
    slot: int = 0

    def command(self, argv: Sequence[str], *, cwd: Path | None, variables: Mapping[str, str]) -> list[str]:
        return self.provider.command(self.stack, argv, cwd=cwd, variables=variables, slot=self.slot)

    def run(self, argv, *, cwd=None, variables=None, timeout=None) -> Finished:
        given = {**self.variables, **(variables or {})}
        if self.provider.engine == "k8s":
            return self.provider.run_job(self.stack, argv, cwd=cwd, variables=given, timeout=timeout, slot=self.slot)
        return run_process(self.command(argv, cwd=cwd, variables=given), timeout=timeout)


@dataclass
class ContainerProvider:
    """``engine`` is docker, podman or k8s. ``mounts`` are folders seen inside at the same path. ``npus`` are the
    numbers of the NPUs given to a container; simultaneous probes divide them among their ``slots``. ``options`` are
    further arguments of ``docker run``; ``job`` is a Kubernetes job (a mapping) that is filled in. ``images`` are the
    stacks that have images: a mixed stack runs in the nearest of them, into which its other packages are installed
    first.
    """

    engine: Literal["docker", "podman", "k8s"] = "docker"
    mounts: tuple[Path, ...] = ()
    npus: tuple[int, ...] = ()
    slots: int = 1
    python: str = "python3"
    options: tuple[str, ...] = ()
    namespace: str = "default"
    job: Mapping = field(default_factory=dict)
    images: tuple[Stack, ...] = ()
    name: str = "container"

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InputError(
                "there is no such container engine", where="--engine", expected=", ".join(ENGINES), found=self.engine
            )

    @property
    def identity(self) -> str:
        return json.dumps(
            [self.name, self.engine, len(self.npus) // max(self.slots, 1), self.python, list(self.options)]
        )

    def prepare(self, stack: Stack, *, slot: int = 0) -> Environment:
        began = time.monotonic()
        image, _ = self.recipe(stack)
        if not re.search(r"@sha256:[0-9a-f]{64}$", image):
            raise NotBuilt(
                "pins",
                f"the image {without_addresses(image)} is not named by its digest (…@sha256:…), so it may change",
            )
        tool = "kubectl" if self.engine == "k8s" else self.engine
        if shutil.which(tool) is None:
            raise NotBuilt("environment", f"{tool} is not installed")
        if self.engine != "k8s":
            done = run_process(self.pull_command(stack), timeout=PULL_SECONDS)
            if done.code != 0:
                raise NotBuilt(
                    "build",
                    f"the image could not be pulled: {without_addresses(done.stderr.strip()[-300:])}",
                    transient=True,
                )
        return Container(
            stack=stack,
            python=self.python,
            provider=self,
            slot=slot,
            seconds=time.monotonic() - began,
            variables={"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        )

    def recipe(self, stack: Stack) -> tuple[str, list[str]]:
        """The image a stack runs in, and the requirements to be installed into it first.

        Raises:
            NotBuilt: no image has the external facts and the Python of the stack.
        """
        if stack.image:
            return stack.image, []
        fits = []
        for candidate in self.images:
            changed = candidate.changed(stack)
            if candidate.image and all(
                n in stack.pins and n != "python" and not stack.component(n).external for n in changed
            ):
                fits.append((len(changed), candidate, changed))
        if not fits:
            raise NotBuilt(
                "pins", "no image of the given stacks has its CANN, driver and Python; packages alone can be exchanged"
            )
        _, nearest, changed = min(fits, key=lambda fit: fit[0])
        return nearest.image, [_requirement(stack, n) for n in changed]

    def inside(self, stack: Stack, argv: Sequence[str]) -> list[str]:
        """``argv`` after the installation of what the image lacks."""
        _, lacking = self.recipe(stack)
        if not lacking:
            return list(argv)
        install = f"{self.python} -m pip install --quiet --no-deps {shlex.join(lacking)} >&2 || exit 75"
        return ["sh", "-c", f'{install}\nexec "$@"', "sh", *argv]

    def pull_command(self, stack: Stack) -> list[str]:
        """Fetches the image where it is not there."""
        image = shlex.quote(self.recipe(stack)[0])
        test = f"{self.engine} image inspect {image} >/dev/null 2>&1 || exec {self.engine} pull --quiet {image}"
        return ["sh", "-c", test]

    def command(
        self, stack: Stack, argv: Sequence[str], *, cwd: Path | None, variables: Mapping[str, str], slot: int = 0
    ) -> list[str]:
        """``docker run`` or ``podman run``; for Kubernetes the command inside the job."""
        if self.engine == "k8s":
            return list(argv)
        line = [self.engine, "run", "--rm", "--network=host", "--ipc=host"]
        for npu in self.npus_of(slot):
            line += ["--device", f"/dev/davinci{npu}"]
        if self.npus:
            for device in ASCEND_DEVICES:
                line += ["--device", device]
            for mount in ASCEND_MOUNTS:
                line += ["--volume", f"{mount}:{mount}:ro"]
        for mount in self.mounts:
            line += ["--volume", f"{mount}:{mount}"]
        for key in sorted(variables):
            line += ["--env", f"{key}={variables[key]}"]
        if cwd is not None:
            line += ["--workdir", str(cwd)]
        return [*line, *self.options, self.recipe(stack)[0], *self.inside(stack, argv)]

    def npus_of(self, slot: int) -> tuple[int, ...]:
        """The share of the NPUs that one of the simultaneous probes has."""
        share = len(self.npus) // max(self.slots, 1)
        return self.npus[slot * share : (slot + 1) * share]

    def manifest(
        self, stack: Stack, argv: Sequence[str], *, cwd: Path | None, variables: Mapping[str, str], slot: int = 0
    ) -> dict:
        """A Kubernetes job that runs ``argv`` once in the stack's image."""
        base = json.loads(json.dumps(self.job or {}))
        told = hashlib.sha256(json.dumps([stack.digest, list(argv), slot]).encode()).hexdigest()[:10]
        container: dict = {
            "name": "probe",
            "image": self.recipe(stack)[0],
            "command": self.inside(stack, argv),
            "env": [{"name": k, "value": variables[k]} for k in sorted(variables)],
            "volumeMounts": [{"name": f"mount-{i}", "mountPath": str(m)} for i, m in enumerate(self.mounts)],
        }
        if cwd is not None:
            container["workingDir"] = str(cwd)
        share = len(self.npus_of(slot))
        if share:
            container["resources"] = {"limits": {"huawei.com/Ascend910": share}}
        pod = base.setdefault("spec", {}).setdefault("template", {}).setdefault("spec", {})
        base |= {"apiVersion": "batch/v1", "kind": "Job"}
        base.setdefault("metadata", {})["name"] = f"alignment-bisect-{told}"
        base["spec"]["backoffLimit"] = 0
        pod["restartPolicy"] = "Never"
        pod["containers"] = [container]
        pod["volumes"] = [
            *pod.get("volumes", ()),
            *({"name": f"mount-{i}", "hostPath": {"path": str(m)}} for i, m in enumerate(self.mounts)),
        ]
        return base

    def job_commands(self, manifest: Mapping) -> dict[str, list[str]]:
        """The ``kubectl`` lines of one job: create, wait, logs, code, delete."""
        name = manifest["metadata"]["name"]
        line = ["kubectl", "--namespace", self.namespace]
        return {
            "create": [*line, "create", "--filename", "-"],
            "state": [*line, "get", "job", name, "--output", "jsonpath={.status.succeeded}/{.status.failed}"],
            "logs": [*line, "logs", f"job/{name}"],
            "code": [
                *line,
                "get",
                "pod",
                "--selector",
                f"job-name={name}",
                "--output",
                "jsonpath={.items[0].status.containerStatuses[0].state.terminated.exitCode}",
            ],
            "delete": [*line, "delete", "job", name, "--ignore-not-found", "--wait=false"],
        }

    def run_job(self, stack, argv, *, cwd, variables, timeout, slot=0) -> Finished:
        """Runs one job to its end; its log is the standard output, the exit code is the container's."""
        manifest = self.manifest(stack, argv, cwd=cwd, variables=variables, slot=slot)
        commands, began = self.job_commands(manifest), time.monotonic()
        created = run_process(commands["create"], stdin=json.dumps(manifest), timeout=120)
        if created.code != 0:
            raise NotBuilt(
                "infrastructure",
                f"the job was refused: {without_addresses(created.stderr.strip()[-300:])}",
                transient=True,
            )
        try:
            while True:
                state = run_process(commands["state"], timeout=120).stdout
                if state.strip("/ \n"):
                    break
                if timeout is not None and time.monotonic() - began > timeout:
                    return Finished(code=None, stdout="", stderr="", seconds=time.monotonic() - began)
                time.sleep(2.0)
            code = run_process(commands["code"], timeout=120).stdout.strip()
            if not code.isdigit():
                raise NotBuilt(
                    "infrastructure",
                    "the job ended without an exit code (evicted, or its image could not be pulled)",
                    transient=True,
                )
            logs = run_process(commands["logs"], timeout=600).stdout
            return Finished(code=int(code), stdout=logs, stderr="", seconds=time.monotonic() - began)
        finally:
            run_process(commands["delete"], timeout=120)


def _requirement(stack: Stack, name: str) -> str:
    pin, distribution = stack.pins[name], stack.component(name).distribution
    return (
        f"{distribution} @ git+{pin.repository}@{pin.revision}"
        if pin.kind == "git"
        else f"{distribution}=={pin.version}"
    )
