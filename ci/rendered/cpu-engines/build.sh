#!/usr/bin/env bash
# Rendered by ci/render.py from ci/nightly.yaml, ci/site.yaml and ci/stacks/cpu-engines.yaml: do not edit.
# Builds the image of row cpu-engines: ci/rendered/cpu-engines/build.sh [--push]
# CONTAINER_ENGINE is docker or podman; TORCH_INDEX may name an index of CPU wheels.
set -euo pipefail
cd "$(dirname "$0")/../../.."
engine=${CONTAINER_ENGINE:-docker}
image=registry.example.com/alignment/cpu-engines:nightly

"$engine" build --file ci/containers/cpu.Containerfile --tag "$image" \
  --build-arg BASE=docker.io/library/python:3.11-slim-bookworm \
  --build-arg ROW=cpu-engines \
  --build-arg STACK=ci/stacks/cpu-engines.yaml \
  --build-arg COMMIT="${ALIGNMENT_COMMIT:-$(git rev-parse HEAD)}" \
  ${TORCH_INDEX:+--build-arg TORCH_INDEX="$TORCH_INDEX"} .
if [ "${1:-}" = --push ]; then
  "$engine" push "$image"
fi
