#!/usr/bin/env python3
"""Stands in for a container engine: an image is a folder, images/NAME, that its containers take for their CANN.

A container is a process of this machine. Known are the calls of docs/bisect.md and of the provider: image inspect, run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FLAGS = ("--rm", "--network=host", "--ipc=host")
IMAGES = Path(__file__).resolve().parents[1] / "images"
DIGEST = f"@sha256:{0:064x}"


def folder_of(image: str) -> Path:
    """The folder of an image, with or without its digest."""
    folder = IMAGES / image.removesuffix(DIGEST)
    if not folder.is_dir():
        sys.exit(f"no such image: {image}")
    return folder


def main(verb: str, *words: str) -> None:
    rest = list(words)
    if verb == "image" and rest.pop(0) == "inspect":
        folder_of(rest[-1])
        print(rest[-1].removesuffix(DIGEST) + DIGEST)
    elif verb == "run":
        while rest[0].startswith("-"):
            option = rest.pop(0)
            if option == "--env":
                name, _, value = rest.pop(0).partition("=")
                os.environ[name] = value
            elif option == "--workdir":
                os.chdir(rest.pop(0))
            elif option in ("--device", "--volume"):
                rest.pop(0)
            elif option not in FLAGS:
                sys.exit(f"unknown option {option}")
        os.environ["ASCEND_TOOLKIT_HOME"] = str(folder_of(rest.pop(0)))
        os.execvp(rest[0], rest)
    else:
        sys.exit(f"unknown command {verb}")


if __name__ == "__main__":
    main(*sys.argv[1:])
