#!/usr/bin/env bash
# Records every baseline of this machine's device into a folder: unit, layer and end to end, in under five minutes on a GPU.
#
#   scripts/record_gpu_baselines.sh OUT [DEVICE] [more arguments of python -m alignment.baseline.record_all]
#
# DEVICE is cuda unless given. The machine needs Python >= 3.10 with torch, numpy, safetensors, pyyaml and transformers;
# no network, no Ray, no git. Where there is no git, say which commit this is: ALIGNMENT_COMMIT=<commit>.
# Run it again after an interruption: what is complete in OUT is skipped. Copy OUT/<kind>/ into baselines/ afterwards.
set -euo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
out=$1
device=${2:-cuda}
shift $(($# > 1 ? 2 : 1))

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
exec "${PYTHON:-python3}" -m alignment.baseline.record_all "$out" --device "$device" "$@"
