"""What a device is: chip, driver, runtime, cores and kernel threads, with the parsers of the files that say so."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from alignment.errors import InputError

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The identity of a device, stored in the provenance of every baseline and run.

    Attributes:
        kind: ``cpu``, ``cuda`` or ``npu``.
        label: the kind as it is shown; ``npu (emulated)`` for the emulated one.
        chip: model name, for example ``910B3``, ``NVIDIA H200`` or ``AMD EPYC 9654``; ``unknown`` where it cannot be
            read.
        driver: version of the kernel driver; ``none`` for the CPU.
        runtime: CANN, CUDA or the CPU math libraries torch was built with.
        cores: AI cores, streaming multiprocessors, or logical CPUs.
        threads: host threads a kernel may use (``torch.get_num_threads()``): it changes the reduction order on the CPU.
        emulated: True when host memory stands in for the device; such a fingerprint may never enter a baseline.
        details: further facts by name (instruction set, BLAS, firmware, versions).
    """

    kind: str
    label: str
    chip: str
    driver: str
    runtime: str
    cores: int
    threads: int
    emulated: bool = False
    details: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        data = asdict(self)
        data["details"] = dict(self.details)
        return data

    @classmethod
    def from_dict(cls, data: Mapping) -> Fingerprint:
        """The inverse of :meth:`to_dict`. Raises InputError on unknown or missing fields."""
        known = {f.name for f in fields(cls)}
        required = known - {"emulated", "details"}
        unknown, missing = sorted(set(data) - known), sorted(required - set(data))
        if unknown or missing:
            raise InputError(
                "not a device fingerprint",
                where="fingerprint",
                expected=f"the fields {', '.join(sorted(known))}",
                found=f"unknown {unknown or 'none'}, missing {missing or 'none'}",
            )
        return cls(**data)

    def differences(self, other: Fingerprint) -> dict[str, tuple[object, object]]:
        """Fields that differ, as ``{name: (self, other)}``; details are compared key by key under ``details.<key>``."""
        found = {
            f.name: (getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
            if f.name != "details" and getattr(self, f.name) != getattr(other, f.name)
        }
        for key in sorted(set(self.details) | set(other.details)):
            pair = (self.details.get(key), other.details.get(key))
            if pair[0] != pair[1]:
                found[f"details.{key}"] = pair
        return found


# --- CANN and the Ascend driver ------------------------------------------------------------------------------------

ASCEND_ROOT = Path("/usr/local/Ascend")


def parse_key_values(text: str) -> dict[str, str]:
    """``key=value`` lines of an Ascend information file; keys are lower-cased, comments and other lines are skipped.

    Covers the driver's ``version.info`` (``Version=24.1.rc1``), the toolkit's ``ascend_toolkit_install.info``
    (``version=8.2.RC1``) and ``version.cfg`` (``runtime_running_version=[7.7.0.1.231:8.2.RC1]``).
    """
    pairs = {}
    for line in text.splitlines():
        key, sign, value = line.strip().partition("=")
        if sign and not key.startswith("#"):
            pairs[key.strip().lower()] = value.strip()
    return pairs


def parse_version(text: str) -> str | None:
    """The version an Ascend information file states, or None where it states none."""
    pairs = parse_key_values(text)
    if pairs.get("version"):
        return pairs["version"]
    for key in ("runtime_running_version", "runtime_installed_version"):
        match = re.fullmatch(r"\[(?:[^:\]]*:)?([^\]]+)\]", pairs.get(key, ""))
        if match:
            return match.group(1)
    return None


@dataclass(frozen=True, kw_only=True)
class NpuSmiChip:
    """One chip row of ``npu-smi info``."""

    npu: int
    chip: int
    name: str
    health: str
    bus_id: str
    hbm_total_mb: int | None


@dataclass(frozen=True, kw_only=True)
class NpuSmi:
    """``npu-smi info`` as data: the driver package's version and the chips it lists."""

    version: str
    chips: tuple[NpuSmiChip, ...]


def parse_npu_smi(text: str) -> NpuSmi:
    """Read the table of ``npu-smi info`` (layouts of the drivers 22 to 25).

    Every chip takes two rows: ``| npu name | health | …`` then ``| chip [physical id] | bus id | … used / total |``.
    Raises InputError when the text has no version line.
    """
    version = re.search(r"npu-smi\s+\S+\s+Version:\s*(\S+)", text)
    if not version:
        raise InputError(
            "this is not the output of npu-smi info",
            where="npu-smi info",
            expected="a line 'npu-smi <version> Version: <version>'",
            found=(text.strip().splitlines() or ["nothing"])[0][:120],
        )
    chips, first = [], None
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        head = cells[0].split()
        if re.fullmatch(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]", cells[1]) and first:
            totals = re.findall(r"/\s*(\d+)", cells[2])
            chips.append(
                NpuSmiChip(
                    npu=int(first[0]),
                    chip=int(head[0]),
                    name=first[1],
                    health=first[2],
                    bus_id=cells[1],
                    hbm_total_mb=int(totals[-1]) if totals else None,
                )
            )
            first = None
        elif len(head) == 2 and head[0].isdigit():
            first = (head[0], head[1], cells[1])
    return NpuSmi(version=version.group(1), chips=tuple(chips))


def cann_version(environ: Mapping[str, str] = os.environ, root: Path = ASCEND_ROOT) -> str:
    """The CANN toolkit's version from its information files; ``unknown`` where none can be read.

    Looks in ``$ASCEND_TOOLKIT_HOME`` and ``$ASCEND_HOME_PATH`` (set by CANN's ``set_env.sh``), then in the default
    places of the 8.x (``ascend-toolkit/latest``) and later (``cann``) packages.
    """
    homes = [Path(environ[k]) for k in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH") if environ.get(k)]
    homes += [root / "ascend-toolkit" / "latest", root / "cann"]
    arch = f"{platform.machine()}-linux"
    for home in homes:
        for name in (
            f"{arch}/ascend_toolkit_install.info",
            "ascend_toolkit_install.info",
            "version.cfg",
            "version.info",
        ):
            version = _version_of(home / name)
            if version:
                return version
    return UNKNOWN


def ascend_driver_version(root: Path = ASCEND_ROOT) -> str:
    """The Ascend driver's version from ``driver/version.info``, else from ``npu-smi info``; else ``unknown``."""
    version = _version_of(root / "driver" / "version.info")
    if version:
        return version
    text = command_output("npu-smi", "info")
    return parse_npu_smi(text).version if text and "npu-smi" in text else UNKNOWN


def ascend_firmware_version(root: Path = ASCEND_ROOT) -> str:
    """The Ascend firmware's version from ``firmware/version.info``; ``unknown`` where it cannot be read."""
    return _version_of(root / "firmware" / "version.info") or UNKNOWN


def _version_of(path: Path) -> str | None:
    try:
        return parse_version(path.read_text(errors="replace"))
    except OSError:
        return None


# --- NVIDIA --------------------------------------------------------------------------------------------------------


def parse_nvidia_version(text: str) -> str | None:
    """The driver version in ``/proc/driver/nvidia/version`` (closed and open kernel modules), or None."""
    match = re.search(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else None


def nvidia_driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The NVIDIA driver's version; ``unknown`` where neither the kernel nor ``nvidia-smi`` tells it."""
    try:
        version = parse_nvidia_version(path.read_text(errors="replace"))
    except OSError:
        version = None
    if version:
        return version
    text = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.strip().splitlines()[0].strip() if text and text.strip() else UNKNOWN


# --- CPU -----------------------------------------------------------------------------------------------------------


def parse_cpu_model(text: str) -> str | None:
    """The model in ``/proc/cpuinfo``: ``model name`` on x86, ``CPU implementer/part`` on Arm, or None."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        key, sign, value = line.partition(":")
        if sign:
            pairs.setdefault(key.strip().lower(), value.strip())
    if pairs.get("model name"):
        return pairs["model name"]
    if pairs.get("cpu part"):
        return f"Arm implementer {pairs.get('cpu implementer', '?')} part {pairs['cpu part']}"
    return None


def parse_torch_build(text: str) -> dict[str, str]:
    """BLAS, oneDNN, OpenMP and instruction set from ``torch.__config__.show()``."""
    found = {}
    for name, pattern in (
        ("blas", r"BLAS_INFO=([^,\s]+)"),
        ("mkl", r"oneAPI Math Kernel Library Version (\S+)"),
        ("onednn", r"(?:MKL-DNN|oneDNN)[^\n]*?\bv(\d+\.\d+\.\d+)"),
        ("openmp", r"OpenMP (\d+)"),
        ("isa", r"CPU capability usage: (\S+)"),
    ):
        match = re.search(pattern, text)
        if match:
            found[name] = match.group(1)
    return found


def command_output(*command: str) -> str | None:
    """Standard output of a read-only query command, or None when it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
