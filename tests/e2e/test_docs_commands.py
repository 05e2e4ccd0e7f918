"""Every command of the documentation is executed, page by page, from top to bottom, in a copy of the repository.

The commands of a page build on each other, as its reader would type them. What needs a device, an engine or a cluster
says so in a comment before its block, with the reason. What needs an engine is executed where the engine is installed
(``-m "docs and engine"``). What needs a device or a cluster is executed with the stand-in that a comment declares: the
emulated NPU, the CPU for a GPU, a Ray cluster of this machine, a folder for a store. That proves the command line and
the flow, and nothing of the device. The rest is only parsed (``tests/unit/test_docs_commands_parse.py``).

CI executes all pages but those of ``HEAVY`` and ``HEAVY_STAND_IN``, which the nightly executes (ci/nightly.yaml:
docs-slow, docs-engines-slow).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from docs_pages import ROOT, STEPS, Command, commands, english_pages, saved_blocks, smaller  # noqa: E402

pytestmark = pytest.mark.docs

SECONDS_PER_PAGE = 3600


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a page takes for granted.

    Attributes:
        words: what its reader puts in the place of the words in capitals.
        before: shell commands that make what lies in the reader's folder before the page begins.
        cluster: whether a Ray cluster of this machine runs meanwhile.
        after: shell commands once the page is through, whose exit code counts.
    """

    words: dict[str, str] = field(default_factory=dict)
    before: str = ""
    cluster: bool = False
    after: str = ""


SHORT_RUN = f"alignment dapo --executor inprocess {STEPS} trainer.record_batches=true capture.detail=sketch --run-dir"
CHECKPOINT = "baselines/checkpoints/tiny-moonlight-warm"
WEIGHT_SYNC = "alignment run --only weight_sync --run-dir"
GIVEN = {
    "README.md": Given(
        words={
            "OLD": "baselines",
            "NEW": "baselines",
            "CHECKPOINT": CHECKPOINT,
            "to-dist SOURCE": f"to-dist {CHECKPOINT}",
            "SOURCE": "runs/deep",
            "TARGET": "$(mktemp -d)/target",
            "RUN": "runs/night",
        },
        before=f"""
            {SHORT_RUN} runs/gpu
            {WEIGHT_SYNC} runs/night
            python tests/e2e/docs_checkpoint.py runs/deep
        """,
    ),
    "docs/bisect.md": Given(
        words={"FOLDER": "state"},
        before="""
            alignment bisect freeze -o march.yaml
            sed -i 's/^  transformers: .*/  transformers: "4.57.1"/' march.yaml
            for end in 1 2; do
              printf 'schema: 1\\ncomponents: {kernels: "%s"}\\ndefine: {kernels: {external: true}}\\n' $end > $end.yaml
            done
            alignment bisect run --good 1.yaml --bad 2.yaml --provider command --activate true --state state \\
              --probe 'test "$ALIGNMENT_STACK_KERNELS" = 1'
        """,
    ),
    "docs/compare.md": Given(
        words={"GOLDEN": "runs/golden", "TARGET": "runs/target", "BENIGN": "runs/benign"},
        before="\n".join(f"{SHORT_RUN} runs/{name}" for name in ("golden", "target", "benign")),
    ),
    "docs/diagnose.md": Given(
        words={
            "runs/RUN": "runs/night",
            "CHECK": "weight_sync.decode",
            "CHECKPOINT": CHECKPOINT,
            "PROFILER_FOLDER": "profile",
        },
        before=f"""
            {WEIGHT_SYNC} runs/night
            mkdir profile
            printf 'Device,Component,Timestamp(us),Total Reserved(KB)\\n0,HCCL,1.0,2048\\n' > profile/npu_module_mem.csv
        """,
    ),
    "docs/gkd.md": Given(before="cp alignment/rl/presets/gkd/gkd-tiny.yaml my-gkd.yaml"),
    "docs/precision-collector.md": Given(
        before=f"""
            sed 's/npu_dump/gpu_dump/' precision_collector.yaml > gpu.yaml
            alignment dapo --executor inprocess {STEPS} ascend_precision_collector=gpu.yaml
        """,
    ),
    "docs/how-to/bisect.md": Given(
        # One commit between a good end and a bad one.
        before="""
            git commit -q --allow-empty -m between
            echo 'def test_that_is_broken(): assert False' >> tests/unit/models/test_oracle_transformers.py
            git commit -qam broken
            git bisect start HEAD HEAD~2
        """,
    ),
    "docs/how-to/your-own-verl-run.md": Given(
        words={"CHECKPOINT": CHECKPOINT},
        before="""
            for run in gpu npu; do
              mkdir $run-run
              for step in 1 2; do
                printf '{"step": %d, "data": {"actor/lr": 0.1, "critic/score/mean": -0.5, "timing_s/gen": 3}}\\n' $step
              done > $run-run/log.jsonl
            done
        """,
    ),
    "docs/report.md": Given(before=f"{SHORT_RUN} runs/gpu; cp -r runs/gpu runs/npu"),
    "docs/verl.md": Given(words={"FOLDER": "runs/a/verl"}),
}


