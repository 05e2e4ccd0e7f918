"""The commands of docs/ci.md for Kubernetes, by the real kubectl, on a stand-in for the API of a cluster.

The stand-in knows the kinds that are rendered, refuses what their schemas do not have or whose namespace is missing,
and keeps the rest. It proves the command lines, their order and the manifests, and nothing of a cluster.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading

import pytest
import yaml
from ci_folder import ROOT, linter, tool
from test_manifests import CUSTOM, VERSIONS, pod_templates, validate, validate_custom

COMMON, CRON, JOB = (
    f"ci/rendered/{name}" for name in ("common.yaml", "atlas-a2/cronjob.yaml", "atlas-a2/volcano-job.yaml")
)
NAMESPACED = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "serviceaccounts": "ServiceAccount",
    },
    "batch/v1": {"cronjobs": "CronJob"},
    "rbac.authorization.k8s.io/v1": {"rolebindings": "RoleBinding", "roles": "Role"},
    "batch.volcano.sh/v1alpha1": {"jobs": "Job"},
}
VERBS = ["create", "get", "patch"]


class Api(http.server.BaseHTTPRequestHandler):
    """Discovery, reading, creating."""

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        if path == "api":
            return self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        if path == "apis":
            versions = [{"groupVersion": name, "version": name.split("/")[1]} for name in NAMESPACED if "/" in name]
            groups = [
                {"name": v["groupVersion"].split("/")[0], "versions": [v], "preferredVersion": v} for v in versions
            ]
            return self._answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        version = path.partition("/")[2]
        if version in NAMESPACED:
            kinds = {**NAMESPACED[version], **({"namespaces": "Namespace"} if version == "v1" else {})}
            found = [
                {"name": name, "singularName": "", "namespaced": kind != "Namespace", "kind": kind, "verbs": VERBS}
                for name, kind in kinds.items()
            ]
            return self._answer(200, {"kind": "APIResourceList", "groupVersion": version, "resources": found})
        kept = self.server.kept.get(path)
        return self._answer(200, kept) if kept else self._refuse(404, "NotFound", f"{path} not found")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path, metadata = self.path.partition("?")[0].strip("/"), body["metadata"]
        namespace = f"api/v1/namespaces/{metadata.get('namespace')}"
        if body["kind"] != "Namespace" and namespace not in self.server.kept:
            return self._refuse(404, "NotFound", f'namespaces "{metadata.get("namespace")}" not found')
        try:
            check(body)
        except Exception as error:  # of the two validators, which have no class in common
            return self._refuse(422, "Invalid", str(error).splitlines()[0])
        metadata.setdefault("name", metadata.get("generateName", "") + "x7k2p")
        self.server.kept[f"{path}/{metadata['name']}"] = body
        return self._answer(201, body)

    def _refuse(self, code, reason, message):
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        return self._answer(code, {**status, "reason": reason, "message": message})

    def _answer(self, code, document):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_):
        pass


def check(document: dict) -> None:
    """Raises where a document is not what the schema of its kind says."""
    if document["apiVersion"] in ("v1", "batch/v1") or document["apiVersion"].startswith("rbac."):
        return validate(document, VERSIONS[-1])
    # kubectl adds what it last applied to the metadata, which the schema has no opinion of.
    validate_custom(document, CUSTOM["volcano-job.yaml"])
    for pod in pod_templates(document):
        validate(pod, VERSIONS[-1])


@pytest.fixture
def cluster(tmp_path):
    """An empty cluster, and how to run kubectl on it; its result as exit code and lines."""
    kubectl = tool("kubectl")
    for module in ("kubernetes_validate", "jsonschema"):
        linter(module)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.kept = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "nobody"}}],
        "users": [{"name": "nobody", "user": {}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    environ = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}

    def run(verb, flag, path):
        # The stand-in validates; it publishes no OpenAPI by which kubectl would.
        line = [kubectl, verb, flag, path, "--validate=false"]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    yield run, server.kept
    server.shutdown()
    server.server_close()


def test_the_commands_of_the_page_create_what_a_night_needs(cluster):
    kubectl, kept = cluster
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    for verb, path in (("apply", COMMON), ("apply", CRON), ("create", JOB)):
        assert f"\nkubectl {verb} -f {path}" in page
    assert kubectl("apply", "-f", COMMON) == (
        0,
        [
            "namespace/alignment created",
            "persistentvolumeclaim/alignment-store created",
            "serviceaccount/alignment-nightly created",
            "role.rbac.authorization.k8s.io/alignment-nightly created",
            "rolebinding.rbac.authorization.k8s.io/alignment-nightly created",
        ],
    )
    code, lines = kubectl("apply", "-f", CRON)
    assert (code, [line.rpartition(" ")[2] for line in lines]) == (0, ["created", "created"])
    assert kubectl("create", "-f", JOB) == (0, ["job.batch.volcano.sh/nightly-atlas-a2-x7k2p created"])
    assert sum("/batch.volcano.sh/" in path for path in kept) == 1


def test_without_what_is_common_nothing_is_created(cluster):
    kubectl, kept = cluster
    code, lines = kubectl("create", "-f", JOB)
    assert (code, kept) == (1, {})
    assert lines[-1].endswith('namespaces "alignment" not found')


def test_a_field_that_no_pod_has_is_refused(cluster, tmp_path):
    kubectl, kept = cluster
    assert kubectl("apply", "-f", COMMON)[0] == 0
    job = yaml.safe_load((ROOT / JOB).read_text(encoding="utf-8"))
    job["spec"]["tasks"][0]["template"]["spec"]["hostNetwrok"] = True
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    before = dict(kept)
    code, lines = kubectl("create", "-f", str(tmp_path / "job.yaml"))
    assert code == 1 and kept == before and "hostNetwrok" in lines[-1]
