"""Installing the emulated NPU: when it is refused, what it says, how it is built; in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from alignment.devices import emulated_npu
from alignment.devices.emulated_npu import build
from alignment.errors import InputError, UnavailableError

needs_emulation = pytest.mark.skipif(
    not emulated_npu.is_installed(), reason="tests the emulated NPU; run with --emulate-npu"
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run ``code`` in a fresh interpreter that requests no emulation unless ``environment`` does."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("ALIGNMENT_EMULATE_NPU", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


REFUSED = """
    from alignment.devices import emulated_npu
    from alignment.errors import InputError
    {before}
    try:
        emulated_npu.install()
    except InputError as error:
        print(type(error).__name__, error)
    print("installed", emulated_npu.is_installed())
"""


def refused(before: str = "", **environment: str) -> str:
    result = run(REFUSED.format(before=before), **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("installed False\n")
    return result.stdout


@pytest.fixture
def fake_torch_npu(tmp_path) -> Path:
    package = tmp_path / "site" / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('looking for it must not import it')\n")
    return package


def test_refused_where_the_real_torch_npu_is_installed(fake_torch_npu):
    text = refused(PYTHONPATH=str(fake_torch_npu.parent))
    assert text.startswith(
        f"InputError {fake_torch_npu / '__init__.py'}: the NPU is not emulated where the real torch_npu"
    )
    assert "Next: run without emulation (pytest -m npu)" in text


def test_refused_where_another_torch_npu_is_loaded():
    text = refused(before="import sys, types; sys.modules['torch_npu'] = types.ModuleType('torch_npu')")
    assert "the NPU is not emulated where the real torch_npu is installed" in text


def test_refused_where_another_backend_has_the_device():
    text = refused(before="import torch; torch.utils.rename_privateuse1_backend('mychip')")
    assert "another backend has taken torch's PrivateUse1 device" in text
    assert "found renamed to 'mychip'" in text


@pytest.mark.parametrize("count", ["0", "17", "two", "-1"])
def test_a_wrong_number_of_devices_is_refused(count, monkeypatch):
    monkeypatch.setenv("ALIGNMENT_EMULATED_NPU_COUNT", count)
    with pytest.raises(InputError, match=f"ALIGNMENT_EMULATED_NPU_COUNT: .*expected 1 to 16; found '{count}'"):
        emulated_npu._check_count()


def test_a_machine_without_a_compiler_gets_one_sentence(tmp_path):
    text = refused(ALIGNMENT_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert text.splitlines()[0] == (
        "UnavailableError the emulated NPU is compiled on first use and this machine has no C++ compiler; "
        "expected a compiler with C++20 (g++ 10 or newer); found no 'no-such-compiler' on PATH. "
        "Next: install g++, or set CXX to another compiler"
    )
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_needs_no_torch():
    result = run(
        """
        import sys
        from alignment.devices import emulated_npu
        assert "torch" not in sys.modules
        assert not emulated_npu.is_installed() and not emulated_npu.install_if_requested()
        assert "torch" not in sys.modules
        """
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("value", "outcome"), [("0", "False"), ("", "False"), ("yes", "expected 0 or 1; found 'yes'")])
def test_the_request_variable(value, outcome):
    code = """
    from alignment.devices import emulated_npu
    from alignment.errors import InputError
    try:
        print(emulated_npu.install_if_requested())
    except InputError as error:
        print(error)
    """
    assert outcome in run(code, ALIGNMENT_EMULATE_NPU=value).stdout


@pytest.mark.npu
@needs_emulation
def test_installing_is_silent_idempotent_and_inherited():
    # -W error turns any warning, such as torch's about replaced kernels, into a failure.
    result = run(
        """
        import warnings
        warnings.simplefilter("error")
        import os
        from alignment.devices import emulated_npu
        emulated_npu.install()
        assert emulated_npu.is_installed() and emulated_npu.install_if_requested()
        emulated_npu.install()
        assert os.environ["ALIGNMENT_EMULATE_NPU"] == "1", "the processes started from here are to do the same"
        import torch, torch_npu
        assert torch_npu.npu is torch.npu
        with torch.npu.device(1):
            assert torch.empty(1, device="npu").device.index == 1
        assert torch.npu.device_count() == 3
        """,
        ALIGNMENT_EMULATED_NPU_COUNT="3",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.npu
@needs_emulation
def test_importing_the_front_installs_the_device():
    """A process started by ``spawn`` has the parent's ``sys.path``, and may import torch_npu first."""
    shim = Path(build.SOURCE).with_name("shim")
    result = run("import torch_npu, torch; print(torch.ones(1, device='npu').device)", PYTHONPATH=str(shim))
    assert result.stdout == "npu:0\n", result.stderr


