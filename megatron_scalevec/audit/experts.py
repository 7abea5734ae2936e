"""What routed experts cost in parameters, for the audit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_scalevec.audit.record import Vector
from megatron_scalevec.config import ScaleVecConfig

__all__ = ["experts_note"]


def experts_note(config: ScaleVecConfig, model_config: Any, vectors: Iterable[Vector]) -> list[str]:
    """One line for models with experts: the parameters in the vectors of routed experts, and what the other
    choice would come to; nothing for other models."""
    number = model_config.num_moe_experts or 0
    own = sum(v.size * v.copies for v in vectors if v.branch.startswith("expert_"))
    if not number or not own:
        return []
    if config.experts == "shared":
        return [
            f"experts: one set of vectors for the {number} routed experts of a layer, {own:,} parameters; "
            f"--scalevec-experts per-expert would take {own * number:,}"
        ]
    return [
        f"experts: a set of vectors for each of the {number} routed experts of a layer, {own:,} parameters; "
        f"--scalevec-experts shared would take {own // number:,}"
    ]
