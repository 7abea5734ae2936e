"""Telemetry: how scale vectors develop while a model trains (``--scalevec-log-interval``).

:class:`Telemetry` looks at vectors, gradients and updates around an optimizer's step; :func:`write` takes
what it finds to a JSON-lines file, TensorBoard and W&B. ``docs/telemetry.md`` says what every figure means.
"""

from megatron_scalevec.telemetry.recorder import Telemetry
from megatron_scalevec.telemetry.statistics import NEAR_ZERO, STATISTICS
from megatron_scalevec.telemetry.writing import JsonLines, scalars, write

__all__ = ["NEAR_ZERO", "STATISTICS", "JsonLines", "Telemetry", "scalars", "write"]
