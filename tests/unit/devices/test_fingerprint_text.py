"""Fingerprints, and the parsers of the text that drivers and toolkits give."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from alignment.devices import fingerprint as fp
from alignment.devices.base import get_device
from alignment.devices.fingerprint import Fingerprint
from alignment.errors import InputError

DRIVER_INFO = """Version=24.1.0.3
ascendhal_version=7.35.23
aicpu_version=1.0
Innerversion=V100R001C19SPC003B110
compatible_version=[V100R001C30],[V100R001C13]
compatible_version_fw=[7.0.0,7.5.99]
"""

TOOLKIT_INFO = """package_name=Ascend-cann-toolkit
version=8.2.RC2
innerversion=V100R001C22SPC002B220
compatible_version=[V100R001C15],[V100R001C22]
arch=aarch64
os=linux
path=/usr/local/Ascend/ascend-toolkit/8.2.RC2/aarch64-linux
"""

VERSION_CFG = """# version: 1.0
runtime_running_version=[7.7.0.1.231:8.1.RC1]
compiler_running_version=[7.7.0.1.231:8.1.RC1]
"""

NPU_SMI_A2 = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0.3                 Version: 24.1.0.3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 90.4        32                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          41697/ 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Warning       | 92.9        33                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3412 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 19334         | python                   | 38472                   |
+===========================+===============+====================================================+
"""

NPU_SMI_A3 = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3.7               Version: 24.1.rc3.7                                           |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.9       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3412 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3189 / 65536         |
+===========================+===============+====================================================+
"""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (DRIVER_INFO, "24.1.0.3"),
        (TOOLKIT_INFO, "8.2.RC2"),
        (VERSION_CFG, "8.1.RC1"),
        ("", None),
        ("nothing here", None),
    ],
)
def test_version_of_an_ascend_information_file(text, version):
    assert fp.parse_version(text) == version


def test_npu_smi_lists_every_chip_and_no_process():
    table = fp.parse_npu_smi(NPU_SMI_A2)
    assert table.version == "24.1.0.3"
    assert [(c.npu, c.chip, c.name, c.health, c.bus_id, c.hbm_total_mb) for c in table.chips] == [
        (0, 0, "910B3", "OK", "0000:C1:00.0", 65536),
        (1, 0, "910B3", "Warning", "0000:C2:00.0", 65536),
    ]


def test_npu_smi_with_two_chips_per_card():
    table = fp.parse_npu_smi(NPU_SMI_A3)
    assert [(c.npu, c.chip, c.name) for c in table.chips] == [(0, 0, "Ascend910"), (0, 1, "Ascend910")]


def test_text_that_is_not_npu_smi_is_refused():
    with pytest.raises(InputError, match="not the output of npu-smi info.*found dcmi model initialized failed"):
        fp.parse_npu_smi("dcmi model initialized failed, because the device is used.\n")


def test_cann_and_driver_versions_are_read_from_their_files(tmp_path):
    info = tmp_path / "ascend-toolkit" / "latest" / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text(TOOLKIT_INFO)
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text(DRIVER_INFO)
    assert fp.cann_version({}, tmp_path) == "8.2.RC2"
    assert fp.ascend_driver_version(tmp_path) == "24.1.0.3"
    assert fp.ascend_firmware_version(tmp_path) == "unknown"


def test_the_toolkit_in_use_wins_over_the_default_place(tmp_path):
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann" / "version.cfg").write_text(VERSION_CFG)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "ascend_toolkit_install.info").write_text(TOOLKIT_INFO)
    assert fp.cann_version({}, tmp_path) == "8.1.RC1"
    assert fp.cann_version({"ASCEND_TOOLKIT_HOME": str(mine)}, tmp_path) == "8.2.RC2"


def test_cann_that_is_not_there_is_unknown(tmp_path):
    assert fp.cann_version({}, tmp_path) == "unknown"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (builder)\n",
    ],
)
def test_nvidia_driver_version(text):
    assert fp.parse_nvidia_version(text) == "550.54.15"
    assert fp.parse_nvidia_version("something else") is None


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (
            "processor\t: 0\nmodel name\t: AMD EPYC 9654\n\nprocessor\t: 1\nmodel name\t: AMD EPYC 9654\n",
            "AMD EPYC 9654",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x48\nCPU part\t: 0xd01\n", "Arm implementer 0x48 part 0xd01"),
        ("", None),
    ],
)
def test_cpu_model(text, model):
    assert fp.parse_cpu_model(text) == model


def test_torch_build():
    text = (
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605\n"
        "  - Intel(R) MKL-DNN v3.7.1 (Git Hash 8d26)\n  - OpenMP 201511 (a.k.a. OpenMP 4.5)\n"
        "  - CPU capability usage: AVX512\n  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release"
    )
    assert fp.parse_torch_build(text) == {
        "blas": "mkl",
        "mkl": "2024.2-Product",
        "onednn": "3.7.1",
        "openmp": "201511",
        "isa": "AVX512",
    }


def test_cpu_fingerprint_survives_json():
    found = get_device("cpu").fingerprint()
    assert found.threads == torch.get_num_threads()
    assert found.chip != ""
    assert found.details["isa"] == torch.backends.cpu.get_cpu_capability()
    assert Fingerprint.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_kernel_threads_are_part_of_the_identity():
    before = torch.get_num_threads()
    one = get_device("cpu").fingerprint()
    torch.set_num_threads(before + 1)
    try:
        other = get_device("cpu").fingerprint()
    finally:
        torch.set_num_threads(before)
    assert one.differences(other) == {"threads": (before, before + 1)}
    assert one.differences(one) == {}


def test_differences_name_the_detail():
    base = dict(kind="cpu", label="cpu", chip="x", driver="none", runtime="", cores=1, threads=1)
    one, other = Fingerprint(**base, details={"isa": "AVX2"}), Fingerprint(**base, details={"isa": "AVX512"})
    assert one.differences(other) == {"details.isa": ("AVX2", "AVX512")}


def test_a_foreign_dictionary_is_refused():
    with pytest.raises(InputError, match=r"not a device fingerprint.*unknown \['speed'\], missing \['chip'"):
        Fingerprint.from_dict({"kind": "cpu", "speed": 1})
