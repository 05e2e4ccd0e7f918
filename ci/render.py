"""Renders what follows from the matrix (nightly.yaml), the site (site.yaml) and the stack files::

    python ci/render.py            writes what is out of date
    python ci/render.py --check    writes nothing; names what is out of date and exits with 1
    python ci/render.py --into DIR writes everything below DIR

Build arguments and requirements of the containers, the scripts that build an image and run a night, the Kubernetes
manifests, and the pipelines of GitHub, GitLab and GitCode. No version, resource, schedule or exit code is written
twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from alignment.bisect.keys import nearest, only_known
from alignment.bisect.stack import Stack, load_stack, read_mapping
from alignment.errors import InputError
from alignment.files import write_atomically
from alignment.report.night_matrix import Matrix, Row, read_matrix

CI = Path(__file__).resolve().parent
ROOT = CI.parent
MARGIN = 30
"""Minutes beyond the sum of the phases' own: pulling the image, starting the cluster, writing the report."""

HOSTED = 360
"""Minutes after which GitHub and GitCode end a job of a hosted runner."""

BUILT_FROM_GIT = ("MindSpeed", "verl")
"""Components a recipe can install from their repositories."""

RESOURCES = ("huawei.com/Ascend910", "nvidia.com/gpu")
"""What the device plugins of Ascend (whole cards, A2 and A3) and NVIDIA register with Kubernetes."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What a chip is to a container engine and to Kubernetes."""

    name: str
    containerfile: str
    base: str
    runner: str | tuple[str, ...]
    resources: Mapping[str, Any]
    shared_memory: str
    device: Mapping[str, Any] = field(default_factory=dict)
    volcano: bool = False
    host_network: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    mounts: tuple[Mapping[str, str], ...] = ()
    container_options: tuple[str, ...] = ()
    env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ascend(self) -> bool:
        return str(self.device.get("resource", "")).startswith("huawei.com/")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where images and results live, and the chips that are there."""

    path: Path
    registry: str
    tag: str
    namespace: str
    queue: str
    store: Mapping[str, str]
    history: str
    runners: Mapping[str, Any]
    chips: Mapping[str, Chip]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A row with everything the templates need to know of it.

    ``stack_file`` is its path in the image. ``image_row`` is the row whose image it runs in: rows of one chip and stack
    share one. ``minutes`` is how long a night may take at most.
    """

    row: Row
    chip: Chip
    site: Site
    stack: Stack
    stack_file: str
    image_row: str
    minutes: int

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def cluster(self) -> bool:
        """Whether the row runs on several nodes of Kubernetes, and not in one container on its runner."""
        return self.row.nodes > 1

    @property
    def image(self) -> str:
        return self.row.image or f"{self.site.registry}/{self.image_row}:{self.site.tag}"

    @property
    def npus(self) -> int:
        return self.row.nodes * (self.row.cards or 0)

    @cached_property
    def base(self) -> str:
        """The base image: components of the stack in place of their names, as tags write them (8.2.rc2)."""

        def version(match: re.Match) -> str:
            pin = self.stack.pins.get(match[1])
            if pin is None:
                raise InputError(
                    "the base image names a component that the stack does not have",
                    where=f"{self.site.path}: chips.{self.chip.name}.base", found=match[0],
                    expected=", ".join(self.stack.pins),
                )  # fmt: skip
            return pin.version.lower()

        return re.sub(r"\{(\w+)\}", version, self.chip.base)

    @cached_property
    def build_arguments(self) -> dict[str, str]:
        """Every ARG of the recipe that this row sets, in the order of the recipe."""
        values = {"BASE": self.base, "ROW": self.image_row, "STACK": self.stack_file}
        for name in BUILT_FROM_GIT:
            pin = self.stack.pins.get(name)
            if pin is not None and pin.kind == "git":
                values |= {f"{name.upper()}_REPOSITORY": pin.repository, f"{name.upper()}_REVISION": pin.revision}
        return {name: values[name] for name in recipe_arguments(self.chip.containerfile) if name in values}

    @cached_property
    def requirements(self) -> list[str]:
        """The locked environment named like the stack, else like the recipe, with the releases of the stack."""
        locks = ROOT / "scripts" / "locks"
        own = locks / f"{self.row.stack.stem}.txt"
        lock = own if own.is_file() else locks / f"{self.chip.containerfile}.txt"
        pins = {}
        for line in lock.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                pins[_plain(name)] = (name, version)
        for name, pin in self.stack.pins.items():
            component = self.stack.component(name)
            if component.external or name == "python":
                continue
            if pin.kind == "release":
                pins[_plain(component.distribution)] = (component.distribution, pin.version)
            else:
                if name not in BUILT_FROM_GIT:
                    raise InputError(
                        "no container recipe builds this component from a repository", where=self.row.stack, found=name,
                        expected=", ".join(BUILT_FROM_GIT), next_step="pin a release, or add it to the recipe",
                    )  # fmt: skip
                pins.pop(_plain(component.distribution), None)
        return [f"{name}=={version}" for _, (name, version) in sorted(pins.items())]

    @cached_property
    def environment(self) -> dict[str, str]:
        """Of every pod and container of the row: the chip's, the row's, and the determinism switches that apply."""
        from alignment.devices.determinism import ENVIRONMENT, switches

        chosen = {name: str(value) for name, value in {**self.chip.env, **self.row.env}.items()}
        wanted = {
            switch.name: switch.wanted
            for switch in switches(self.row.device, max(self.npus, self.row.nodes, 1), chosen)
            if switch.where == ENVIRONMENT and switch.applies and not switch.satisfied_by(chosen.get(switch.name))
        }
        return {**chosen, **wanted}

    @property
    def labels(self) -> dict[str, str]:
        return {"app": "alignment-nightly", "alignment/row": self.name, **self.chip.labels}

    @property
    def ray_start(self) -> dict[str, str]:
        """Start parameters of Ray by KubeRay, which counts GPUs by itself and NPUs not at all."""
        return {"resources": f"'{json.dumps({'NPU': self.row.cards})}'"} if self.row.device == "npu" else {}

    @cached_property
    def annotations(self) -> dict[str, str]:
        return {name: value.replace("{npus}", str(self.npus)) for name, value in self.chip.annotations.items()}

    def runner(self, platform: str) -> list[str]:
        """Labels of the machine that builds the image, and that runs the night where it takes one container."""
        if isinstance(self.chip.runner, str):
            return list(self.site.runners[self.chip.runner][platform])
        return list(self.chip.runner)


