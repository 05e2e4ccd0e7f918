"""What is driven through one night, and whether it can be begun or gone on with."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from alignment.errors import InputError
from alignment.files import read_json
from alignment.report.night import BEGUN, NIGHT
from alignment.report.night_matrix import Matrix, Row

PROVENANCE_PHASE = "provenance"
"""The first phase of every night: which code, which packages, which machine."""


@dataclass(frozen=True, kw_only=True)
class NightSetting:
    """What to drive. ``ray`` is the address of the cluster, ``history`` the file of the nights (None: none is kept),
    ``baselines`` the folder for the band behind the curves of the page."""

    matrix: Matrix
    row: Row
    out: Path
    ray: str | None = None
    history: Path | None = None
    baselines: Path | None = None
    resume: bool = False

    @property
    def uses_ray(self) -> bool:
        return any(phase.where != "head" for phase in self.matrix.phases_of(self.row))

    @property
    def again(self) -> str:
        """The command that goes on with this night, with absolute paths: who reads it may be in another folder."""
        words = ["alignment", "nightly", "run", str(self.matrix.path.absolute()), "--row", self.row.name]
        words += ["--out", str(self.out.absolute())]
        words += [] if self.ray is None else ["--ray-address", self.ray]
        words += ["--no-history"] if self.history is None else ["--history", str(self.history.absolute())]
        words += [] if self.baselines is None else ["--baseline", str(self.baselines.absolute())]
        return shlex.join([*words, "--resume"])


def check_setting(setting: NightSetting) -> None:
    """Refuses a call that is wrong, before anything is run.

    Raises:
        InputError: a night lies there already, there is none to resume, it was begun with another matrix, or the row
            needs a cluster.
    """
    row, out = setting.row, setting.out
    if PROVENANCE_PHASE in row.phases:
        raise InputError("every night begins with this phase", where=f"row {row.name}", found=PROVENANCE_PHASE)
    if setting.ray is None and (row.nodes > 1 or setting.uses_ray):
        raise InputError(
            "the row runs on a Ray cluster", where=f"row {row.name}", expected="--ray-address ADDRESS",
            found=f"{row.nodes} nodes, phases on the cluster: {setting.uses_ray}",
        )  # fmt: skip
    begun = (out / BEGUN).is_file() or (out / NIGHT).is_file()
    if setting.resume and not (out / BEGUN).is_file():
        raise InputError("there is no night to resume", where=out, next_step="run it without --resume")
    if begun and not setting.resume:
        raise InputError("a night lies here already", where=out, next_step="--resume, or another --out")
    if setting.resume:
        about, digest = read_json(out / BEGUN), setting.matrix.digest(row)
        if about.get("row") != row.name or about.get("digest") != digest:
            raise InputError(
                "the night was begun with another matrix", where=out / BEGUN, expected=f"{row.name} ({digest})",
                found=f"{about.get('row')} ({about.get('digest')})", next_step="begin a new night in another --out",
            )  # fmt: skip
