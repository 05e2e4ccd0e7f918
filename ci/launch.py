"""Starts one node of a night and, on the head, the night: what the pods and containers of the nightly run.

Nobody knows the address of a bare-metal node before a pod runs on it. So a node asks for its own (``POD_IP``, which
Kubernetes fills in), finds the interface that has it, and finds the head by the names that the scheduler mounted:
Volcano's svc plugin writes them to ``/etc/volcano/head.host`` and into ``VC_HEAD_HOSTS``. They resolve some time after
the pod started.

The head waits for the nodes it was promised, but not for ever: a night with a node too few still ends with a verdict
that says so. A worker joins, joins again when it lost the head, and ends with the head.

It needs nothing but Python; everything it found goes to ``launch.json`` beside the night.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

CI = Path(__file__).resolve().parent
VOLCANO = Path("/etc/volcano")
PORT = int(os.environ.get("ALIGNMENT_RAY_PORT", "6379"))
ROLES = ("alone", "head", "worker")
SIOCGIFADDR = 0x8915
ENDING = (signal.SIGTERM, signal.SIGINT)
TOKEN = "ray-token"
DID_NOT_RUN = 3
"""Exit code of a launch that did not come to a night: page, as nobody maps it to less."""


class LaunchError(Exception):
    """Why this node cannot take part, in one sentence."""


def head_names(environ, volcano: Path = VOLCANO) -> list[str]:
    """The names under which the head may be found, most reliable first.

    Raises:
        LaunchError: nothing says who the head is.
    """
    names = [environ["ALIGNMENT_HEAD"]] if environ.get("ALIGNMENT_HEAD") else []
    try:
        names += (volcano / "head.host").read_text(encoding="utf-8").split()
    except OSError:
        pass
    names += environ.get("VC_HEAD_HOSTS", "").replace(",", " ").split()
    if not names:
        raise LaunchError(
            f"nothing says where the head is: neither ALIGNMENT_HEAD nor {volcano / 'head.host'} nor VC_HEAD_HOSTS. "
            "Next: give the Volcano job the plugins env and svc"
        )
    return list(dict.fromkeys(names))


def resolve(names: list[str], *, patience: float, pause: float = 2.0) -> str:
    """The address of the first name that resolves, asked again until ``patience`` seconds are over.

    Raises:
        LaunchError: none of them did.
    """
    end = time.monotonic() + patience
    while True:
        for name in names:
            try:
                return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
            except OSError as error:
                last = f"{name}: {error}"
        if time.monotonic() >= end:
            raise LaunchError(f"the head's name did not resolve in {patience:.0f} s ({last})")
        time.sleep(pause)


def own_address(environ) -> str:
    """The address other nodes reach this one under."""
    return environ.get("POD_IP") or socket.gethostbyname(socket.gethostname())


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def cards(devices: Path = Path("/dev")) -> tuple[str | None, int]:
    """What Ray calls the accelerators here, and how many there are."""
    for resource, pattern in (("NPU", r"davinci\d+"), ("GPU", r"nvidia\d+")):
        count = sum(bool(re.fullmatch(pattern, path.name)) for path in devices.iterdir())
        if count:
            return resource, count
    return None, 0


def communication(address: str, environ) -> dict[str, str]:
    """Variables of HCCL, NCCL and Gloo that follow from the address of this node. What is set already stays."""
    found = {"HCCL_IF_IP": address}
    interface = interface_of(address)
    if interface:
        # An equals sign asks HCCL and NCCL for exactly this name, not for names that begin with it.
        found |= {"HCCL_SOCKET_IFNAME": f"={interface}", "NCCL_SOCKET_IFNAME": f"={interface}"}
        found |= {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    resource, count = cards()
    if resource == "NPU":
        # Inside the container the cards that were mounted are counted from 0, whatever their numbers on the node.
        found["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
    return {name: value for name, value in found.items() if not environ.get(name)}


def ray_start(address: str, *, head: str | None) -> list[str]:
    """The command that starts Ray on this node: as the head, or to join ``head``."""
    line = [tool("ray"), "start", f"--node-ip-address={address}", "--disable-usage-stats"]
    resource, count = cards()
    if resource == "NPU":
        line.append(f"--resources={json.dumps({'NPU': count})}")
    elif resource == "GPU":
        line.append(f"--num-gpus={count}")
    if head is None:
        return [*line, "--block", "--head", f"--port={PORT}", "--include-dashboard=false"]
    return [*line, "--block", f"--address={head}:{PORT}"]


def tool(name: str) -> str:
    """A program of the environment this runs in."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def answers(address: str, port: int = PORT, *, timeout: float = 2.0) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((address, port), timeout=timeout):
            return True
    except OSError:
        return False


