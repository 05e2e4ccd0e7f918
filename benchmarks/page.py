"""Opening the page of a run in a browser that is not warm: time and size.

    python benchmarks/page.py [--steps 200] [--metrics 100] [--repeat 5] [--browser NAME] [--json]

Makes a run with as many steps and metrics, its verdicts and its provenance, writes its page as ``alignment report``
does, and opens that in fresh processes of Chromium and of Firefox, as far as they are installed, without a window. From
the browser's own clock, since it was asked for the page: when something was painted, when the page was loaded, and when
the charts in sight were drawn. Prints medians; bar: 2 s until everything is there. Nothing is judged. Exit code 2 where
no browser is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from alignment.files import write_json
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict
from alignment.report.page import CURVES, GAP, write_page
from alignment.report.run_directory import PROVENANCE, write_verdicts
from alignment.rl.tracking import METRICS

BROWSERS = {"chromium": ("chromium", "chromium-browser", "google-chrome"), "firefox": ("firefox", "firefox-esr")}
CHECKS = 120
"""As many as ``alignment run`` judges."""

ASK = """
new Promise((done) => {
  const told = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    const open = performance.getEntriesByType("navigation")[0];
    const asked = performance.getEntriesByType("resource").filter((entry) => !entry.name.startsWith("data:"));
    const near = [...document.querySelectorAll(".chart")].filter((c) => c.getBoundingClientRect().top < innerHeight);
    const drawn = near.length && near.every((chart) => chart.querySelector("svg .line"));
    if (!paint || !open.loadEventEnd || !drawn) return setTimeout(told, 5);
    done(JSON.stringify({
      painted: paint.startTime, loaded: open.loadEventEnd, drawn: performance.now(),
      charts: near.length, requests: asked.length,
    }));
  };
  document.querySelector(".charts").scrollIntoView();
  told();
})
"""


def make_run(run: Path, *, steps: int, metrics: int) -> Path:
    """A run as ``alignment run`` leaves it, with one finding, and curves of so many steps."""
    finding = {
        "reason": "parts from the baseline", "next_command": "alignment run --only unit",
        "where": Divergence(stage="old_log_prob", module="model.layers.0.self_attn", quantity="output", detail="stale"),
    }  # fmt: skip
    write_verdicts(
        run,
        [
            Verdict(
                check=f"{layer}/check_{number}", layer=layer, stage="operator", subject="torch", device="cpu",
                outcome=Outcome.FAIL if number == CHECKS // 2 else Outcome.PASS, baseline="cpu/chip",
                measures=(Measure(name="relative_l2", value=0.5, bound=1.0, origin="2 x measured noise"),),
                **(finding if number == CHECKS // 2 else {"reason": "within its budget"}),
            )
            for number in range(CHECKS)
            for layer in (("unit", "layer", "e2e")[number % 3],)
        ],
    )  # fmt: skip
    shown = [*CURVES, GAP]
    names = [*shown, *(f"more/metric_{i}" for i in range(metrics - len(shown)))][:metrics]
    lines = [
        json.dumps({"step": step, **{name: (step % 17 + i) / 7 for i, name in enumerate(names)}})
        for step in range(1, steps + 1)
    ]
    (run / "dapo").mkdir(parents=True)
    (run / "dapo" / METRICS).write_text("\n".join(lines) + "\n")
    packages = {f"package-{number}": "1.0" for number in range(200)}
    write_json(run / PROVENANCE, {"commit": "0" * 40, "fingerprint": {"chip": "a chip"}, "packages": packages})
    return run


class Chromium:
    """Chromium by its DevTools protocol over a pipe: JSON, each message ended by a zero byte."""

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._read, self._write, self._number = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb"), 0
        arguments = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, *arguments], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def _message(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            if not byte:
                raise ConnectionError("Chromium ended")
            text += byte
        return json.loads(text)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while (answer := self._message()).get("id") != self._number:
            pass
        if "error" in answer:
            raise ConnectionError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path) -> dict[str, float]:
        """What the page tells when everything is there."""
        self._call("Page.navigate", url=page.as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass
        answer = self._call("Runtime.evaluate", expression=ASK, awaitPromise=True, returnByValue=True)
        return json.loads(answer["result"]["value"])

    def close(self) -> None:
        with suppress(ConnectionError, OSError):
            self._call("Browser.close")


class Firefox:
    """Firefox by Marionette over a socket: JSON, each message with its length before it."""

    def __init__(self, program: str, profile: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        profile.mkdir()
        (profile / "user.js").write_text(f'user_pref("marionette.port", {port});\n')
        arguments = [program, "--headless", "--marionette", "--no-remote", "--profile", str(profile)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
                break
            except OSError:
                if time.monotonic() > until or self.process.poll() is not None:
                    raise
                time.sleep(0.1)
        self._number = 0
        self._message()
        self._call("WebDriver:NewSession")

    def _message(self) -> Any:
        length = b""
        while (byte := self._socket.recv(1)) != b":":
            if not byte:
                raise ConnectionError("Firefox ended")
            length += byte
        text = b""
        while len(text) < int(length):
            text += self._socket.recv(int(length) - len(text))
        return json.loads(text)

    def _call(self, command: str, **parameters: Any) -> Any:
        self._number += 1
        message = json.dumps([0, self._number, command, parameters]).encode()
        self._socket.sendall(str(len(message)).encode() + b":" + message)
        _, _, error, result = self._message()
        if error:
            raise ConnectionError(f"{command}: {error['message']}")
        return result

    def open(self, page: Path) -> dict[str, float]:
        """What the page tells when everything is there."""
        self._call("WebDriver:Navigate", url=page.as_uri())
        answer = self._call("WebDriver:ExecuteScript", script=f"return {ASK.strip()}", args=[])
        return json.loads(answer["value"])

    def close(self) -> None:
        with suppress(ConnectionError, OSError):
            self._call("Marionette:Quit", flags=["eForceQuit"])
        self._socket.close()


@contextmanager
def started(name: str, program: str) -> Iterator[Chromium | Firefox]:
    """The browser with a profile of its own, ended afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        browser = {"chromium": Chromium, "firefox": Firefox}[name](program, Path(directory) / "profile")
        try:
            yield browser
        finally:
            browser.close()
            try:
                browser.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                browser.process.kill()


