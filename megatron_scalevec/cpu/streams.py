"""Streams and events for a device on which everything is already done when the call returns.

They have the methods of :class:`torch.cuda.Stream` and :class:`torch.cuda.Event`, so that code
which orders work by streams runs unchanged: waiting returns at once, a query answers "finished".
Events carry wall-clock time, because Megatron reports some of its timings from them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

__all__ = [
    "CPUEvent",
    "CPUStream",
    "CPUStreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
]

_CPU = torch.device("cpu")


class CPUEvent:
    """Stands in for :class:`torch.cuda.Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.device = _CPU
        self._recorded_at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end_event: CPUEvent) -> float:
        """Milliseconds from this event's record to ``end_event``'s."""
        if self._recorded_at is None or end_event._recorded_at is None:
            raise RuntimeError("Both events must be recorded before their distance can be asked.")
        return (end_event._recorded_at - self._recorded_at) * 1000.0

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CPUStream:
    """Stands in for :class:`torch.cuda.Stream` and :class:`torch.cuda.ExternalStream`."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The arguments choose a device, a priority or an existing stream's address; none has a
        # meaning here.
        self.device = _CPU
        self.priority = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def record_event(self, event: CPUEvent | None = None) -> CPUEvent:
        event = CPUEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: CPUEvent) -> None:
        pass

    def wait_stream(self, stream: CPUStream) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_DEFAULT_STREAM = CPUStream()
_local = threading.local()


def current_stream(device: Any = None) -> CPUStream:
    """The stream chosen last in this thread; one shared stream if none was chosen."""
    return getattr(_local, "stream", _DEFAULT_STREAM)


def set_stream(stream: CPUStream | None) -> None:
    if stream is not None:
        _local.stream = stream


class CPUStreamContext:
    """Stands in for ``torch.cuda.stream(s)``; ``s`` may be ``None``, which changes nothing."""

    def __init__(self, stream: CPUStream | None) -> None:
        self.stream = stream
        self._previous: list[CPUStream] = []

    def __enter__(self) -> None:
        self._previous.append(current_stream())
        set_stream(self.stream)

    def __exit__(self, *exc_info: Any) -> None:
        set_stream(self._previous.pop())


def default_stream(device: Any = None) -> CPUStream:
    return _DEFAULT_STREAM