def count_nodes(address: str) -> int:
    """Living nodes of the cluster; 0 where nobody could be asked. The process that asks dies with the cluster."""
    code = "import ray; ray.init(address='auto', logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))"
    environ = {**os.environ, "RAY_ADDRESS": f"{address}:{PORT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    return int(done.stdout.split()[-1]) if done.returncode == 0 and done.stdout.strip() else 0


def wait_for_nodes(address: str, wanted: int, *, patience: float, pause: float = 5.0) -> int:
    """How many nodes there are once ``wanted`` have come, or ``patience`` seconds are over."""
    end = time.monotonic() + patience
    while True:
        try:
            found = count_nodes(address)
        except subprocess.TimeoutExpired:
            found = 0
        if found >= wanted or time.monotonic() >= end:
            return found
        time.sleep(pause)


def share_token(path: Path) -> str:
    """The secret of this cluster, made by the head and read by its nodes from the store: without it whoever reaches a
    node's network may run code there. A head that is started again finds the one it made.
    """
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="utf-8")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(token)
    return token


def read_token(path: Path, *, patience: float, pause: float) -> str:
    """The secret that the head wrote.

    Raises:
        LaunchError: it did not come: the head did not start, or this node has another store.
    """
    end = time.monotonic() + patience
    while True:
        token = path.read_text(encoding="utf-8") if path.exists() else ""
        if token:
            return token
        if time.monotonic() >= end:
            raise LaunchError(f"{path} did not come in {patience:.0f} s: no head, or another store than the head's")
        time.sleep(pause)


class Node:
    """The Ray processes of this machine that this launch started, and no others."""

    def __init__(self, line: list[str]) -> None:
        self.process = subprocess.Popen(line)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def run_worker(options, address: str, token: Path, record: dict) -> int:
    """Joins the head until it is gone for good."""
    if not os.environ.get("ALIGNMENT_NIGHT"):
        raise LaunchError("ALIGNMENT_NIGHT is not set: the nodes of a night need one name for it")
    names = head_names(os.environ)
    head = resolve(names, patience=options.patience, pause=options.pause)
    secret = read_token(token, patience=options.patience, pause=options.pause)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret}
    record |= {"head": head}
    end = time.monotonic() + options.patience
    joined = False
    while True:
        if answers(head):
            joined = True
            with Node(ray_start(address, head=head)) as node:
                node.process.wait()
            end = time.monotonic() + options.goodbye
        elif time.monotonic() >= end:
            if joined:
                return 0  # The night is over.
            raise LaunchError(f"the head at {head}:{PORT} did not answer in {options.patience:.0f} s")
        time.sleep(options.pause)
        try:
            head = resolve(names, patience=0)  # it may have moved
        except LaunchError:
            continue  # the names of a job that is over resolve no more


def run_night(options, address: str | None, out: Path) -> int:
    """The night itself, resumed where an earlier pod left one.

    A signal that ends this process ends the night first, so that it can say how far it came. The history is
    kept beside the nights of the row, unless ALIGNMENT_HISTORY names a folder.
    """
    line = [tool("alignment"), "nightly", "run", str(options.matrix), "--row", options.row, "--out", str(out)]
    kept = os.environ.get("ALIGNMENT_HISTORY") or out.parent.parent
    line += ["--history", str(Path(kept) / "history.sqlite")]
    if address is not None:
        line += ["--ray-address", address]
    if (out / "begun.json").exists():
        line.append("--resume")
    asked: list[int] = []
    nights: list[subprocess.Popen] = []

    def end(number: int, _: object) -> None:
        asked.append(number)
        for night in nights:
            night.send_signal(number)

    for name in ENDING:
        signal.signal(name, end)
    nights.append(subprocess.Popen(line, cwd=CI.parent))
    if asked:  # while the night was being started
        nights[0].send_signal(asked[-1])
    return nights[0].wait()


