"""Creating the job of a night through the API of its cluster, and seeing it through."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from ci_folder import CI, script

submit = script("submit")
JOB = CI / "rendered" / "atlas-a2" / "volcano-job.yaml"
NAME = "nightly-atlas-a2-x7k2p"


class Cluster(http.server.BaseHTTPRequestHandler):
    """The two calls of the API that submitting takes."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.created.append((self.path, self.headers["Authorization"], body))
        if self.server.refuses:
            return self._answer(403, {"message": "jobs is forbidden"})
        return self._answer(201, {"metadata": {"name": body["metadata"]["generateName"] + "x7k2p"}})

    def do_GET(self):
        phase = self.server.phases.pop(0) if len(self.server.phases) > 1 else self.server.phases[0]
        if phase is None:
            return self._answer(500, {"message": "etcdserver: request timed out"})
        return self._answer(200, {"status": {"state": {"phase": phase}}})

    def _answer(self, code, document):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "account").mkdir()
    (tmp_path / "account" / "token").write_text("secret\n")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    server.created, server.phases, server.refuses = [], ["Completed"], False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def run(cluster, tmp_path, *arguments, file=JOB):
    address = f"http://127.0.0.1:{cluster.server_address[1]}"
    line = [str(file), "--api", address, "--account", str(tmp_path / "account"), "--pause", "0"]
    return submit.main([*line, *arguments])


def waiting(tmp_path):
    return ["--wait", "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]


def leave(tmp_path, code):
    night = tmp_path / "store" / "nights" / "atlas-a2" / NAME
    (night / "night").mkdir(parents=True)
    (night / "night" / "report.html").write_text("<html>")
    (night / "night" / "checkpoints").mkdir()
    (night / "ray-token").write_text("secret")
    (night / "launch.json").write_text(json.dumps({"exit_code": code}))


def test_the_job_is_created_as_the_service_account_in_its_namespace(cluster, tmp_path, capsys):
    assert run(cluster, tmp_path) == 0
    ((path, token, body),) = cluster.created
    assert path == "/apis/batch.volcano.sh/v1alpha1/namespaces/alignment/jobs" and token == "Bearer secret"
    assert body["spec"]["minAvailable"] == 2
    assert capsys.readouterr().out == f"created {NAME}\n"


@pytest.mark.parametrize("code", [0, 1, 3, 4])
def test_waiting_ends_with_the_night_s_own_code_and_what_it_left(code, cluster, tmp_path):
    cluster.phases = ["Pending", None, "Running", "Completed" if code in (0, 4) else "Terminated"]
    leave(tmp_path, code)
    assert run(cluster, tmp_path, *waiting(tmp_path)) == code
    left = {p.relative_to(tmp_path / "out" / NAME).as_posix() for p in (tmp_path / "out" / NAME).rglob("*")}
    assert left == {"launch.json", "night", "night/report.html"}


def test_a_job_that_was_killed_without_a_word_shows_nothing(cluster, tmp_path, capsys):
    cluster.phases = ["Aborted"]
    assert run(cluster, tmp_path, *waiting(tmp_path)) == submit.NOTHING_SHOWN
    assert f"{NAME} left no record of its night" in capsys.readouterr().err


def test_a_job_that_does_not_end_in_time_is_not_believed(cluster, tmp_path):
    cluster.phases = ["Running"]
    leave(tmp_path, 0)
    assert run(cluster, tmp_path, *waiting(tmp_path), "--minutes", "0.001") == submit.NOTHING_SHOWN


def test_what_the_api_says_against_it_is_told(cluster, tmp_path, capsys):
    cluster.refuses = True
    assert run(cluster, tmp_path) == submit.NOTHING_SHOWN
    assert capsys.readouterr().err.endswith(": 403 jobs is forbidden\n")


def test_what_is_no_volcano_job_is_refused(cluster, tmp_path, capsys):
    path = tmp_path / "pod.yaml"
    path.write_text("apiVersion: v1\nkind: Pod\nmetadata: {namespace: alignment}\n")
    assert run(cluster, tmp_path, file=path) == submit.NOTHING_SHOWN
    assert capsys.readouterr().err == "expected batch.volcano.sh/v1alpha1 Job, found v1 Pod\n"
    assert cluster.created == []


def test_outside_a_cluster_the_other_way_is_named(monkeypatch, capsys):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert submit.main([str(JOB)]) == submit.NOTHING_SHOWN
    assert "Next: kubectl create -f" in capsys.readouterr().err
