"""A node of the nightly: how it finds the head, joins, and what it does when one of them is late, lost or wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from ci_folder import CI, ROOT, script

launch = script("launch")


@pytest.fixture(autouse=True)
def a_clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ALIGNMENT_", "VC_", "HCCL_", "NCCL_", "ASCEND_")) or name == "POD_IP":
            monkeypatch.delenv(name)
    monkeypatch.setattr(launch.os, "environ", dict(os.environ))
    handlers = {number: signal.getsignal(number) for number in launch.ENDING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """``ray`` and ``alignment`` that write down their calls; ``alignment`` exits with what the file ``code`` says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ray").write_text(f'#!/bin/sh\necho "ray $@" >> {tmp_path}/called\n')
    (folder / "alignment").write_text(
        f'#!/bin/sh\ncase "$*" in *--ray-address*) while [ ! -s {tmp_path}/called ]; do sleep 0.01; done;; esac\n'
        f'echo "alignment $@" >> {tmp_path}/called\nexit $(cat {tmp_path}/code 2>/dev/null || echo 0)\n'
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setattr(launch, "tool", lambda name: str(folder / name))
    return tmp_path


def called(folder):
    return (folder / "called").read_text().splitlines()


def test_the_head_is_found_by_the_file_of_the_svc_plugin_and_by_its_variable(tmp_path):
    (tmp_path / "head.host").write_text("night-head-0.night\n")
    environ = {"VC_HEAD_HOSTS": "night-head-0.night,night-head-0"}
    assert launch.head_names(environ, tmp_path) == ["night-head-0.night", "night-head-0"]
    assert launch.head_names({"ALIGNMENT_HEAD": "10.0.0.7"}, tmp_path)[0] == "10.0.0.7"


def test_without_a_name_of_the_head_the_plugins_are_named(tmp_path):
    with pytest.raises(launch.LaunchError, match="give the Volcano job the plugins env and svc"):
        launch.head_names({}, tmp_path)


def test_a_name_that_resolves_late_is_waited_for(monkeypatch):
    answers = iter([OSError("not yet"), OSError("not yet"), [(None, None, None, None, ("10.0.0.7", 0))]])

    def getaddrinfo(*_, **__):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(launch.socket, "getaddrinfo", getaddrinfo)
    assert launch.resolve(["night-head-0.night"], patience=5, pause=0) == "10.0.0.7"


def test_a_name_that_never_resolves_is_an_error_that_names_it():
    with pytest.raises(launch.LaunchError, match=r"did not resolve in 0 s \(no-such-head.invalid"):
        launch.resolve(["no-such-head.invalid"], patience=0)


def test_the_interface_of_an_address_is_found():
    assert launch.interface_of("127.0.0.1") == "lo"
    assert launch.interface_of("192.0.2.1") is None  # RFC 5737: nobody has it


def test_communication_goes_over_the_interface_of_the_node_s_own_address():
    found = launch.communication("127.0.0.1", {"GLOO_SOCKET_IFNAME": "bond0"})
    assert found["HCCL_IF_IP"] == "127.0.0.1" and found["HCCL_SOCKET_IFNAME"] == "=lo" == found["NCCL_SOCKET_IFNAME"]
    assert "GLOO_SOCKET_IFNAME" not in found


def test_cards_are_counted_by_their_devices(tmp_path, monkeypatch):
    for name in ("davinci0", "davinci7", "davinci_manager", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert launch.cards(tmp_path) == ("NPU", 2)
    monkeypatch.setattr(launch, "cards", lambda: ("NPU", 2))
    assert launch.communication("127.0.0.1", {})["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
    assert '--resources={"NPU": 2}' in launch.ray_start("10.0.0.7", head=None)


def test_a_head_starts_the_cluster_runs_the_night_and_stops_it(tools, monkeypatch):
    monkeypatch.setattr(launch, "count_nodes", lambda address: 2)
    (tools / "code").write_text("4")
    code = launch.main(["--row", "atlas-a2", "--store", str(tools), "--role", "head", "--nodes", "2"])
    assert code == 4
    start, night = sorted(called(tools), reverse=True)
    assert start.startswith("ray start --node-ip-address=") and " --block --head " in start
    assert f"alignment nightly run {CI}/nightly.yaml --row atlas-a2" in night and "--ray-address" in night
    (record,) = (tools / "nights" / "atlas-a2").glob("*/launch.json")
    assert not record.with_name("ray-token").exists()
    kept = json.loads(record.read_text())
    assert (kept["exit_code"], kept["call"], kept["nodes"]) == (4, "warn", 2)


def test_a_night_with_a_node_too_few_is_run_all_the_same(tools, monkeypatch, capfd):
    monkeypatch.setattr(launch, "count_nodes", lambda address: 1)
    arguments = ["--row", "atlas-a2", "--store", str(tools), "--role", "head", "--nodes", "2", "--patience", "0"]
    (tools / "code").write_text("3")
    assert launch.main(arguments) == 3
    assert "1 of 2 nodes came in 0 s" in capfd.readouterr().err
    assert sum(line.startswith("alignment nightly run") for line in called(tools)) == 1


@pytest.mark.parametrize("code, kubernetes", [(0, 0), (1, 1), (2, 2), (3, 3), (4, 0)])
def test_kubernetes_sees_a_failure_exactly_where_the_matrix_pages(code, kubernetes, tools):
    (tools / "code").write_text(str(code))
    arguments = ["--row", "cpu", "--store", str(tools)]
    assert launch.main(arguments) == code
    assert launch.main([*arguments, "--fail-on", "page"]) == kubernetes


@pytest.mark.parametrize(
    "code, said, called",
    [(0, "warn", "warn"), (0, "ignore", "ignore"), (1, "ignore", "page"), (4, "page", "page"), (9, None, "page")],
)
def test_the_call_is_the_graver_of_the_matrix_s_and_the_night_s_own(code, said, called, tmp_path):
    if said is not None:
        (tmp_path / "night.json").write_text(json.dumps({"action": said}))
    assert launch.call_of(code, CI / "nightly.yaml", tmp_path) == called


def test_a_night_that_is_there_already_is_resumed(tools, monkeypatch):
    launch.os.environ["ALIGNMENT_NIGHT"] = "nightly-cpu-x7k2p"
    begun = tools / "nights" / "cpu" / "nightly-cpu-x7k2p" / "night" / "begun.json"
    begun.parent.mkdir(parents=True)
    begun.write_text("{}")
    assert launch.main(["--row", "cpu", "--store", str(tools)]) == 0
    assert called(tools)[0].endswith(" --resume")
    assert f"--history {tools}/nights/cpu/history.sqlite" in called(tools)[0]


def test_a_store_that_cannot_be_written_pages(tools, capsys):
    (tools / "store").write_text("a file")
    assert launch.main(["--row", "cpu", "--store", str(tools / "store"), "--fail-on", "page"]) == launch.DID_NOT_RUN
    captured = capsys.readouterr()
    assert "this node cannot take part" in captured.err and '"call": "page"' in captured.out


def test_a_cluster_has_a_secret_that_only_its_store_knows(tmp_path):
    token = launch.share_token(tmp_path / "ray-token")
    assert len(token) == 64 and (tmp_path / "ray-token").stat().st_mode & 0o777 == 0o600
    assert launch.share_token(tmp_path / "ray-token") == token  # a head that was started again
    assert launch.read_token(tmp_path / "ray-token", patience=0, pause=0) == token
    with pytest.raises(launch.LaunchError, match="no head, or another store than the head's"):
        launch.read_token(tmp_path / "elsewhere" / "ray-token", patience=0, pause=0)


def a_worker(tools, **environ):
    launch.os.environ.update({"ALIGNMENT_HEAD": "127.0.0.1", "ALIGNMENT_NIGHT": "n1", **environ})
    folder = tools / "nights" / "atlas-a2" / "n1"
    folder.mkdir(parents=True)
    (folder / "ray-token").write_text("secret")
    arguments = ["--row", "atlas-a2", "--store", str(tools), "--role", "worker", "--pause", "0", "--goodbye", "0"]
    return [*arguments, "--patience", "0"]


def test_a_worker_joins_the_head_joins_again_and_ends_with_it(tools, monkeypatch):
    arguments = a_worker(tools)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(launch, "PORT", server.getsockname()[1])
        answers = iter([True, True, False, False])
        monkeypatch.setattr(launch, "answers", lambda address: next(answers))
        assert launch.main(arguments) == 0
    joins = called(tools)
    assert len(joins) == 2 and all(f"--block --address=127.0.0.1:{launch.PORT}" in line for line in joins)
    assert launch.os.environ["RAY_AUTH_TOKEN"] == "secret" and launch.os.environ["RAY_AUTH_MODE"] == "token"


def test_a_worker_whose_head_is_gone_with_its_name_ends_well(tools, monkeypatch):
    arguments = a_worker(tools)
    found, answers = iter(["127.0.0.1"]), iter([True, False, False])

    def resolve(names, **_):
        address = next(found, None)
        if address is None:
            raise launch.LaunchError("the head's name did not resolve")
        return address

    monkeypatch.setattr(launch, "resolve", resolve)
    monkeypatch.setattr(launch, "answers", lambda address: next(answers))
    assert launch.main(arguments) == 0
    assert len(called(tools)) == 1


def test_a_worker_without_the_name_of_its_night_says_so(tools, capsys):
    arguments = a_worker(tools)
    del launch.os.environ["ALIGNMENT_NIGHT"]
    assert launch.main(arguments) == 1
    assert "ALIGNMENT_NIGHT is not set: the nodes of a night need one name for it" in capsys.readouterr().err


def test_a_worker_that_never_reaches_the_head_says_so(tools, monkeypatch, capsys):
    arguments = a_worker(tools)
    monkeypatch.setattr(launch, "answers", lambda address: False)
    assert launch.main(arguments) == 1
    assert "the head at 127.0.0.1" in capsys.readouterr().err


def test_a_signal_before_the_night_is_a_page_with_its_reason(tools, monkeypatch, capsys):
    monkeypatch.setattr(launch, "count_nodes", lambda address: os.kill(os.getpid(), signal.SIGTERM) or 0)
    code = launch.main(["--row", "atlas-a2", "--store", str(tools), "--role", "head", "--nodes", "2"])
    assert code == launch.DID_NOT_RUN
    assert "ended by SIGTERM before the night began" in capsys.readouterr().err
    (record,) = (tools / "nights" / "atlas-a2").glob("*/launch.json")
    assert json.loads(record.read_text())["call"] == "page"


def test_a_signal_ends_the_night_first(tmp_path):
    night = tmp_path / "alignment"
    night.write_text(f"#!/bin/sh\ntrap 'echo ended > {tmp_path}/said; exit 3' TERM\ntouch {tmp_path}/began\n"
                     "while :; do sleep 0.05; done\n")  # fmt: skip
    night.chmod(0o755)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'unit' / 'ci')!r})\n"
        "from ci_folder import script\n"
        f"launch = script('launch'); launch.tool = lambda name: {str(night)!r}\n"
        f"sys.exit(launch.main(['--row', 'cpu', '--store', {str(tmp_path)!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "began").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 3
    finally:
        process.kill()
    assert (tmp_path / "said").read_text() == "ended\n"
    (record,) = (tmp_path / "nights" / "cpu").glob("*/launch.json")
    assert json.loads(record.read_text())["exit_code"] == 3
