#!/usr/bin/env bash
# Rendered by ci/render.py from the exit codes of ci/nightly.yaml: do not edit.
# Says what the exit code of a night asks of people: ci/rendered/call.sh CODE [OUT]
# page fails, so that the pipeline is red and notifies; warn is an annotation; ignore is nothing. No code, or one that is not
# named, is a night that did not end as one: page. OUT is what the night left: it may warn though nothing failed (drift).
set -euo pipefail
code=${1:-none}
case "$code" in
  0) call=ignore ;;
  4) call=warn ;;
  1 | 2 | 3) call=page ;;
  *) call=page ;;
esac
if [ "$call" = ignore ] && [ -n "${2:-}" ] && grep -rqs --include=launch.json '"call": "warn"' "$2"; then
  call=warn
fi
mark=
if [ "${GITHUB_ACTIONS:-}" = true ]; then
  case "$call" in
    page) mark="::error::" ;;
    warn) mark="::warning::" ;;
  esac
fi
echo "${mark}$call: the night ended with exit code $code"
[ "$call" != page ]
