"""What the ranks of the TransformerEngine tests do; see ``tests/ranks/jobs.py``."""

from __future__ import annotations

from typing import Any

import kernels
import torch
from ranks import jobs

TE = "transformer_engine"


def prepare() -> None:
    """Import TransformerEngine, and keep CPU mode from hiding it."""
    kernels.import_without_gpu()
    kernels.replace_kernels()
    from megatron_scalevec import cpu

    cpu._GPU_ONLY_PACKAGES = ("apex",)


def compare_with_reference(**arguments: Any) -> dict[str, float]:
    """As the job of that name, on TransformerEngine's layers."""
    return jobs.compare_with_reference(implementation=TE, **arguments)
