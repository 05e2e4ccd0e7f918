"""The Kubernetes manifests against schemas: Kubernetes' own for its kinds and pods, ours for Volcano and KubeRay."""

from __future__ import annotations

import copy
import json

import pytest
from ci_folder import CI, documents, linter

VERSIONS = ("1.25", "1.31", "1.37")
"""Of Kubernetes: the first with time zones of cron jobs, one of today's, the newest that the schemas know."""

CUSTOM = {"volcano-job.yaml": "volcano-job.schema.json", "rayjob.yaml": "rayjob.schema.json"}
FILES = sorted((CI / "rendered").rglob("*.yaml"))


def pod_templates(document: dict) -> list[dict]:
    """Every pod template in a custom resource, as Kubernetes would make a pod of it."""
    if document["kind"] == "Job":
        found = [task["template"] for task in document["spec"]["tasks"]]
    else:
        cluster = document["spec"]["rayClusterSpec"]
        found = [group["template"] for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ()))]
    metadata = {"name": "pod", "namespace": document["metadata"]["namespace"]}
    return [{"apiVersion": "v1", "kind": "Pod", **t, "metadata": {**metadata, **t["metadata"]}} for t in found]


def validate(document: dict, version: str) -> None:
    """Strictly: an unknown field is an error."""
    linter("kubernetes_validate").validate(document, version, strict=True)


def validate_custom(document: dict, schema: str) -> None:
    linter("jsonschema").validate(document, json.loads((CI / "schemas" / schema).read_text(encoding="utf-8")))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(p.parts[-2:]))
def test_kinds_and_pods_of_kubernetes_are_valid(path, version):
    seen = 0
    for document in documents(path):
        for plain in pod_templates(document) if path.name in CUSTOM else [document]:
            validate(plain, version)
            seen += 1
    assert seen


@pytest.mark.parametrize("path", [p for p in FILES if p.name in CUSTOM], ids=lambda p: "/".join(p.parts[-2:]))
def test_custom_resources_are_what_their_documentation_says(path):
    (document,) = documents(path)
    validate_custom(document, CUSTOM[path.name])


@pytest.mark.parametrize("name", ["volcano-job", "rayjob", "gitcode-workflow"])
def test_our_own_schemas_are_schemas_and_name_their_source(name):
    schema = json.loads((CI / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    linter("jsonschema").Draft7Validator.check_schema(schema)
    assert "https://" in schema["$comment"]


def atlas(name: str) -> dict:
    return copy.deepcopy(documents(CI / "rendered" / "atlas-a2" / name)[0])


def _volcano(change):
    document = atlas("volcano-job.yaml")
    change(document)
    return document


FAULTS = {
    "no gang": (lambda d: d["spec"].pop("minAvailable"), "'minAvailable' is a required property"),
    "a plugin missing": (lambda d: d["spec"]["plugins"].pop("svc"), "'svc' is a required property"),
    "an argument that the plugin does not have": (
        lambda d: d["spec"]["plugins"].update(svc=["--publish-addresses=true"]), "does not match"),
    "an action that Volcano does not have": (
        lambda d: d["spec"]["tasks"][0]["policies"][0].update(action="FinishJob"), "'FinishJob' is not one of"),
    "an unknown field": (lambda d: d["spec"].update(tasksCount=2), "'tasksCount' was unexpected"),
    "a task without a pod": (lambda d: d["spec"]["tasks"][1].pop("template"), "'template' is a required property"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_volcano_job_fails(fault):
    change, message = FAULTS[fault]
    with pytest.raises(linter("jsonschema").ValidationError, match=message):
        validate_custom(_volcano(change), CUSTOM["volcano-job.yaml"])


POD_FAULTS = {
    "a misspelt field": (lambda pod: pod.update(hostnetwork=True), "hostnetwork"),
    "a resource that is no quantity": (
        lambda pod: pod["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": [8]}), "is not valid under"),
    "a mount without a path": (lambda pod: pod["containers"][0]["volumeMounts"][0].pop("mountPath"), "mountPath"),
    "a number where a text belongs": (
        lambda pod: pod["containers"][0]["env"].append({"name": "X", "value": 1}), "is not of type"),
}  # fmt: skip


@pytest.mark.parametrize("fault", POD_FAULTS)
def test_a_broken_pod_inside_a_custom_resource_fails(fault):
    change, message = POD_FAULTS[fault]
    document = _volcano(lambda d: change(d["spec"]["tasks"][0]["template"]["spec"]))
    validation = linter("kubernetes_validate")
    with pytest.raises(validation.ValidationError, match=message):
        validate(pod_templates(document)[0], VERSIONS[-1])


def test_a_broken_ray_job_fails():
    document = atlas("rayjob.yaml")
    document["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] = {"num-cpus": 4}
    with pytest.raises(linter("jsonschema").ValidationError, match="4 is not of type 'string'"):
        validate_custom(document, CUSTOM["rayjob.yaml"])


def test_the_service_account_may_do_what_submitting_takes_and_no_more():
    role = next(d for d in documents(CI / "rendered" / "common.yaml") if d["kind"] == "Role")
    assert role["rules"] == [{"apiGroups": ["batch.volcano.sh"], "resources": ["jobs"], "verbs": ["create", "get"]}]
