"""What the scripts for a GPU have in common: their start, the time they may take, and their results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from training import start_parallel

__all__ = ["GpuRun"]


class GpuRun:
    """One run of a script, which reads the command line and starts Megatron on one rank.

    Leaves with exit code 2 where torch finds no GPU.

    Args:
        text: The script's own, whose first line describes it.

    Attributes:
        results: For the file of results; the machine and the versions are in it.
    """

    def __init__(self, text: str) -> None:
        parser = argparse.ArgumentParser(description=text.split("\n", 1)[0])
        parser.add_argument("--minutes", type=float, default=8.0, help="stop before this much time is used")
        parser.add_argument("--json", type=Path, help="a file for the results")
        self._options = parser.parse_args()
        if not torch.cuda.is_available():
            what = "measures on a GPU, and torch finds none on this machine; nothing was measured."
            print(f"{parser.prog} {what}", file=sys.stderr)
            sys.exit(2)
        self._deadline = time.monotonic() + 60 * self._options.minutes
        start_parallel("nccl")
        self.results: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformer_engine": _transformer_engine_version(),
        }
        print(", ".join(f"{name} {value}" for name, value in self.results.items()), flush=True)

    def measured(
        self, measure: Callable[..., dict[str, Any]], cases: Iterable[tuple[str, ...]]
    ) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Cases and what ``measure(*case, device="cuda")`` finds, as long as there is time.

        A measurement that fails gives its ``error``: the others are worth having all the same.
        """
        skipped = 0
        for case in cases:
            if time.monotonic() > self._deadline - 60:
                skipped += 1
            else:
                yield case, _attempt(measure, case)
        if skipped:
            print(f"{skipped} measurements did not fit into {self._options.minutes:g} minutes")
        self.results["skipped"] = skipped

    def finish(self) -> None:
        """Write the results where they were asked for."""
        if self._options.json:
            self._options.json.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        torch.distributed.destroy_process_group()


def _attempt(measure: Callable[..., dict[str, Any]], case: tuple[str, ...]) -> dict[str, Any]:
    try:
        return measure(*case, device="cuda")
    except Exception as error:
        return {"error": f"{' '.join(case)}: {type(error).__name__}: {str(error)[:300]}"}


def _transformer_engine_version() -> str | None:
    """The installed version, None where it cannot be imported."""
    try:
        import transformer_engine.pytorch  # noqa: F401
        from megatron.core.utils import get_te_version
    except (ImportError, OSError, RuntimeError):
        return None
    return str(get_te_version())
