#!/usr/bin/env bash
# Rendered by ci/render.py from ci/nightly.yaml, ci/site.yaml and ci/stacks/atlas.yaml: do not edit.
# Builds the image of row atlas-a3: ci/rendered/atlas-a3/build.sh [--push]
# CONTAINER_ENGINE is docker or podman; TORCH_INDEX may name an index of CPU wheels.
set -euo pipefail
cd "$(dirname "$0")/../../.."
engine=${CONTAINER_ENGINE:-docker}
image=registry.example.com/alignment/atlas-a3:nightly

"$engine" build --file ci/containers/atlas.Containerfile --tag "$image" \
  --build-arg BASE=quay.io/ascend/cann:8.2.rc2-a3-ubuntu22.04-py3.11 \
  --build-arg ROW=atlas-a3 \
  --build-arg MINDSPEED_REPOSITORY=https://gitcode.com/Ascend/MindSpeed \
  --build-arg MINDSPEED_REVISION=f321067c6fd1e32ad74848416942bdb899cf9627 \
  --build-arg VERL_REPOSITORY=https://github.com/volcengine/verl \
  --build-arg VERL_REVISION=e2d45b00e514e1fa914e32eeb9093226540b7560 \
  --build-arg STACK=ci/stacks/atlas.yaml \
  --build-arg COMMIT="${ALIGNMENT_COMMIT:-$(git rev-parse HEAD)}" \
  ${TORCH_INDEX:+--build-arg TORCH_INDEX="$TORCH_INDEX"} .
if [ "${1:-}" = --push ]; then
  "$engine" push "$image"
fi
