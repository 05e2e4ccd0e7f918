#!/usr/bin/env bash
# The newcomer's path in a fresh folder and a fresh environment, with the documentation's own commands: the README's first
# block (clone → verdict), then every block of the tutorial (→ own fault found), each held to what the page says: its exit
# code, and the verdict in the output that is printed below it. Times are measured from the clone on.
#
#   scripts/newcomer.sh [--junitxml FILE] REPOSITORY [FOLDER]    FOLDER (default: a new one) must be empty
#   scripts/newcomer.sh --list REPOSITORY      the steps of a checkout, and what is expected of each; runs nothing
#
# REPOSITORY is a path or an address; a folder without history, as in a container image, is cloned as one commit. FILE gets
# a test case per step that was walked, as the nightly judges it.
# Bars in seconds: NEWCOMER_VERDICT (600) from the clone to the verdict, NEWCOMER_FAULT (3600) to the module of the own fault.
# Exit code 0: every step as the pages say, inside the bars; 1: not; 2: usage, or a page lacks what this script needs.
set -euo pipefail

usage() { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Writes one folder per step: command, exit (its code), expected (verdict lines), title.
extract() { # CHECKOUT STEPS
  python3 - "$1" "$2" <<'PYTHON'
import re
import sys
from pathlib import Path

checkout, steps = map(Path, sys.argv[1:])
FENCE = re.compile(r"^(#+ [^\n]+)$|^```(\w+)\n(.*?)^```$|<!--\s*(?:needs (\w+)|exits (\d+)).*?-->", re.M | re.S)
# Of the output on a page these lines are promises; numbers behind them depend on the machine.
PROMISES = (r"(?:MIS)?ALIGNED:", r"first divergence: step \d+, \w+", r"first misaligned: .*?first introduced divergence: \S+",
            r"\d+ of \d+ defects caught, \d+ placed right")  # fmt: skip
ELSEWHERE = ("npu", "gpu", "cluster", "container", "engine", "source", "network")


def blocks(page):
    """(heading, command, exit code, promises) of the bash blocks of a page that a laptop can run."""
    path = checkout / page
    if not path.is_file():
        sys.exit(f"{page}: there is no such page")
    heading, needs, code, found = "", None, 0, []
    for title, language, text, kind, number in FENCE.findall(path.read_text(encoding="utf-8")):
        if title:
            heading = title.lstrip("# ")
        elif kind or number:
            needs, code = kind or needs, int(number or code)
        elif language == "bash":
            if needs not in ELSEWHERE:
                found.append([heading, text, code, []])
            needs, code = None, 0
        elif language == "text" and found:
            lines = (re.match("|".join(PROMISES), line) for line in text.splitlines())
            found[-1][3] += [match[0] for match in lines if match]
    return found


def require(holds, message):
    if not holds:
        sys.exit(message)


run, *_ = blocks("README.md") or [None]
require(run and run[1].rstrip().endswith("alignment run"), "README.md: the first bash block does not end in 'alignment run'")
said = re.search("^ALIGNED:", (checkout / "README.md").read_text(encoding="utf-8"), re.M)
require(said, "README.md: no output ends in a line 'ALIGNED: …'")
tutorial = blocks("docs/tutorial.md")
for promise in ("MISALIGNED:", "first misaligned: ", "1 of 1 defects caught, 1 placed right"):
    require(any(p.startswith(promise) for b in tutorial for p in b[3]), f"docs/tutorial.md: no step promises {promise!r}")
require(any("--fault" in b[1] and b[2] == 1 for b in tutorial), "docs/tutorial.md: no step with --fault is declared to exit 1")
named = [i for i, b in enumerate(tutorial) if any(p.startswith("first misaligned") for p in b[3])]
for number, (heading, text, code, promises) in enumerate([[*run[:3], ["ALIGNED:"]], *tutorial]):
    folder = steps / f"{number:02d}"
    folder.mkdir(parents=True)
    bar = "verdict" if number == 0 else "fault" if number - 1 == named[0] else ""
    page = "README.md" if number == 0 else "docs/tutorial.md"
    for name, value in {"command": text, "exit": str(code), "bar": bar, "title": f"{page}: {heading}"}.items():
        (folder / name).write_text(value, encoding="utf-8")
    (folder / "expected").write_text("".join(p + "\n" for p in promises), encoding="utf-8")
PYTHON
}

if [ "${1:-}" = --list ]; then
  [ $# -eq 2 ] || usage
  steps=$(mktemp -d) && trap 'rm -rf "$steps"' EXIT
  extract "$2" "$steps" || exit 2
  for step in "$steps"/*/; do
    printf '%s\n' "$(cat "$step/title")"
    sed 's/^/    /' "$step/command"
    printf '  exit code %s%s\n' "$(cat "$step/exit")" "$(sed 's/^/; says: /' "$step/expected" | tr -d '\n')"
  done
  exit 0
fi
junit=
if [ "${1:-}" = --junitxml ]; then
  [ -n "${2:-}" ] || usage
  case $2 in /*) junit=$2 ;; *) junit=$PWD/$2 ;; esac
  shift 2
fi
{ [ $# -ge 1 ] && [ $# -le 2 ]; } || usage
repository=$1 folder=${2:-$(mktemp -d)}
[ -z "$(ls -A "$folder" 2>/dev/null)" ] || { echo "$folder is not empty" >&2; exit 2; }
mkdir -p "$folder/steps" && folder=$(cd "$folder" && pwd)
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME

# Notes what a step does otherwise than its page says.
fail() {
  failed=1
  echo "  FAIL: $1"
  echo "$1" >> "$step/failures"
}

escaped() { tr -d '\000-\010\013\014\016-\037' | sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g; s/"/\&quot;/g'; }

# Writes the steps that were walked as a JUnit file, whole or not at all.
write_junit() {
  [ -n "$junit" ] || return 0
  local taken=("$folder"/steps/*/seconds) red=("$folder"/steps/*/failures) place
  [ -e "${red[0]}" ] || red=()
  {
    echo '<?xml version="1.0" encoding="utf-8"?>'
    echo "<testsuites><testsuite name=\"newcomer\" tests=\"${#taken[@]}\" failures=\"${#red[@]}\" time=\"$SECONDS\">"
    for place in "${taken[@]%/seconds}"; do
      # Two blocks may stand under one heading: the number tells them apart.
      echo "<testcase classname=\"newcomer\" name=\"${place##*/} $(escaped < "$place/title")\" time=\"$(cat "$place/seconds")\">"
      if [ -e "$place/failures" ]; then
        echo "<failure message=\"$(escaped < "$place/failures")\">$(tail -n 20 "$place/output" | escaped)</failure>"
      fi
      echo '</testcase>'
    done
    echo '</testsuite></testsuites>'
  } > "$junit.part"
  mv "$junit.part" "$junit"
}