LOCAL_NIGHT = """
            cat > night.yaml <<END
            version: 1
            rows:
              - {{name: local, chip: CPU, device: cpu, nodes: {nodes}, phases: [doctor-nodes, files]}}
            phases:
              doctor-nodes: {{command: [alignment, doctor, --json], where: every-node, timeout_minutes: 10}}
              files:
                command: [pytest, tests/unit/test_files.py, --junitxml, "{{out}}/junit.xml"]
                timeout_minutes: 10
            END
"""
STAND_INS = {
    # Two dated stacks that differ in CANN, and an engine whose images say which.
    "docs/bisect.md": Given(
        before="""
            mkdir -p bin stacks images/november images/december
            install -m 755 tests/e2e/container_stand_in.py bin/docker
            echo runtime_running_version=[7.7.0.1.231:8.2.RC1] > images/november/version.cfg
            echo runtime_running_version=[7.8.0.1.231:8.3.RC1] > images/december/version.cfg
            bin/docker run november alignment bisect freeze --image "$(bin/docker image inspect november)" |
              sed 's/^date: .*/date: 2025-11-01/' > stacks/2025-11-01.yaml
        """,
        after="alignment bisect status --state runs/bisect-* | grep '8.2.RC1 → 8.3.RC1'",
    ),
    "docs/ci.md": Given(
        before=LOCAL_NIGHT.format(nodes=2),
        after="""wait $! && grep -q '"nodes": 2' store/nights/local/tonight/launch.json""",
    ),
    "docs/ascend-plugins.md": Given(
        before="""
            PYTHONPATH=$PYTHONPATH:tests/layer python - <<END
            from pathlib import Path
            from test_ascend_plugins import FROM_MODULE, VIEWS, adaptor, mindspeed_tree, vllm_ascend_tree
            mindspeed_tree(Path("runs/mindspeed").resolve(), adaptor(FROM_MODULE))
            vllm_ascend_tree(Path("runs/vllm-ascend").resolve(), VIEWS)
            END
        """,
    ),
    "docs/diagnose.md": Given(cluster=True),
    "docs/nightly.md": Given(
        cluster=True,
        # The first attempt is ended in its first phase.
        before=LOCAL_NIGHT.format(nodes=1)
        + """
            alignment nightly run night.yaml --row local --out runs/nights/tonight --ray-address auto > begun.log 2>&1 &
            until grep -q 'doctor-nodes …' begun.log; do kill -0 $! && sleep 0.1; done
            kill $!
            ! wait $!
        """,
        after="""grep -q '"outcome": "pass"' runs/nights/tonight/night.json""",
    ),
    "docs/verl.md": Given(
        before="python tests/e2e/docs_verl_command.py mine",
        after="""rm -rf "$(sed -n 's/.*_temp_dir=//p' mine/arguments)" &&
            alignment read-verl runs/mine --run-dir runs/read &&
            test -s runs/mine/batches/step_000001.safetensors -a -s runs/mine/metrics.jsonl""",
    ),
    # As the vendor's script does it: what is installed for the system comes in by a variable.
    "docs/how-to/run-on-atlas.md": Given(
        before=f"mkdir runs && echo 'export PYTHONPATH=$PYTHONPATH:{sysconfig.get_path('purelib')}' > runs/set_env.sh",
    ),
}
"""What the declared stand-ins of a page take for granted."""

HEAVY = (
    "docs/diagnose.md",
    "docs/faults.md",
    "docs/how-to/your-own-verl-run.md",
    "docs/story-garbled-rollout.md",
    "docs/verl.md",
)
"""What CI has no time for, and the nightly runs: ``-m "docs and slow"``, with ``and engine`` what needs one."""
HEAVY_STAND_IN = (
    "docs/ascend-plugins.md",
    "docs/ci.md",
    "docs/diagnose.md",
    "docs/how-to/run-on-atlas.md",
    "docs/nightly.md",
    "docs/verl.md",
)
"""Pages whose commands with a stand-in take over twenty seconds together."""


def filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(word)}(?![\w-])", value, text)
    return text


def copy_of_the_repository(target: Path) -> Path:
    """What is tracked, and what is new and not ignored, as a repository of its own: pages record, commit and write.

    The copy in a container image has no history; there it is what is not ignored.
    """
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)
    own = subprocess.run(["git", "rev-parse", "--git-dir"], cwd=ROOT, capture_output=True).returncode == 0
    where = [] if own else [f"--git-dir={target / '.git'}", f"--work-tree={ROOT}"]
    listed = subprocess.run(
        ["git", *where, "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    commit = (
        "git config user.email docs@example.org && git config user.name docs && git add -A && "
        "git -c core.hooksPath=/dev/null commit -q -m pages"
    )
    subprocess.run(["bash", "-euc", commit], cwd=target, check=True)
    return target


@contextlib.contextmanager
def ray_cluster(log: Path) -> Iterator[dict[str, str]]:
    """A Ray cluster of one node on this machine; the variables by which its users find it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ray = Path(sys.executable).with_name("ray")
    line = [ray, "start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
    with open(log, "w") as output:
        process = subprocess.Popen(
            line, env={**os.environ, **variables}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while "Ray runtime started" not in _read(log):
            assert process.poll() is None, _read(log)
            time.sleep(0.1)
        yield variables
    finally:
        process.terminate()
        process.wait(timeout=60)


def executed(page: Path, tmp_path: Path, chosen: list[Command], given: Given | None = None) -> str:
    """Runs the chosen commands of a page; what went wrong with the first that did not end as it should, or nothing."""
    given = given or GIVEN.get(str(page), Given())
    sandbox, log = copy_of_the_repository(tmp_path / "repository"), tmp_path / "log"
    log.mkdir()
    for name, text in saved_blocks(page).items():
        (sandbox / name).write_text(text, encoding="utf-8")
    script = ["set -o pipefail; TIMEFORMAT='%0U + %0S of %0R s'", f"cd {sandbox}"]
    if given.before:
        script.append(f"( set -eu\n{textwrap.dedent(given.before)}\n) > {log}/before.out 2>&1 || exit 99")
    for number, command in enumerate(chosen):
        text = smaller(filled(command.with_stand_in, given.words))
        (log / f"{number}.sh").write_text(text, encoding="utf-8")
        script += [
            f'{{ time eval "$(cat {log}/{number}.sh)" > {log}/{number}.out 2>&1 < /dev/null; }} 2> {log}/{number}.time',
            f"code=$?; echo $code > {log}/{number}.code; [ $code -eq {command.exits} ] || exit 1",
        ]
    if given.after:
        script.append(f"{{ {given.after}; }} > {log}/after.out 2>&1 || exit 98")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(sandbox),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    with ray_cluster(log / "ray.out") if given.cluster else contextlib.nullcontext({}) as variables:
        environment |= variables
        process = subprocess.Popen(["bash", "-c", "\n".join(script)], env=environment, start_new_session=True)
        try:
            process.wait(timeout=SECONDS_PER_PAGE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    if process.returncode == 99:
        return f"{page}: what the page takes for granted could not be made:\n{_read(log / 'before.out')[-3000:]}"
    for number, command in enumerate(chosen):
        code, took, said = (_read(log / f"{number}.{kind}") for kind in ("code", "time", "out"))
        print(f"{command.place}: {took.strip()}: {command.text.splitlines()[0][:90]}")
        if code.strip() != str(command.exits):
            ran = (log / f"{number}.sh").read_text()
            return (
                f"{command.place}: exit code {code.strip() or 'none'}, expected {command.exits}:\n{ran}\n{said[-3000:]}"
            )
    for missing in unkept(chosen, [_read(log / f"{number}.out") for number in range(len(chosen))], given.words):
        return missing
    if process.returncode == 98:
        return f"{page}: what the page leaves is not what it should:\n{_read(log / 'after.out')[-3000:]}"
    return ""


def unkept(chosen: list[Command], said: list[str], words: dict[str, str]) -> Iterator[str]:
    """What a page prints below a block as a verdict and the block did not say when it was executed.

    Blocks are held to it whole and with the page's own words; what was put in their place is other data.
    """
    for line in dict.fromkeys(command.block for command in chosen):
        at = [number for number, command in enumerate(chosen) if command.block == line]
        if not all(held(chosen[number], words) for number in at) or len(at) < chosen[at[0]].of_block:
            continue
        lines = [one for number in at for one in said[number].splitlines()]
        for promise in chosen[at[0]].promises:
            if not any(one.startswith(promise) for one in lines):
                where = f"{chosen[at[-1]].place}: the page says {promise!r}, and what it prints has no such line"
                yield "\n".join([f"{where}:", *lines[-60:]])


def held(command: Command, words: dict[str, str]) -> bool:
    """Whether a command is executed with the words that its page has."""
    return command.stand_in is None and filled(command.text, words) == command.text


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


commands_of = functools.cache(commands)


def of_page(page: Path, needs: str | None, *, stand_in: bool = False) -> list[Command]:
    """The commands of a page that need nothing, or the engine; and of these those with or without a stand-in."""
    if not stand_in:
        return [command for command in commands_of(page) if command.stand_in is None and command.needs == needs]
    declared = [command for command in commands_of(page) if command.stand_in is not None]
    return [command for command in declared if (command.needs == "engine") == (needs == "engine")]


def pages_with(needs: str | None, *, stand_in: bool = False) -> list:
    """A parameter per page that has such commands; heavy ones are slow."""
    heavy = HEAVY_STAND_IN if stand_in else HEAVY
    return [
        pytest.param(page, id=str(page), marks=[pytest.mark.slow] if str(page) in heavy else [])
        for page in english_pages()
        if of_page(page, needs, stand_in=stand_in)
    ]


def passed_off(folder: Path) -> list[str]:
    """Files below a folder in which a device is a GPU or an NPU and not the emulated one."""
    found = []
    for path in folder.rglob("*.json"):
        if ".venv" in path.parts or ".git" in path.parts:
            continue
        left = [json.loads(path.read_text(encoding="utf-8"))]
        while left:
            one = left.pop()
            if isinstance(one, dict):
                left += one.values()
                if "emulated" in one and one.get("kind") != "cpu" and one["emulated"] is not True:
                    found.append(f"{path.relative_to(folder)}: {one.get('label')}")
            elif isinstance(one, list):
                left += one
    return found + [f"baselines/{path.name}" for kind in ("cuda", "npu") for path in folder.glob(f"baselines/{kind}*")]


def executed_with_stand_in(page: Path, tmp_path: Path, chosen: list[Command]) -> str:
    """As ``executed``; and nothing that came of it may pass for a result of a GPU or an NPU."""
    wrong = executed(page, tmp_path, chosen, STAND_INS.get(str(page), Given()))
    for number, command in enumerate(chosen):
        said = _read(tmp_path / "log" / f"{number}.out")
        if not wrong and "--emulate-npu" in command.with_stand_in and "npu (emulated)" not in said:
            wrong = f"{command.place}: what the emulated NPU printed does not say so:\n{said[-3000:]}"
    return wrong or "\n".join(passed_off(tmp_path / "repository"))


@pytest.mark.parametrize("page", pages_with(None))
def test_the_commands_of_a_page_do_what_it_says(page, tmp_path):
    assert executed(page, tmp_path, of_page(page, None)) == ""


@pytest.mark.engine
@pytest.mark.parametrize("page", pages_with("engine"))
def test_the_commands_of_a_page_that_need_an_engine_do_what_it_says(page, tmp_path):
    assert executed(page, tmp_path, of_page(page, "engine")) == ""


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("long"))
def test_the_commands_of_a_page_that_take_minutes_do_what_it_says(page, tmp_path):
    assert executed(page, tmp_path, of_page(page, "long"), Given(after="rm -rf try*")) == ""


@pytest.mark.parametrize("page", pages_with(None, stand_in=True))
def test_the_commands_of_a_page_with_a_stand_in_do_what_it_says(page, tmp_path):
    assert executed_with_stand_in(page, tmp_path, of_page(page, None, stand_in=True)) == ""


@pytest.mark.engine
@pytest.mark.parametrize("page", pages_with("engine", stand_in=True))
def test_the_commands_of_a_page_with_a_stand_in_that_need_an_engine_do_what_it_says(page, tmp_path):
    assert executed_with_stand_in(page, tmp_path, of_page(page, "engine", stand_in=True)) == ""


def test_a_copy_without_history_is_copied_without_what_is_ignored(tmp_path, monkeypatch):
    image, target = tmp_path / "image", tmp_path / "target"
    (image / "docs").mkdir(parents=True)
    for name, text in {".gitignore": "*.log\n", "docs/page.md": "# P\n", "run.log": "no\n"}.items():
        (image / name).write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", image)
    copy_of_the_repository(target)
    listed = subprocess.run(["git", "ls-files"], cwd=target, capture_output=True, text=True, check=True).stdout
    assert listed.split() == [".gitignore", "docs/page.md"] and not (target / "run.log").exists()


def test_a_command_that_does_not_do_what_it_says_is_found(tmp_path):
    page = Path("docs/page.md")
    right, wrong = (Command(page=page, line=n, text=t) for n, t in ((3, "export A=1"), (4, "echo $A; test $A = 2")))
    found = executed(page, tmp_path, [right, wrong])
    assert found.startswith("docs/page.md:4: exit code 1, expected 0:") and found.endswith("1\n")


def test_a_stand_in_is_what_is_executed_and_may_not_pass_for_a_device(tmp_path):
    page = Path("docs/page.md")
    fingerprint = '{"provenance": [{"kind": "npu", "label": "npu", "emulated": %s}]}'

    def said(name, text, new):
        chosen = [Command(page=page, line=3, text=text, needs="npu", stand_in=(("--device npu", new),))]
        return executed_with_stand_in(page, tmp_path / name, chosen)

    assert said("a", "test '--device npu' = here", "here") == ""
    assert said("b", "echo --device npu", "--emulate-npu").startswith(
        "docs/page.md:3: what the emulated NPU printed does not say so:"
    )
    assert said("c", "echo '--device npu'", "--emulate-npu: npu (emulated)") == ""
    assert said("d", f"mkdir runs; echo '{fingerprint % 'true'}' > runs/run.json", "x") == ""
    assert said("e", f"mkdir runs; echo '{fingerprint % 'false'}' > runs/run.json", "x") == "runs/run.json: npu"
    assert said("f", "mkdir baselines/cuda", "x") == "baselines/cuda"


def test_what_a_page_leaves_is_looked_at(tmp_path):
    page = Path("docs/page.md")
    chosen = [Command(page=page, line=3, text="sleep 0.1 && echo done > left &")]
    assert executed(page, tmp_path / "a", chosen, Given(after="wait $! && grep done left")) == ""
    wrong = executed(page, tmp_path / "b", chosen, Given(after="wait $! && grep nothing left"))
    assert wrong.startswith("docs/page.md: what the page leaves is not what it should:")


def test_a_verdict_that_a_page_prints_and_its_commands_do_not_is_found(tmp_path):
    def said(name, *texts, words=None):
        chosen = [
            Command(page=Path("docs/page.md"), line=4 + n, text=text, block=3, of_block=2, promises=("ALIGNED:",))
            for n, text in enumerate(texts)
        ]
        return executed(Path("docs/page.md"), tmp_path / name, chosen, Given(words=words or {}))

    assert said("a", "echo ALIGNED: 3 of 3", "echo RUN") == ""
    wrong = said("b", "echo MISALIGNED: 1 of 3", "echo RUN")
    assert wrong == (
        "docs/page.md:5: the page says 'ALIGNED:', and what it prints has no such line:\nMISALIGNED: 1 of 3\nRUN"
    )
    # Other data than the page's, or a part of the block, are held to no verdict of the page.
    assert said("c", "echo MISALIGNED: 1 of 3", "echo RUN", words={"RUN": "runs/a"}) == ""
    assert said("d", "echo MISALIGNED: 1 of 3") == ""


def test_the_verdicts_of_every_page_are_held_by_its_commands_or_by_the_newcomer_s_path():
    left = []
    for page in english_pages():
        words = GIVEN.get(str(page), Given()).words
        for command in commands_of(page):
            if command.promises and not (command.executed in ("plainly", "engine") and held(command, words)):
                left.append((str(page), command.text, command.executed))
    # The README's first output is that of its first block, which scripts/newcomer.sh holds to it.
    assert [(page, text.rpartition("&& ")[2], executed) for page, text, executed in left] == [
        ("README.md", "pytest", "elsewhere"),
        ("docs/tutorial.md", "alignment run --run-dir runs/first", "elsewhere"),
    ]
