"""Files written whole or not at all, and JSON read with errors that name the file."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alignment.errors import InputError

_EXPONENT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a file beside ``path``, flushes it to the disk and renames it into place.

    A reader sees the old file or the new one; a crash leaves the old one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(beside))
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes a rename in ``directory`` survive a power failure."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """JSON with sorted keys and full-precision floats; NaN and infinities are refused, since JSON has none."""
    try:
        text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False)
    except ValueError as error:
        raise InputError(f"a value that JSON cannot carry ({error})", where=path) from None
    write_atomically(path, lambda beside: beside.write_text(text + "\n", encoding="utf-8"))


def read_text(path: Path) -> str:
    """The text of a file that a person wrote.

    Raises:
        InputError: it is missing or cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("the file does not exist", where=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file cannot be read ({error})", where=path) from None


def parse_yaml(text: str, *, hydra: bool = False) -> Any:
    """The value of a YAML text, by libyaml where PyYAML has it: its parser in Python takes the square of the nesting.

    With ``hydra`` scalars are what OmegaConf, which Hydra reads with, makes of them: ``1e-6`` is a number though it
    has no point (to YAML 1.1 it is a text), and a date is a text.

    Raises:
        ValueError, RecursionError, yaml.YAMLError: of the syntax, of a date, of the nesting.
    """
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if not hydra:
        return yaml.load(text, base)

    class HydraLoader(base):
        pass

    HydraLoader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in base.yaml_implicit_resolvers.items()
    }
    HydraLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    return yaml.load(text, HydraLoader)


def read_json(path: Path) -> Any:
    """The value stored at ``path``.

    Raises:
        InputError: the file is missing, truncated or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("the file does not exist", where=path) from None
    except (ValueError, RecursionError) as error:  # of the syntax, the encoding, a number's length, the nesting
        raise InputError(f"the file is truncated or not JSON ({error})", where=path) from None
