"""What lies between two pins."""

from __future__ import annotations

import subprocess

import pytest

from alignment.bisect.components import COMPONENTS, Component
from alignment.bisect.history import KnownHistory, commits_between, describe_commit
from alignment.bisect.stack import Pin
from alignment.errors import InputError

RELEASES = ["0.11.0", "0.12.0rc1", "0.12.0", "0.12.1", "0.13.0rc2", "0.13.0", "0.14.0"]


def release(version):
    return Pin(kind="release", version=version)


def versions(history, old, new):
    return [p.version for p in history.between(COMPONENTS["megatron-core"], release(old), release(new))]


def test_releases_between_in_either_direction():
    history = KnownHistory(index=lambda name: RELEASES)
    assert versions(history, "0.12.0", "0.14.0") == ["0.12.1", "0.13.0", "0.14.0"]
    assert versions(history, "0.14.0", "0.12.0") == ["0.13.0", "0.12.1", "0.12.0"]


def test_prereleases_where_an_end_is_one_or_it_is_asked_for():
    assert "0.13.0rc2" in versions(KnownHistory(index=lambda n: RELEASES), "0.12.0rc1", "0.14.0")
    assert "0.13.0rc2" in versions(KnownHistory(index=lambda n: RELEASES, prereleases=True), "0.12.0", "0.14.0")
    assert versions(KnownHistory(releases={"megatron-core": ["0.13.0rc2"]}), "0.12.0", "0.14.0") == [
        "0.13.0rc2",
        "0.14.0",
    ]


def test_an_index_is_asked_once_and_remembered():
    asked, kept = [], {}
    history = KnownHistory(index=lambda n: asked.append(n) or RELEASES, recall=kept.get, remember=kept.__setitem__)
    versions(history, "0.12.0", "0.14.0")
    versions(history, "0.12.0", "0.13.0")
    assert asked == ["megatron-core"] and list(kept) == ["releases of megatron-core"]


def test_closed_components_have_no_steps():
    pins = Pin(kind="fact", version="8.1"), Pin(kind="fact", version="8.3")
    assert KnownHistory().between(COMPONENTS["CANN"], *pins) == [pins[1]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history") / "repo"

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True)
    made = {}
    for name in ("one", "two", "three"):
        (folder / "f").write_text(name)
        (folder / name).mkdir()
        (folder / name / "g").write_text(name)
        git("add", ".")
        git("commit", "-qm", f"Add {name}")
        made[name] = git("rev-parse", "HEAD")
    git("checkout", "-qb", "side", made["two"])
    for name in ("left", "right"):
        (folder / name).write_text(name)
        git("add", ".")
        git("commit", "-qm", f"Add {name}")
        made[name] = git("rev-parse", "HEAD")
    git("checkout", "-q", "main")
    git("merge", "-q", "--no-ff", "-m", "Merge side", "side")
    made["merge"] = git("rev-parse", "HEAD")
    return folder, made


def test_commits_follow_the_first_parent(repository):
    folder, made = repository
    assert commits_between(folder, made["one"], made["merge"]) == [made["two"], made["three"], made["merge"]]
    assert describe_commit(folder, made["merge"]).endswith("Merge side (a merge of 2 commits)")


def test_between_branches_the_way_leads_over_their_ancestor(repository):
    folder, made = repository
    assert commits_between(folder, made["right"], made["three"]) == [made["left"], made["two"], made["three"]]


def test_only_commits_that_touch_a_folder(repository):
    folder, made = repository
    assert commits_between(folder, made["one"], made["merge"], below="three") == [made["three"]]
    component = Component(name="three", distribution="three", module="three", subdirectory="three")
    new = Pin(kind="git", revision="main", repository=str(folder))
    assert KnownHistory().between(component, Pin(kind="git", revision=made["one"]), new) == [new]


def test_a_revision_that_is_not_there(repository):
    with pytest.raises(InputError, match="there is no such revision; found deadbeef"):
        commits_between(repository[0], "deadbeef", "main")


def test_commits_inside_a_release_lie_between_its_tags(repository):
    folder, made = repository
    for tag, name in (("core_v1.0", "one"), ("v1.1", "merge")):
        subprocess.run(["git", "-C", str(folder), "tag", "-f", tag, made[name]], check=True, capture_output=True)
    history = KnownHistory(repositories={"megatron-core": folder})
    path = history.inside(COMPONENTS["megatron-core"], release("1.0"), release("1.1"))
    assert [p.revision for p in path[:-1]] == [made["one"], made["two"], made["three"], made["merge"]]
    assert path[-1] == release("1.1")
    assert history.inside(COMPONENTS["megatron-core"], release("1.0"), release("9.9")) == [release("9.9")]
    assert KnownHistory().inside(COMPONENTS["megatron-core"], release("1.0"), release("1.1")) == [release("1.1")]
