"""The pipelines of GitHub, GitLab and GitCode: valid, complete, keeping what a night left, red when they have to be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from ci_folder import CI, ROOT, linter, nightly, tool

_, MATRIX, _ = nightly()
GITHUB = ROOT / ".github" / "workflows" / "nightly.yml"
GITCODE = ROOT / ".gitcode" / "workflows" / "nightly.yml"
GITLAB = CI / "gitlab-ci.yml"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path):
    # PyYAML reads the key `on` as true.
    text = path.read_text(encoding="utf-8").replace("\non:\n", '\n"on":\n')
    return yaml.safe_load(text)


def check_schema(path, schema, *options):
    linter("check_jsonschema")
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *options, str(path)]
    return subprocess.run(line, capture_output=True, text=True)


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.name)
def test_github_s_schema_holds(path):
    done = check_schema(path, "vendor.github-workflows")
    assert done.returncode == 0, done.stdout


def test_gitlab_s_schema_holds():
    done = check_schema(GITLAB, "vendor.gitlab-ci", "--data-transform", "gitlab-ci")
    assert done.returncode == 0, done.stdout


def test_gitcode_s_documentation_holds():
    schema = json.loads((CI / "schemas" / "gitcode-workflow.schema.json").read_text(encoding="utf-8"))
    linter("jsonschema").validate(read(GITCODE), schema)


@pytest.mark.parametrize("path", [p for p in FORMS if p.name != "config.yml"], ids=lambda p: p.name)
def test_issue_forms_are_valid_and_ask_for_the_doctor(path):
    done = check_schema(path, "vendor.github-issue-forms")
    assert done.returncode == 0, done.stdout
    if path.name != "4-feature.yml":
        assert "alignment doctor --json" in path.read_text(encoding="utf-8")


def test_gitcode_asks_for_the_same():
    templates = sorted((ROOT / ".gitcode" / "ISSUE_TEMPLATE").glob("*.md"))
    assert {p.stem for p in templates} == {"misalignment", "bug", "nightly"}
    for path in templates:
        _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
        assert {"name", "about", "title", "labels"} <= set(yaml.safe_load(front))
        assert "### alignment doctor --json" in body
    pull_requests = [ROOT / ".gitcode" / "PULL_REQUEST_TEMPLATE.md", ROOT / ".github" / "pull_request_template.md"]
    assert len({path.read_text(encoding="utf-8") for path in pull_requests}) == 1


def test_a_broken_form_fails_its_schema(tmp_path):
    broken = tmp_path / "1-misalignment.yml"
    broken.write_text(FORMS[0].read_text(encoding="utf-8").replace("type: textarea", "type: text", 1))
    assert check_schema(broken, "vendor.github-issue-forms").returncode == 1


def test_a_broken_workflow_fails_its_schema(tmp_path):
    broken = tmp_path / "nightly.yml"
    broken.write_text(GITHUB.read_text().replace("runs-on:", "run-on:", 1))
    done = check_schema(broken, "vendor.github-workflows")
    assert done.returncode == 1 and "Schema validation errors" in done.stdout
    broken.write_text(GITLAB.read_text().replace("script:", "scripts:", 1))
    assert check_schema(broken, "vendor.gitlab-ci", "--data-transform", "gitlab-ci").returncode == 1


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("${{ always }}", "${{ always() }}", "always"),
        ("atomgit.event.schedule", "github.event.schedule", "github"),
        ("uses: checkout", "uses: actions/checkout@v5", "is not one of"),
        ("max: 5", "max: 10", "10 is greater than the maximum of 5"),
    ],
)
def test_what_only_github_understands_fails_on_gitcode(old, new, message, tmp_path):
    broken = tmp_path / "nightly.yml"
    text = GITCODE.read_text()
    assert old in text
    broken.write_text(text.replace(old, new))
    schema = json.loads((CI / "schemas" / "gitcode-workflow.schema.json").read_text(encoding="utf-8"))
    with pytest.raises(linter("jsonschema").ValidationError, match=message):
        linter("jsonschema").validate(read(broken), schema)


def actionlint(*paths):
    config = ROOT / ".github" / "actionlint.yaml"
    line = [tool("actionlint"), "-no-color", "-config-file", *map(str, (config, *paths))]
    return subprocess.run(line, capture_output=True, text=True)


def test_actionlint_finds_nothing():
    done = actionlint(*(ROOT / ".github" / "workflows").glob("*.yml"))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("steps.night.outputs.code", "steps.nights.outputs.code", 'property "nights" is not defined'),
        ('["ubuntu-latest"]', '["atlas-a9"]', 'label "atlas-a9" is unknown'),
        ("always()", "alway()", 'undefined function "alway"'),
    ],
)
def test_actionlint_finds_what_the_schema_lets_pass(old, new, message, tmp_path):
    broken, text = tmp_path / "nightly.yml", GITHUB.read_text(encoding="utf-8")
    assert old in text
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert check_schema(broken, "vendor.github-workflows").returncode == 0
    done = actionlint(broken)
    assert done.returncode == 1 and message in done.stdout, done.stdout


@pytest.mark.parametrize("row", MATRIX.rows, ids=lambda r: r.name)
def test_every_row_runs_on_every_platform_at_its_time(row):
    github, gitcode, gitlab = read(GITHUB), read(GITCODE), read(GITLAB)
    for workflow in (github, gitcode):
        assert {"cron": row.schedule} in workflow["on"]["schedule"]
        assert f"'{row.schedule}'" in workflow["jobs"][row.name]["if"]
        assert f"inputs.row == '{row.name}'" in workflow["jobs"][row.name]["if"]
    assert row.name in github["on"]["workflow_dispatch"]["inputs"]["row"]["options"]
    assert gitlab[row.name]["rules"] == [{"if": f'$ALIGNMENT_ROW == "{row.name}"'}]
    assert f"#   {row.schedule}  ALIGNMENT_ROW={row.name}" in GITLAB.read_text()


@pytest.mark.parametrize("row", MATRIX.rows, ids=lambda r: r.name)
def test_what_a_night_left_is_kept_even_when_it_fails_and_the_call_is_made_last(row):
    for path, always in ((GITHUB, "always()"), (GITCODE, "${{ always }}")):
        *_, night, keep, call = (step for step in read(path)["jobs"][row.name]["steps"] if "cache" not in str(step))
        assert f"ci/rendered/{row.name}/night.sh night" in night["run"] and night["id"] == "night"
        assert keep["if"] == always and "upload-artifact" in keep["uses"] and keep["with"]["path"] == "night"
        assert call["if"] == always and call["run"] == 'bash ci/rendered/call.sh "$CODE" night'
        assert call["env"] == {"CODE": "${{ steps.night.outputs.code }}"}
    shared = read(GITLAB)[".night"]
    assert shared["artifacts"]["when"] == "always" and shared["artifacts"]["paths"] == ["night"]
    assert shared["artifacts"]["reports"] == {"junit": "night/**/junit.xml"}


ALONE = [row for row in MATRIX.rows if row.nodes == 1]


@pytest.mark.parametrize("row", ALONE, ids=lambda r: r.name)
def test_the_history_of_a_row_outlives_a_red_night_on_every_platform(row, tmp_path):
    steps = read(GITHUB)["jobs"][row.name]["steps"]
    at = {step["uses"]: n for n, step in enumerate(steps) if "actions/cache" in step.get("uses", "")}
    night = next(n for n, step in enumerate(steps) if step.get("id") == "night")
    # actions/cache itself saves only after a job that succeeded.
    assert list(at) == ["actions/cache/restore@v5", "actions/cache/save@v5"]
    restore, save = (steps[n] for n in at.values())
    assert list(at.values()) == [night - 1, night + 1] and save["if"] == "always()"
    assert restore["with"] == {**save["with"], "restore-keys": f"history/{row.name}/"}
    assert save["with"]["path"] == "history" and save["with"]["key"].startswith(f"history/{row.name}/")
    assert read(GITLAB)[row.name]["cache"] == {"key": f"history-{row.name}", "paths": ["history"], "when": "always"}
    # The step of GitCode, with a night that says which folder it was given.
    script = tmp_path / "ci" / "rendered" / row.name / "night.sh"
    script.parent.mkdir(parents=True)
    script.write_text("echo $ALIGNMENT_HISTORY\nexit 1\n")
    step = next(step for step in read(GITCODE)["jobs"][row.name]["steps"] if step.get("id") == "night")
    for set_by, folder in (({}, f"/home/runner/alignment-history/{row.name}"), ({"ALIGNMENT_HISTORY": "/h"}, "/h")):
        output = tmp_path / "output"
        given = {"PATH": "/usr/bin:/bin", "HOME": "/home/runner", "ATOMGIT_OUTPUT": str(output), **set_by}
        line = ["bash", "-euc", step["run"]]
        done = subprocess.run(line, cwd=tmp_path, env=given, capture_output=True, text=True, check=True)
        assert done.stdout == f"{folder}\n" and output.read_text().splitlines()[-1] == "code=1"


def test_a_row_is_not_given_the_history_of_another():
    kept = {row.name: read(GITHUB)["jobs"][row.name]["steps"] for row in ALONE}
    kept = {name: next(s["with"]["restore-keys"] for s in steps if "restore" in str(s)) for name, steps in kept.items()}
    assert [(a, b) for a in kept for b in kept if a != b and f"history/{b}/".startswith(kept[a])] == []


@pytest.mark.parametrize(
    "code, said, ends, line",
    [
        (0, "ignore", 0, "ignore: the night ended with exit code 0"),
        (0, "warn", 4, "warn: the night ended with exit code 0"),
        (4, "warn", 4, "warn: the night ended with exit code 4"),
        (1, "warn", 1, "page: the night ended with exit code 1"),
    ],
)
def test_gitlab_is_orange_for_every_night_that_warns_and_red_for_one_that_pages(code, said, ends, line, tmp_path):
    gitlab = read(GITLAB)
    folder = tmp_path / "ci" / "rendered"
    (folder / "cpu").mkdir(parents=True)
    (folder / "call.sh").write_text((CI / "rendered" / "call.sh").read_text())
    (folder / "cpu" / "build.sh").write_text("")
    record = json.dumps({"exit_code": code, "call": said}, indent=1)
    (folder / "cpu" / "night.sh").write_text(f"mkdir $1\necho '{record}' > $1/launch.json\nexit {code}\n")
    script = "\n".join(gitlab["cpu"]["script"])
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ends, f"{line}\n")
    allowed = gitlab[".night"]["allow_failure"]["exit_codes"]
    assert (ends in allowed) is (said == "warn" and MATRIX.action(code) != "page")


def test_gitlab_lets_pass_what_does_not_page_and_nothing_else():
    mild = [code for code, action in MATRIX.exit_codes.items() if action != "page" and code]
    assert read(GITLAB)[".night"]["allow_failure"] == {"exit_codes": mild}


def call(code, *arguments, **environ):
    line = ["bash", str(CI / "rendered" / "call.sh"), *([] if code is None else [str(code)]), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environ})


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 125, 137, 255, "", None])
def test_every_exit_code_is_called_as_the_matrix_says(code):
    done = call(code)
    action = "page" if code in ("", None) else MATRIX.action(code)
    assert done.stdout == f"{action}: the night ended with exit code {'none' if code in ('', None) else code}\n"
    assert (done.returncode == 0) is (action != "page")


@pytest.mark.parametrize("code, said, called", [(0, "warn", "warn"), (0, "ignore", "ignore"), (1, "warn", "page")])
def test_a_night_may_warn_though_nothing_failed(code, said, called, tmp_path):
    record = tmp_path / "nights" / "cpu" / "n1" / "launch.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"exit_code": code, "call": said}, indent=1))
    done = call(code, tmp_path)
    assert done.stdout.startswith(f"{called}:") and (done.returncode == 0) is (called != "page")


def test_github_shows_a_page_as_an_error_and_a_warning_as_one():
    assert call(1, GITHUB_ACTIONS="true").stdout.startswith("::error::page")
    assert call(4, GITHUB_ACTIONS="true").stdout.startswith("::warning::warn")
    assert call(0, GITHUB_ACTIONS="true").stdout.startswith("ignore")
