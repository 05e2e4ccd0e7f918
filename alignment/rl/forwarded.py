"""What decides how a worker computes has to reach it whatever process started the Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

FORWARDED = (
    "ALIGNMENT_",
    "ASCEND_",
    "ATB_",
    "CLOSE_MATMUL_",
    "CUBLAS_",
    "EMU_NPU_",
    "HCCL_",
    "LCCL_",
    "OMP_",
    "PYTORCH_",
    "VLLM_",
)
"""Beginnings of the names of environment variables."""

SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Words in the names of environment variables whose values belong in no file."""

EVERY_CARD = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
}
"""For workers that reserve no card and are to see them all: Ray hides the cards from who reserved none."""


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret; some that hold none (``VLLM_MAX_TOKENS``) count too."""
    return any(word in name.upper() for word in SECRET)


def without_secrets(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables that everybody may see, and the others: Ray shows and logs the environment it is told to make, so
    those are handed to the process itself."""
    withheld = {name: value for name, value in environment.items() if is_secret(name)}
    return {name: value for name, value in environment.items() if name not in withheld}, withheld


def forwarded() -> dict[str, str]:
    """Those variables as this process has them, and where it finds its modules: a fault's or a test's included."""
    return {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        **{name: value for name, value in os.environ.items() if name.startswith(FORWARDED)},
    }
