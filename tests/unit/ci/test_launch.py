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


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """``ray`` and ``alignment`` that write down their calls; ``alignment`` exits with what the file ``code`` says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ray").write_text(f'#!/bin/sh\necho "ray $@" >> {tmp_path}/called\n')
    (folder / "alignment").write_text(
        f'#!/bin/sh\necho "alignment $@" >> {tmp_path}/called\nexit $(cat {tmp_path}/code 2>/dev/null || echo 0)\n'
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
    start, night, stop = called(tools)
    assert start.startswith("ray start --node-ip-address=") and " --head " in start
    assert f"alignment nightly run {CI}/nightly.yaml --row atlas-a2" in night and "--ray-address" in night
    assert stop == "ray stop --force"
    (record,) = (tools / "nights" / "atlas-a2").glob("*/launch.json")
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


def test_a_night_that_is_there_already_is_resumed(tools, monkeypatch):
    launch.os.environ["ALIGNMENT_NIGHT"] = "nightly-cpu-x7k2p"
    (tools / "nights" / "cpu" / "nightly-cpu-x7k2p" / "night").mkdir(parents=True)
    assert launch.main(["--row", "cpu", "--store", str(tools)]) == 0
    assert called(tools)[0].endswith(" --resume")
    assert f"--history {tools}/nights/cpu/history.sqlite" in called(tools)[0]


def test_a_store_that_cannot_be_written_pages(tools, capsys):
    (tools / "store").write_text("a file")
    assert launch.main(["--row", "cpu", "--store", str(tools / "store"), "--fail-on", "page"]) == launch.DID_NOT_RUN
    captured = capsys.readouterr()
    assert "this node cannot take part" in captured.err and '"call": "page"' in captured.out


def test_a_worker_joins_the_head_joins_again_and_ends_with_it(tools, monkeypatch):
    launch.os.environ["ALIGNMENT_HEAD"] = "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(launch, "PORT", server.getsockname()[1])
        answers = iter([True, True, False, False])
        monkeypatch.setattr(launch, "answers", lambda address: next(answers))
        arguments = ["--row", "atlas-a2", "--store", str(tools), "--role", "worker", "--pause", "0", "--goodbye", "0"]
        assert launch.main(arguments) == 0
    joins = called(tools)
    assert len(joins) == 2 and all(f"--address=127.0.0.1:{launch.PORT} --block" in line for line in joins)


def test_a_worker_that_never_reaches_the_head_says_so(tools, monkeypatch, capsys):
    launch.os.environ["ALIGNMENT_HEAD"] = "127.0.0.1"
    monkeypatch.setattr(launch, "answers", lambda address: False)
    arguments = ["--row", "atlas-a2", "--store", str(tools), "--role", "worker", "--pause", "0", "--patience", "0"]
    assert launch.main(arguments) == 1
    assert "the head at 127.0.0.1" in capsys.readouterr().err


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
