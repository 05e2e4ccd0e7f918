"""What verl loads in each of its processes (``VERL_USE_EXTERNAL_MODULES``): importing it is its effect.

The platform for hosts without an accelerator where ``VERL_PLATFORM=cpu``, and the recorder of batches where
``ALIGNMENT_VERL_RECORD`` names a directory. Without either it does nothing.
"""

from __future__ import annotations

import os

MODULE = "alignment.rl.verl_plugin"


def load() -> None:
    """What the environment asks for."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from alignment.backends import verl_platform

        verl_platform.install()
    if os.environ.get("ALIGNMENT_VERL_RECORD"):
        from alignment.rl import verl_recorder

        verl_recorder.install()


load()