@pytest.mark.npu
@needs_emulation
def test_transfer_to_npu_runs_a_cuda_script():
    result = run(
        """
        from alignment.devices import emulated_npu
        assert emulated_npu.install_if_requested()
        import torch
        from torch import nn
        from torch_npu.contrib import transfer_to_npu

        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        torch.cuda.set_device(1)
        tensor = torch.ones(2, device="cuda")
        assert tensor.is_cuda and str(tensor.device) == "npu:1"
        assert torch.zeros(2, device=0).device.index == 0 and torch.ones(1).cuda(0).device.index == 0
        assert torch.ones(1).to(torch.device("cuda:0")).device.type == "npu"
        assert torch.ones(1).to(device="cuda").device.type == "npu"
        model = nn.Linear(2, 2).cuda()
        assert model.weight.device.index == 1
        with torch.autocast("cuda", torch.bfloat16):
            assert model(tensor).dtype == torch.bfloat16
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            assert torch.empty(1, device="cuda").device.index == 0
        assert torch.cuda.memory_allocated() > 0
        torch.distributed.init_process_group(
            "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        assert torch.distributed.get_backend() == "hccl"
        torch.distributed.all_reduce(tensor)
        print("done")
        """,
        ALIGNMENT_EMULATE_NPU="1",
    )
    assert result.stdout == "done\n", result.stderr


# ---- the build


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_compiler(tmp_path: Path, monkeypatch, script: str) -> Path:
    """A compiler that runs ``script``; ``$out`` is the file it is asked to write."""
    path = tmp_path / "fake-g++"
    path.write_text(
        '#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\nout="$2"\n' + f'echo run >> "{tmp_path}/runs"\n' + script
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return tmp_path / "runs"


def test_cache_directory(monkeypatch):
    monkeypatch.setenv("ALIGNMENT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert build.cache_directory() == Path("/a")
    monkeypatch.delenv("ALIGNMENT_CACHE")
    assert build.cache_directory() == Path("/x/alignment")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_directory() == Path.home() / ".cache" / "alignment"


def test_the_cache_key_changes_with_everything_the_binary_depends_on():
    base = {"source": b"int x;", "torch_version": "2.7.1", "machine": "aarch64", "command": ("g++", "-O1")}
    variants = [
        base,
        {**base, "source": b"int y;"},
        {**base, "torch_version": "2.7.2"},
        {**base, "machine": "x86_64"},
        {**base, "command": ("clang++", "-O1")},
        {**base, "command": ("g++", "-O2")},
        {**base, "command": ("g++-O1",)},
    ]
    keys = {build.cache_key(v.pop("source"), **v) for v in map(dict, variants)}
    assert len(keys) == len(variants)
    again = dict(base)
    assert build.cache_key(again.pop("source"), **again) in keys


def test_a_library_is_built_once(cache, tmp_path, monkeypatch):
    runs = fake_compiler(tmp_path, monkeypatch, 'echo library > "$out"')
    library = build.build()
    assert library == build.build() == build.library_path()
    assert library.read_text() == "library\n" and runs.read_text().count("run") == 1
    assert sorted(p.suffix for p in library.parent.iterdir()) == [".lock", ".so"]


def test_a_cached_library_needs_no_compiler(cache, tmp_path, monkeypatch):
    runs = fake_compiler(tmp_path, monkeypatch, 'echo library > "$out"')
    library = build.build()
    (tmp_path / "fake-g++").unlink()
    assert build.build() == library and runs.read_text().count("run") == 1
    library.unlink()
    with pytest.raises(UnavailableError, match="has no C.. compiler"):
        build.build()


def test_concurrent_builds_compile_once(cache, tmp_path, monkeypatch):
    runs = fake_compiler(tmp_path, monkeypatch, 'sleep 1; echo library > "$out"')
    with multiprocessing.get_context("fork").Pool(3) as pool:  # a fork shares the torch that is already imported
        libraries = [pool.apply_async(build.build) for _ in range(3)]
        assert {library.get(timeout=60) for library in libraries} == {build.library_path()}
    assert runs.read_text().count("run") == 1


def test_a_failed_compilation_shows_its_first_errors_and_leaves_nothing(cache, tmp_path, monkeypatch):
    script = (
        'echo partial > "$out"; for i in 1 2 3 4; do echo "emu_npu.cpp:$i: error: no such thing $i" >&2; done; exit 1'
    )
    fake_compiler(tmp_path, monkeypatch, script)
    with pytest.raises(InputError) as caught:
        build.build()
    text = str(caught.value)
    assert text.startswith(f"{build.SOURCE}: the emulated NPU failed to compile; expected a source that")
    assert f"torch {torch.__version__}" in text
    assert "emu_npu.cpp:1: error: no such thing 1\n  emu_npu.cpp:2" in text and "no such thing 4" not in text
    assert [p.suffix for p in build.library_path().parent.iterdir()] == [".lock"]


def test_an_unwritable_cache_is_an_error_that_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        InputError, match="cache directory is not writable.*point ALIGNMENT_CACHE at a writable directory"
    ):
        build.build()
