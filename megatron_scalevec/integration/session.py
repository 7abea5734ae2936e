"""What the hooks of one process share."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_scalevec.config import ScaleVecConfig

__all__ = ["Loading", "Session", "say"]


@dataclass
class Loading:
    """What a checkpoint is being loaded into. ``meanwhile`` is left when it has been; ``execution`` is the
    checkpoint's mode of execution where that is not the run's."""

    chunks: list[Any]
    wrapped_chunks: list[Any]
    optimizer: Any
    meanwhile: contextlib.ExitStack
    execution: str | None = None


class Session:
    """What the hooks of one process know: the arguments given, what they resolved to, who was called."""

    def __init__(self, command_line: Any, version: Version, cpu: bool, asked: ScaleVecConfig) -> None:
        self.command_line = command_line
        self.version = version
        self.cpu = cpu
        # What is built is decided when Megatron validates its arguments.
        self.config = asked
        self.execution_reason: str | None = None
        self.required: dict[str, str] = {}  # name to target; an active strategy is not built without them
        self.called: set[str] = set()
        self.restoring = False
        self.loading: Loading | None = None  # while a checkpoint is loaded
        # Nothing will run: the arguments are those of another machine, whose files are not looked for.
        self.describing = False
        self.cpu_changes: list[str] = []
        self.audit: Any = None
        self.replicas_every: int | None = command_line.scalevec_debug_replicas
        # Settled when Megatron validates its arguments, as is the file.
        self.log_interval: int | None = command_line.scalevec_log_interval
        self.log_file: str | None = command_line.scalevec_log
        # What is known without Megatron's own parsing, which a user's loop may not use.
        self.audit_files = [command_line.scalevec_audit] if command_line.scalevec_audit else []

    def never_called(self) -> list[str]:
        """Targets of required hooks that were not called so far."""
        return [target for name, target in self.required.items() if name not in self.called]


def say(message: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"[scalevec] {message}", flush=True)