def measured(name: str, program: str, page: Path, repeat: int) -> dict[str, float]:
    """Medians over fresh processes, in milliseconds."""
    told = []
    for _ in range(repeat):
        with started(name, program) as browser:
            told.append(browser.open(page))
    return {key: statistics.median(one[key] for one in told) for key in told[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--metrics", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--browser", choices=sorted(BROWSERS), action="append")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = {
        name: next(filter(None, map(shutil.which, BROWSERS[name])), None)
        for name in chosen.browser or BROWSERS
    }  # fmt: skip
    if not any(found.values()):
        print(f"no browser is installed: {', '.join(found)}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as directory:
        run = make_run(Path(directory) / "run", steps=chosen.steps, metrics=chosen.metrics)
        start = time.perf_counter()
        page = write_page([run], Path(directory) / "page.html")
        written = time.perf_counter() - start
        result: dict[str, Any] = {
            "steps": chosen.steps, "metrics": chosen.metrics, "megabytes": page.stat().st_size / 1e6,
            "written_seconds": written, "browsers": {},
        }  # fmt: skip
        for name, program in found.items():
            if program:
                result["browsers"][name] = measured(name, program, page, chosen.repeat)
    if chosen.json:
        print(json.dumps(result))
        return
    print(f"{chosen.steps} steps × {chosen.metrics} metrics: {result['megabytes']:.2f} MB, written in {written:.2f} s")
    print(f"{'ms':10}{'painted':>10}{'loaded':>10}{'drawn':>10}")
    for name in found:
        told = result["browsers"].get(name)
        values = [f"{told[key]:10.0f}" for key in ("painted", "loaded", "drawn")] if told else ["  not installed"]
        print(f"{name:10}{''.join(values)}")


if __name__ == "__main__":
    main()
