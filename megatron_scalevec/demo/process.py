"""What the commands that start runs need of their own process: versions, silence, and an orderly end."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import platform
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from megatron_scalevec.errors import ScaleVecError

__all__ = ["Stopped", "quiet", "required_versions", "require_matplotlib", "stopped_by_signals"]


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


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


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Turn the first signal into :class:`Stopped`; later ones do not disturb cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    stopped = False

    def stop(number: int, _frame: Any) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise Stopped(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
