"""What ci/render.py makes is up to date, follows from its three sources alone, and refuses what cannot be meant."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml
from _pytest.mark.expression import Expression
from ci_folder import CI, ROOT, changed, documents, nightly

from alignment.errors import InputError
from alignment.pytest_plugin import BY_NAME_ONLY
from alignment.report.night_matrix import read_matrix

render, MATRIX, SITE = nightly()
TARGETS = render.targets(MATRIX, SITE)


def rendered(folder, **changes):
    matrix, site = changed(folder, **changes)
    return render.render(read_matrix(matrix), render.read_site(site))


def row(data, name):
    return next(entry for entry in data["rows"] if entry["name"] == name)


def test_everything_rendered_is_up_to_date():
    assert render.stale(render.render(MATRIX, SITE), ROOT) == []


def test_what_was_edited_by_hand_or_left_behind_is_named(tmp_path):
    files = render.render(MATRIX, SITE)
    assert sorted(render.write(files, tmp_path)) == sorted(files)
    assert render.write(files, tmp_path) == []
    edited = tmp_path / "ci" / "rendered" / "atlas-a2" / "volcano-job.yaml"
    edited.write_text(edited.read_text().replace("minAvailable: 2", "minAvailable: 1"))
    left = tmp_path / "ci" / "rendered" / "atlas-a1" / "night.sh"
    left.parent.mkdir()
    left.write_text("echo gone\n")
    assert render.stale(files, tmp_path) == ["ci/rendered/atlas-a2/volcano-job.yaml", "ci/rendered/atlas-a1/night.sh"]


def test_the_command_exits_with_1_when_something_is_out_of_date(tmp_path, capsys):
    assert render.main(["--into", str(tmp_path)]) == 0
    assert render.main(["--into", str(tmp_path), "--check"]) == 0
    (tmp_path / "ci" / "gitlab-ci.yml").write_text("stages: []\n")
    capsys.readouterr()
    assert render.main(["--into", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().err == "out of date: ci/gitlab-ci.yml\n"


PLANTED = {
    "a stack that does not exist": (
        lambda d: row(d, "cpu").update(stack="stacks/cpus.yaml"), None, "there is no such file.*cpus.yaml"),
    "a phase that does not exist": (
        lambda d: row(d, "cpu")["phases"].append("dap"), None, r"there is no such phase; expected dapo\?"),
    "a missing field of a row": (lambda d: row(d, "cpu").pop("chip"), None, "a key is missing; expected chip"),
    "a row without a stack": (
        lambda d: row(d, "cpu").pop("stack"), None, "row cpu: a row of the nightly needs a stack file"),
    "a chip that the site does not have": (
        lambda d: row(d, "cpu").update(chip="CPUS"), None, r"the site has no such chip; expected CPU\?; found CPUS"),
    "more cards than a node has": (
        lambda d: row(d, "atlas-a2").update(cards=16), None, "more cards than a node has; expected at most 8"),
    "several nodes without a scheduler for them": (
        lambda d: row(d, "cuda").update(nodes=2), None, "several nodes are started together, by Volcano"),
    "a night longer than a hosted runner allows": (
        lambda d: d["phases"]["checks"].update(timeout_minutes=300), None, "longer than a hosted runner allows"),
    "a resource that no device plugin registers": (
        None, lambda d: d["chips"]["A2"]["device"].update(resource="huawei.com/Ascend910B"),
        r"no device plugin registers this resource; expected huawei.com/Ascend910\?; found huawei.com/Ascend910B"),
    "a missing field of a chip": (
        None, lambda d: d["chips"]["A2"].pop("base"), "chips.A2: a key is missing; expected base"),
    "an unknown field of a chip": (
        None, lambda d: d["chips"]["A2"].update(hostNetwork=True), r"unknown key; expected host_network\?"),
    "a missing field of the site": (None, lambda d: d.pop("store"), "a key is missing; expected store"),
    "a recipe that does not exist": (
        None, lambda d: d["chips"]["A2"].update(containerfile="atlass"), "there is no such recipe"),
    "a base image of a component that the stack lacks": (
        None, lambda d: d["chips"]["CPU"].update(base="cann:{CANN}"), "a component that the stack does not have"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_refused_where_it_is(name, tmp_path):
    matrix, site, message = PLANTED[name]
    with pytest.raises(InputError, match=message):
        rendered(tmp_path, matrix=matrix, site=site)


def test_a_component_that_no_recipe_builds_from_its_repository_is_refused(tmp_path):
    matrix, site = changed(tmp_path)
    stack = tmp_path / "stacks" / "atlas.yaml"
    data = yaml.safe_load(stack.read_text())
    data["components"]["mbridge"] = {"git": None, "revision": "0123456"}
    stack.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match="no container recipe builds this component from a repository.*mbridge"):
        target = next(t for t in render.targets(read_matrix(matrix), render.read_site(site)) if t.name == "atlas-a2")
        target.requirements


def test_an_error_ends_the_command_with_2_and_one_line(tmp_path):
    matrix, site = changed(tmp_path, matrix=lambda d: row(d, "cpu").update(chip="TPU"))
    line = [sys.executable, "ci/render.py", "--check", "--matrix", str(matrix), "--site", str(site)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "the site has no such chip" in done.stderr


def test_versions_come_from_the_stack_file(tmp_path):
    matrix, site = changed(tmp_path)
    stack = tmp_path / "stacks" / "atlas.yaml"
    stack.write_text(
        stack.read_text().replace('torch_npu: "2.7.1"', 'torch_npu: "2.7.1.post2"').replace("8.2.RC2", "8.3.RC1")
    )
    target = next(t for t in render.targets(read_matrix(matrix), render.read_site(site)) if t.name == "atlas-a2")
    assert "torch-npu==2.7.1.post2" in target.requirements and "torch-npu==2.7.1" not in target.requirements
    assert target.base == "quay.io/ascend/cann:8.3.rc1-910b-ubuntu22.04-py3.11"


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_an_image_holds_every_release_of_its_stack_and_nothing_twice(target):
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0].lower()) for line in target.requirements]
    assert len(set(names)) == len(names)
    for name, pin in target.stack.pins.items():
        component = target.stack.component(name)
        if component.external or name == "python":
            continue
        listed = f"{component.distribution}=={pin.version}" in target.requirements
        assert listed is (pin.kind == "release"), name


def pods(target):
    """Every pod spec that a row starts, with where it is."""
    for path in sorted((CI / "rendered" / target.name).glob("*.yaml")):
        for document in documents(path):
            yield from _pods(document, path.name)


def _pods(node, where):
    if isinstance(node, dict):
        if "containers" in node:
            yield where, node
        for value in node.values():
            yield from _pods(value, where)
    elif isinstance(node, list):
        for value in node:
            yield from _pods(value, where)


ATLAS = [t for t in TARGETS if t.chip.ascend]


@pytest.mark.parametrize("target", ATLAS, ids=lambda t: t.name)
def test_pods_on_ascend_have_their_cards_addresses_and_deterministic_switches(target):
    found = [(where, pod) for where, pod in pods(target) if pod["containers"][0]["name"] != "submit"]
    assert {where for where, _ in found} == {"volcano-job.yaml", "rayjob.yaml"} and len(found) == 4
    for where, pod in found:
        (container,) = pod["containers"]
        env = {entry["name"]: entry for entry in container["env"]}
        for resources in container["resources"].values():
            assert resources["huawei.com/Ascend910"] == target.row.cards, where
        assert env["HCCL_IF_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        visible = env["ASCEND_VISIBLE_DEVICES"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert visible == "metadata.annotations['huawei.com/Ascend910']"
        values = {name: entry.get("value") for name, entry in env.items()}
        # The CANN image sets the last two to the opposite.
        wanted = {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0"}
        assert {name: values.get(name) for name in wanted} == wanted
        assert 120 <= int(values["HCCL_CONNECT_TIMEOUT"]) <= 7200
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/usr/local/Ascend/driver", "/dev/shm", "/store"} <= mounted
        assert pod["hostNetwork"] is True and pod["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_cards_that_talk_through_lccl_get_its_switches_in_place_of_hccl_s(tmp_path):
    files = rendered(tmp_path, matrix=lambda d: row(d, "atlas-a2").update(env={"HCCL_OP_EXPANSION_MODE": "AIV"}))
    job = yaml.safe_load(files["ci/rendered/atlas-a2/volcano-job.yaml"])
    env = {e["name"]: e.get("value") for e in job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["env"]}
    assert env["LCCL_DETERMINISTIC"] == "1" and env["ATB_LLM_LCOC_ENABLE"] == "0" and "HCCL_DETERMINISTIC" not in env


def test_a_logical_supernode_holds_the_whole_job():
    (job,) = documents(CI / "rendered" / "atlas-a3" / "volcano-job.yaml")
    total = sum(task["replicas"] for task in job["spec"]["tasks"]) * 16
    assert job["metadata"]["annotations"]["sp-block"] == str(total)


def test_a_gang_is_all_nodes_of_the_row():
    for target in ATLAS:
        (job,) = documents(CI / "rendered" / target.name / "volcano-job.yaml")
        assert sum(t["replicas"] for t in job["spec"]["tasks"]) == target.row.nodes == job["spec"]["minAvailable"]


def test_a_night_that_ends_is_not_started_again_and_one_that_lost_its_node_is():
    for target in ATLAS:
        (job,) = documents(CI / "rendered" / target.name / "volcano-job.yaml")
        head = next(t for t in job["spec"]["tasks"] if t["name"] == "head")
        assert head["template"]["spec"]["restartPolicy"] == "Never"
        assert {p["event"]: p["action"] for p in head["policies"]} == {
            "TaskCompleted": "CompleteJob", "PodFailed": "TerminateJob", "PodEvicted": "RestartTask",
        }  # fmt: skip


def test_the_cron_job_of_a_row_creates_the_job_that_is_rendered_beside_it():
    for target in ATLAS:
        folder = CI / "rendered" / target.name
        config, cron = documents(folder / "cronjob.yaml")
        assert yaml.safe_load(config["data"]["volcano-job.yaml"]) == documents(folder / "volcano-job.yaml")[0]
        assert cron["spec"]["schedule"] == target.row.schedule and cron["spec"]["timeZone"] == "Etc/UTC"


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_command_of_a_night_is_one_that_exists(target, pytestconfig):
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from test_docs_commands_parse import fault_of

    row = target.row
    values = {"out": "out", "device": row.device, "ray": "10.0.0.7:6379", "layers": " or ".join(row.layers)}
    values |= {"subjects": ",".join(row.subjects), "row": row.name, "nodes": row.nodes}
    faults = {p.name: fault_of(p.argv(**values), pytestconfig) for p in MATRIX.phases_of(row)}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_every_phase_is_run_by_a_row():
    assert {name for row in MATRIX.rows for name in row.phases} == set(MATRIX.phases)


SCHEDULED = [
    {"unit"}, {"layer"}, {"e2e"}, {"slow"}, {"npu"}, {"npu", "slow"}, {"engine"}, {"engine", "slow"}, {"docs", "slow"},
    {"docs", "engine", "slow"},
]  # fmt: skip


def selecting(phases, markers):
    """The phases that run a test with these markers, which slow, engine and docs tests are only by name."""
    found = []
    for phase in phases:
        if phase.command[0] == "pytest":
            expression = phase.command[phase.command.index("-m") + 1].format(layers="unit or layer or e2e")
            named = set(re.findall(r"\w+", expression)) >= markers & set(BY_NAME_ONLY)
            if named and Expression.compile(expression).evaluate(lambda name, **_: name in markers):
                found.append(phase.name)
    return found


@pytest.mark.parametrize("markers", SCHEDULED, ids=lambda m: " and ".join(sorted(m)))
def test_tests_of_every_kind_are_run_at_night(markers):
    assert selecting(MATRIX.phases.values(), markers)


def test_a_kind_of_test_that_nothing_schedules_is_noticed():
    left = [phase for name, phase in MATRIX.phases.items() if name != "docs-engines-slow"]
    assert selecting(left, {"docs", "engine", "slow"}) == []


def test_in_every_row_skipped_is_failed():
    assert [row.name for row in MATRIX.rows if not row.require] == []


def left_out(phase):
    """The names of tests that a phase leaves out."""
    command = phase.command
    words = command[command.index("-k") + 1].split() if "-k" in command else []
    return [word for word in words if word not in ("not", "and")]


def names_of_tests():
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for path in files for name in (path.stem, *re.findall(r"def (test_\w+)", path.read_text()))}


def test_what_checks_leaves_out_is_there_and_runs_elsewhere():
    names, phase = names_of_tests(), MATRIX.phases["checks"]
    found = {word: [name for name in names if word in name] for word in left_out(phase)}
    assert {word: len(tests) for word, tests in found.items()} == {
        "hands_softmax_scale": 1, "derives_its_mla": 1, "before_the_fix": 1, "releases_are_found_stale": 1,
        "memory_of_training_given_back": 1,
    }  # fmt: skip
    assert "--require" in phase.command
    ignored = phase.command[phase.command.index("--ignore") + 1]
    assert f"pytest {ignored}\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_newcomer_s_path_is_walked_at_night():
    bash, script_of, *_, repository = MATRIX.phases["newcomer"].command
    assert bash == "bash" and (ROOT / script_of).is_file() and repository == "."
    assert MATRIX.phases["newcomer"].timeout_minutes > 60  # its own bar is judged before the phase is ended


def test_markers_of_a_phase_select_tests_of_its_device():
    for name, marker in (("npu-checks", "npu"), ("gpu-checks", "gpu"), ("emulated-npu", "npu")):
        command = MATRIX.phases[name].command
        assert f"{marker} and" in command[command.index("-m") + 1], name
        assert "--require" in command
