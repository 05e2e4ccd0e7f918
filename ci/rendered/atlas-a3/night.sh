#!/usr/bin/env bash
# Rendered by ci/render.py from ci/nightly.yaml and ci/site.yaml: do not edit.
# Runs one night of row atlas-a3 and leaves everything in a folder: ci/rendered/atlas-a3/night.sh OUT
# The exit code is that of `alignment nightly run`; ci/rendered/call.sh says what it asks of people.
set -euo pipefail
out=${1:?usage: ci/rendered/atlas-a3/night.sh OUT}
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/../../.."
# 2 nodes: this machine is a pod of the cluster with the service account and the store of
# ci/rendered/common.yaml.
exec python3 ci/submit.py ci/rendered/atlas-a3/volcano-job.yaml --wait --minutes 355 --store /store --out "$out"