def run_head(options, address: str, token: Path, out: Path, record: dict) -> int:
    """Starts the cluster, waits for its nodes, and runs the night."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": share_token(token)}
    with Node(ray_start(address, head=None)):
        record["nodes"] = wait_for_nodes(address, options.nodes, patience=options.patience, pause=options.pause)
        if record["nodes"] < options.nodes:
            print(f"{record['nodes']} of {options.nodes} nodes came in {options.patience:.0f} s", file=sys.stderr)
        code = run_night(options, f"{address}:{PORT}", out)
    token.unlink(missing_ok=True)
    return code


def interrupted(number: int, _: object) -> None:
    raise LaunchError(f"ended by {signal.Signals(number).name} before the night began")


def call_of(code: int, matrix: Path, out: Path) -> str:
    """Page, warn or ignore: what the matrix says of an exit code, or what the night says of itself if that is graver
    (drift warns, though nothing failed).
    """
    import yaml

    named = yaml.safe_load(matrix.read_text(encoding="utf-8")).get("exit_codes") or {}
    calls = [{0: "ignore", 4: "warn", **named}.get(code, "page")]
    try:
        calls.append(json.loads((out / "night.json").read_text(encoding="utf-8"))["action"])
    except (OSError, ValueError, KeyError):
        pass
    return next(call for call in ("page", "warn", "ignore") if call in calls)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", required=True, help="row of the matrix")
    parser.add_argument("--store", required=True, type=Path, help="folder that every node and the runners share")
    parser.add_argument("--matrix", type=Path, default=CI / "nightly.yaml")
    parser.add_argument("--role", choices=ROLES, default=os.environ.get("ALIGNMENT_ROLE", "alone"))
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("ALIGNMENT_NODES", "1")))
    parser.add_argument("--ray", help="address of a Ray cluster that is there (auto: the one of this machine)")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for names to resolve and nodes to come")
    parser.add_argument("--goodbye", type=float, default=60.0, help="seconds a worker waits for a head that is gone")
    parser.add_argument("--pause", type=float, default=2.0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--fail-on", choices=("any", "page"), default="any",
        help="page: exit with 0 unless the night pages (Kubernetes knows only success and failure)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    night = os.environ.get("ALIGNMENT_NIGHT") or datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    folder = options.store / "nights" / options.row / night
    record = {"row": options.row, "role": options.role, "night": night, "began": now()}
    code = DID_NOT_RUN
    try:
        for name in ENDING:
            signal.signal(name, interrupted)
        record["cards"] = {name: count for name, count in [cards()] if name}
        if options.role != "alone":
            address = own_address(os.environ)
            os.environ.update(communication(address, os.environ))
            record |= {"address": address, "interface": interface_of(address)}
        if options.role == "worker":
            return run_worker(options, address, folder / TOKEN, record)
        folder.mkdir(parents=True, exist_ok=True)
        if options.role == "head" and not options.ray:
            code = run_head(options, address, folder / TOKEN, folder / "night", record)
        else:
            code = run_night(options, options.ray, folder / "night")
    except (LaunchError, OSError, subprocess.SubprocessError) as error:
        record["problem"] = str(error)
        print(f"this node cannot take part: {error}", file=sys.stderr)
        if options.role == "worker":
            return 1
    finally:
        if options.role != "worker":
            call = call_of(code, options.matrix, folder / "night")
            record |= {"ended": now(), "exit_code": code, "call": call}
            keep(record, folder / "launch.json")
    if options.fail_on == "page" and record["call"] != "page":
        return 0
    return code if code >= 0 else 128 - code


def keep(record: dict, path: Path) -> None:
    """Writes the record; a full disk loses it, never the night's own exit code."""
    try:
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        print(f"{path} was not written: {error}", file=sys.stderr)
    print(json.dumps(record, default=str))


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
