#!/usr/bin/env bash
# Rendered by ci/render.py from ci/nightly.yaml and ci/site.yaml: do not edit.
# Runs one night of row cpu-newcomer and leaves everything in a folder: ci/rendered/cpu-newcomer/night.sh OUT
# The exit code is that of `alignment nightly run`; ci/rendered/call.sh says what it asks of people.
set -euo pipefail
out=${1:?usage: ci/rendered/cpu-newcomer/night.sh OUT}
mkdir -p "$out"
out=$(realpath "$out")
history=${ALIGNMENT_HISTORY:-history} # kept between nights: what is flaky, what drifts
mkdir -p "$history"
history=$(realpath "$history")
cd "$(dirname "$0")/../../.."
exec "${CONTAINER_ENGINE:-docker}" run --rm --network=host --shm-size=8g \
  --env VLLM_ENABLE_V1_MULTIPROCESSING=0 \
  --env ALIGNMENT_ROLE=alone \
  --env ALIGNMENT_HISTORY=/history --volume "$history":/history --volume "$out":/store \
  registry.example.com/alignment/cpu:nightly python ci/launch.py --row cpu-newcomer --store /store
