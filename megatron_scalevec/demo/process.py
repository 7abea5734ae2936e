"""What the commands that start runs need of their own process: versions, and silence."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import platform
import warnings
from collections.abc import Iterator

from megatron_scalevec.errors import ScaleVecError

__all__ = ["quiet", "required_versions", "require_matplotlib"]


def require_matplotlib(user: str) -> None:
    """Check that pictures can be drawn; ``user`` is who draws them.

    Raises:
        ScaleVecError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ScaleVecError(
            f"{user} draws its picture with matplotlib, which is not installed: "
            "pip install 'megatron_scalevec[demo]'."
        )


def required_versions(user: str) -> dict[str, str]:
    """Check that everything needed is installed, before anything is created; ``user`` is who needs it.

    Raises:
        ScaleVecError: Something is missing, or of a version that is not supported.
    """
    import numpy
    import torch

    from megatron_scalevec import __version__
    from megatron_scalevec.versions import require_megatron_training, require_supported_megatron

    require_matplotlib(user)
    with quiet():
        megatron = require_supported_megatron()
        require_megatron_training(megatron)
    return {
        "megatron_scalevec": __version__,
        "megatron-core": str(megatron),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Megatron from warning of every optional package it lacks; the runs' logs do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