def read_site(path: Path) -> Site:
    """The site file.

    Raises:
        InputError: a key is unknown (the nearest one is named), missing, or a chip's recipe does not exist.
    """
    data = read_mapping(path)
    keys = ("version", *(f.name for f in dataclasses.fields(Site) if f.name != "path"))
    _complete(only_known(data, keys, where=path, what="site file"), keys, path)
    if data["version"] != 1:
        raise InputError("a site file of another version", where=path, expected=1, found=data["version"])
    chips = {}
    fields = {f.name: f for f in dataclasses.fields(Chip) if f.name != "name"}
    for name, entry in data["chips"].items():
        where = f"{path}: chips.{name}"
        needed = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
        entry = _complete(only_known(entry, fields, where=where, what="chip"), needed, where)
        chips[str(name)] = Chip(name=str(name), **{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        if not (CI / "containers" / f"{chips[name].containerfile}.Containerfile").is_file():
            raise InputError("there is no such recipe", where=f"{where}.containerfile", found=chips[name].containerfile)
        resource = chips[name].device.get("resource")
        if chips[name].device and resource not in RESOURCES:
            raise InputError(
                "no device plugin registers this resource", where=f"{where}.device.resource",
                expected=nearest(str(resource), RESOURCES), found=resource,
            )  # fmt: skip
    return Site(path=path, chips=chips, **{k: data[k] for k in keys if k not in ("version", "chips")})


def recipe_arguments(containerfile: str) -> list[str]:
    """The ARGs of a recipe without those that have a default or come from the call."""
    text = (CI / "containers" / f"{containerfile}.Containerfile").read_text(encoding="utf-8")
    return [name for name in re.findall(r"^ARG (\w+)$", text, flags=re.M) if name != "COMMIT"]


def targets(matrix: Matrix, site: Site) -> list[Target]:
    """The rows of a matrix at a site.

    Raises:
        InputError: a row whose chip the site does not have, without a stack file, with more cards than a node has, or
            longer than its runner allows.
    """
    found: list[Target] = []
    images: dict[tuple[str, Path], str] = {}
    for row in matrix.rows:
        where = f"{matrix.path}: row {row.name}"
        if row.chip not in site.chips:
            raise InputError(
                "the site has no such chip", where=f"{where}.chip", expected=nearest(row.chip, site.chips),
                found=row.chip, next_step=f"describe it in {site.path.name}",
            )  # fmt: skip
        chip = site.chips[row.chip]
        if row.stack is None:
            raise InputError("a row of the nightly needs a stack file", where=where, expected="stack: stacks/NAME.yaml")
        per_node = chip.device.get("per_node", 0)
        if (row.cards or 0) > per_node:
            raise InputError(
                "more cards than a node has", where=f"{where}.cards", found=row.cards,
                expected=f"at most {per_node} (chips.{row.chip}.device.per_node)",
            )  # fmt: skip
        if row.nodes > 1 and not chip.volcano:
            raise InputError(
                "several nodes are started together, by Volcano", where=f"{where}.nodes", found=row.nodes,
                expected=f"1, or volcano: true for chips.{row.chip}",
            )  # fmt: skip
        minutes = round(sum(phase.timeout_minutes for phase in matrix.phases_of(row))) + MARGIN
        if chip.runner == "hosted" and minutes > HOSTED:
            raise InputError(
                "longer than a hosted runner allows", where=where, found=f"{minutes} minutes in all",
                expected=f"at most {HOSTED} with {MARGIN} beyond the phases' own",
            )  # fmt: skip
        image_row = images.setdefault((row.chip, row.stack), row.name)
        found.append(
            Target(
                row=row, chip=chip, site=site, stack=load_stack(row.stack), image_row=image_row, minutes=minutes,
                stack_file=f"ci/{_relative(row.stack, matrix.path.parent)}",
            )
        )  # fmt: skip
    return found


def render(matrix: Matrix, site: Site) -> dict[str, str]:
    """Path from the root of the repository → text, of every rendered file."""
    import jinja2  # only who renders needs it

    rows = targets(matrix, site)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(CI / "templates"), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.globals["expression"] = lambda text: "${{ " + text + " }}"
    environment.filters |= {"quoted": lambda value: json.dumps(str(value), ensure_ascii=False), "flow": _flow}
    schedules: dict[str, list[str]] = {}
    for target in rows:
        if target.row.schedule:
            schedules.setdefault(target.row.schedule, []).append(target.name)
    codes = dict(sorted(matrix.exit_codes.items()))
    shared = {"site": site, "targets": rows, "schedules": schedules, "exit_codes": codes}

    def text(template: str, **values: Any) -> str:
        return environment.get_template(template).render(**shared, **values)

    files = {
        "ci/rendered/common.yaml": text("common.yaml.j2"),
        "ci/rendered/call.sh": text("call.sh.j2"),
        ".github/workflows/nightly.yml": text("github.yml.j2"),
        ".github/actionlint.yaml": text("actionlint.yaml.j2", labels=own_labels(rows, site)),
        ".gitcode/workflows/nightly.yml": text("gitcode.yml.j2"),
        "ci/gitlab-ci.yml": text("gitlab.yml.j2"),
    }
    for target in rows:
        folder = f"ci/rendered/{target.name}"
        if target.image_row == target.name and not target.row.image:
            head = f"# From {target.stack_file} and scripts/locks, by ci/render.py.\n"
            files[f"{folder}/requirements.txt"] = head + "".join(f"{line}\n" for line in target.requirements)
            files[f"{folder}/build.sh"] = text("build.sh.j2", t=target)
        files[f"{folder}/night.sh"] = text("night.sh.j2", t=target)
        if target.chip.volcano:
            job = text("volcano-job.yaml.j2", t=target)
            files[f"{folder}/volcano-job.yaml"] = job
            files[f"{folder}/rayjob.yaml"] = text("rayjob.yaml.j2", t=target)
            files[f"{folder}/cronjob.yaml"] = text("cronjob-volcano.yaml.j2", t=target, job=job)
        else:
            files[f"{folder}/cronjob.yaml"] = text("cronjob.yaml.j2", t=target)
    return files


def own_labels(rows: list[Target], site: Site) -> list[str]:
    """Labels of self-hosted runners that GitHub does not give by itself."""
    given = {"self-hosted", "linux", "x64", "arm64"}
    labels = [label for t in rows if not isinstance(t.chip.runner, str) for label in t.chip.runner]
    return list(dict.fromkeys(label for label in [*labels, *site.runners["cluster"]] if label not in given))


def stale(files: Mapping[str, str], root: Path) -> list[str]:
    """What differs below ``root`` from what is rendered now, rendered files that nothing renders any more included."""
    differing = [name for name, text in files.items() if _read(root / name) != text]
    left = sorted(_relative(path, root) for path in (root / "ci" / "rendered").rglob("*") if path.is_file())
    return differing + [name for name in left if name not in files]


def write(files: Mapping[str, str], root: Path) -> list[str]:
    """Writes what is out of date and removes what nothing renders any more; says which."""
    changed = stale(files, root)
    for name in changed:
        path = root / name
        if name not in files:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda beside, text=files[name]: beside.write_text(text, encoding="utf-8"))
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    return changed


def _flow(value: Any) -> str:
    """A value as YAML on one line, which JSON is."""
    return json.dumps(value, ensure_ascii=False)


def _complete(entry: Mapping, keys, where: object) -> Mapping:
    for key in keys:
        if entry.get(key) is None:
            raise InputError("a key is missing", where=where, expected=key, found=", ".join(map(str, entry)))
    return entry


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.lower())


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _relative(path: Path, root: Path) -> str:
    return path.resolve().relative_to(root.resolve()).as_posix()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("::")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    parser.add_argument("--matrix", type=Path, default=CI / "nightly.yaml")
    parser.add_argument("--site", type=Path, default=CI / "site.yaml")
    parser.add_argument("--into", type=Path, default=ROOT, metavar="DIR", help="write below this folder")
    options = parser.parse_args(arguments)
    try:
        files = render(read_matrix(options.matrix), read_site(options.site))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        changed = stale(files, options.into)
        for name in changed:
            print(f"out of date: {name}", file=sys.stderr)
        print("run python ci/render.py" if changed else f"all {len(files)} files are up to date")
        return 1 if changed else 0
    for name in write(files, options.into):
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
