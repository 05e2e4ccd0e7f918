"""Builds the emulated NPU's shared library on first use and keeps it in a cache.

The cache entry is named by what the binary depends on (source, torch version, machine and compile command), so a new
torch or an edited source builds anew and an old entry is never loaded by mistake.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from alignment.errors import InputError, UnavailableError

SOURCE = Path(__file__).with_name("emu_npu.cpp")

# -O1: the kernels are torch's own, so higher levels only lengthen the build. No rpath: torch is loaded before the
# library, which thus binds to the very torch of this process and serves every environment with the same torch version.
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared")
_ERROR_LINES_SHOWN = 3


def cache_directory() -> Path:
    """``$ALIGNMENT_CACHE``, else ``$XDG_CACHE_HOME/alignment``, else ``~/.cache/alignment``."""
    if explicit := os.environ.get("ALIGNMENT_CACHE"):
        return Path(explicit).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "alignment"
    return Path.home() / ".cache" / "alignment"


def compiler() -> list[str]:
    """The compiler command: ``$CXX`` (which may carry arguments), else ``g++``."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def compile_flags() -> tuple[str, ...]:
    return (*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


def cache_key(source: bytes, *, torch_version: str, machine: str, command: tuple[str, ...]) -> str:
    """Name of a cache entry: 16 hex digits that change with anything the binary depends on."""
    digest = hashlib.sha256()
    for part in (source, torch_version.encode(), machine.encode(), *(word.encode() for word in command)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """Where the library for this source, torch and compile command is, or would be."""
    key = cache_key(
        SOURCE.read_bytes(),
        torch_version=torch.__version__,
        machine=platform.machine(),
        command=(*compiler(), *compile_flags()),
    )
    return cache_directory() / "emulated-npu" / f"libemu_npu-{key}.so"


def build() -> Path:
    """Return the path of the library, compiling it (about 12 s of CPU time) if the cache has none.

    Several processes may call this at once: one builds, the others wait. A build that fails or is killed leaves no
    entry behind.

    Raises:
        UnavailableError: there is no C++ compiler on this machine.
        InputError: the compiler failed (its first error lines are shown), or the cache directory cannot be written.
    """
    library = library_path()
    if library.is_file():
        return library
    command = _require_compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.is_file():  # another process may have built it while this one waited
                _compile(command, library)
    except OSError as error:
        raise InputError(
            "the emulated NPU cannot be built because its cache directory is not writable",
            where=library.parent,
            found=error.strerror or error,
            next_step="point ALIGNMENT_CACHE at a writable directory",
        ) from error
    return library


def _require_compiler() -> list[str]:
    command = compiler()
    if shutil.which(command[0]) is None:
        raise UnavailableError(
            "the emulated NPU is compiled on first use and this machine has no C++ compiler",
            expected="a compiler with C++20 (g++ 10 or newer)",
            found=f"no {command[0]!r} on PATH",
            next_step="install g++, or set CXX to another compiler",
        )
    return command


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], library: Path) -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="building-", dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        arguments = [
            *command,
            *compile_flags(),
            f"-I{root / 'include'}",
            f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
            "-o",
            str(built),
            str(SOURCE),
            f"-L{root / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
        ]
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise InputError(
                "the emulated NPU failed to compile",
                where=SOURCE,
                expected=f"a source that {command[0]} accepts with the headers of torch {torch.__version__}",
                found="\n  " + "\n  ".join(_first_errors(result.stderr)),
                next_step="compile with a compiler that knows C++20 (set CXX), or report the torch version",
            )
        with built.open("rb") as handle:
            os.fsync(handle.fileno())
        built.replace(library)


def _first_errors(stderr: str) -> list[str]:
    lines = stderr.splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["the compiler printed nothing"])[:_ERROR_LINES_SHOWN]