if [ -d "$repository" ] && ! git -C "$repository" rev-parse --git-dir > /dev/null 2>&1; then
  one_commit() { git --git-dir="$folder/origin.git" --work-tree="$repository" -c user.name=n -c user.email=n@example.org "$@"; }
  git init -q --bare "$folder/origin.git"
  one_commit add -A
  one_commit commit -q -m "$repository"
  repository=$folder/origin.git
fi
SECONDS=0
git clone -q "$repository" "$folder/alignment"
echo "clone: $SECONDS s"
extract "$folder/alignment" "$folder/steps" || exit 2
cd "$folder/alignment"
failed=0
for step in "$folder"/steps/*/; do
  began=$SECONDS code=0
  set +eu # the reader's shell goes on after a red verdict
  eval "$(cat "$step/command")" > "$step/output" 2>&1 < /dev/null
  code=$?
  set -eu
  echo "$SECONDS s (+$((SECONDS - began))): $(cat "$step/title"): exit code $code"
  echo $((SECONDS - began)) > "$step/seconds"
  [ "$code" = "$(cat "$step/exit")" ] || fail "the page says exit code $(cat "$step/exit")"
  while IFS= read -r promise; do
    promise=$promise awk 'index($0, ENVIRON["promise"]) == 1 { said = 1 } END { exit !said }' "$step/output" ||
      fail "the page says '$promise'"
  done < "$step/expected"
  bar=$(cat "$step/bar")
  case $bar in
    verdict) limit=${NEWCOMER_VERDICT:-600} what="clone to verdict" ;;
    fault) limit=${NEWCOMER_FAULT:-3600} what="clone to the module of the own fault" ;;
    *) limit='' ;;
  esac
  if [ -n "$limit" ]; then
    echo "  $what: $SECONDS s of $limit s"
    [ "$SECONDS" -le "$limit" ] || fail "over the bar: $what: $SECONDS s of $limit s"
  fi
  if [ "$failed" = 1 ]; then
    tail -n 20 "$step/output" | sed 's/^/    /'
    echo "everything: $folder"
    write_junit
    exit 1
  fi
done
write_junit
echo "as the pages say, in $SECONDS s; everything: $folder"
