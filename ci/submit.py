"""Creates the Volcano job of a file, and with ``--wait`` sees its night through.

Cron jobs and the runners of the pipelines use it inside a cluster. It speaks to the API with the service account of its
pod, so that no image with kubectl is needed where no registry is near. With ``--wait`` the exit code is the night's
own, and ``--out`` receives what the night left (checkpoints stay in the store). A job that ended without a record of
its night, or not in time, is 3: nothing was shown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JOB = ("batch.volcano.sh/v1alpha1", "Job")
OVER = ("Completed", "Failed", "Aborted", "Terminated")
"""Phases in which a Volcano job stays."""

NOTHING_SHOWN = 3
KEPT_IN_STORE = shutil.ignore_patterns("checkpoints", "ray-token", "*.new")


class Api:
    """The API server of the cluster this runs in."""

    def __init__(self, url: str, account: Path = ACCOUNT) -> None:
        self.url = url
        self._token = _text(account / "token")
        authority = account / "ca.crt"
        self._context = None
        if url.startswith("https"):
            self._context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)

    def call(self, method: str, path: str, body: dict | None = None) -> dict:
        """One request; what the server says against it ends in the message."""
        request = urllib.request.Request(
            self.url + path, method=method, data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._context) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            try:
                said = json.loads(said).get("message", said)
            except ValueError:
                pass
            raise RuntimeError(f"the API refused {method} {path}: {error.code} {said}") from None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def path_of(document: dict) -> str:
    """Where objects of this kind are created."""
    if (document["apiVersion"], document["kind"]) != JOB:
        raise RuntimeError(f"expected {' '.join(JOB)}, found {document['apiVersion']} {document['kind']}")
    return f"/apis/{document['apiVersion']}/namespaces/{document['metadata']['namespace']}/jobs"


def wait(api: Api, path: str, *, minutes: float, pause: float) -> str:
    """The phase a job ended in, or ``Timeout``. A server that does not answer for a while is asked again."""
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        try:
            phase = api.call("GET", path).get("status", {}).get("state", {}).get("phase", "Pending")
            if phase in OVER:
                return phase
        except (OSError, RuntimeError) as error:
            print(f"asking again: {error}", file=sys.stderr)
        time.sleep(pause)
    return "Timeout"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--wait", action="store_true", help="until the job is over; the exit code is then the night's")
    parser.add_argument("--minutes", type=float, default=720.0, help="how long to wait")
    parser.add_argument("--store", type=Path, help="the shared store, as it is mounted here")
    parser.add_argument("--out", type=Path, help="receives what the night left")
    parser.add_argument("--api", default=_address(), help="address of the API; that of this pod's cluster by default")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=20.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    document = yaml.safe_load(options.file.read_text(encoding="utf-8"))
    if not options.api:
        print("no pod of a cluster: KUBERNETES_SERVICE_HOST is not set. Next: kubectl create -f FILE", file=sys.stderr)
        return NOTHING_SHOWN
    api = Api(options.api, options.account)
    try:
        path = path_of(document)
        name = api.call("POST", path, document)["metadata"]["name"]
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return NOTHING_SHOWN
    print(f"created {name}", flush=True)
    if not options.wait:
        return 0
    phase = wait(api, f"{path}/{name}", minutes=options.minutes, pause=options.pause)
    print(f"{name}: {phase}", flush=True)
    night = options.store / "nights" / document["metadata"]["labels"]["alignment/row"] / name
    if options.out is not None and night.is_dir():
        shutil.copytree(night, options.out / name, ignore=KEPT_IN_STORE, dirs_exist_ok=True)
    try:
        code = json.loads((night / "launch.json").read_text(encoding="utf-8"))["exit_code"]
    except (OSError, ValueError, KeyError) as error:
        print(f"{name} left no record of its night ({error})", file=sys.stderr)
        return NOTHING_SHOWN
    # A night that says it is well, of a job that is not, is not believed.
    return NOTHING_SHOWN if phase == "Timeout" else int(code)


def _address() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if host and ':' in host else host}:{port}" if host else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
