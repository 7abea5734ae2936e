"""Values and gradients of many vectors, packed: a step costs a handful of operations, however many layers.

Vectors of one reparameterization and size are rows of one matrix, so composing γ from its parts, and the
chain rule back to the parts, is one batched operation per kind of vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_scalevec.execution.folds import Vector
from megatron_scalevec.reparam import get_reparameterization

__all__ = ["VectorTable"]


class _Kind:
    """Vectors of one reparameterization and size: parts [vectors, size of part], γ [vectors, size]."""

    def __init__(self, name: str, vectors: list[Vector]) -> None:
        self.reparam = get_reparameterization(name)
        self.vectors = vectors
        self.size = vectors[0].size
        self.part_sizes = {s: p.numel() for s, p in vectors[0].parts.items()}
        self.values: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}


class VectorTable:
    """float32 copies of the stored parts of some vectors, γ, and their gradients.

    ``flat_values`` and ``flat_gradients`` hold every part one after the other, ``flat_gamma`` and
    ``flat_sums`` every γ and the gradient of every γ: what is reduced over ranks is reduced at once.
    """

    def __init__(self, vectors: Sequence[Vector], device: torch.device) -> None:
        kinds: dict[tuple[str, int], list[Vector]] = {}
        for vector in vectors:
            kinds.setdefault((vector.kind, vector.size), []).append(vector)
        self._kinds = [_Kind(name, members) for (name, _), members in kinds.items()]
        stored = sum(len(k.vectors) * sum(k.part_sizes.values()) for k in self._kinds)
        composed = sum(len(k.vectors) * k.size for k in self._kinds)
        self.flat_values, self.flat_gradients = (torch.zeros(stored, device=device) for _ in range(2))
        self.flat_gamma, self.flat_sums = (torch.zeros(composed, device=device) for _ in range(2))
        self.values: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Each stored part to its place in ``flat_values``."""
        self.gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Each stored part to its place in ``flat_gradients``."""
        self.begins: dict[Vector, int] = {}
        """Where each γ does in ``flat_gamma``, and its gradient in ``flat_sums``."""
        self._lay_out()

    def _lay_out(self) -> None:
        at = 0
        for kind in self._kinds:
            count = len(kind.vectors)
            for suffix, size in kind.part_sizes.items():
                own = slice(at, at + count * size)
                kind.values[suffix] = self.flat_values[own].view(count, size)
                kind.gradients[suffix] = self.flat_gradients[own].view(count, size)
                for row, vector in enumerate(kind.vectors):
                    self.values[vector.parts[suffix]] = kind.values[suffix][row]
                    self.gradients[vector.parts[suffix]] = kind.gradients[suffix][row]
                at += count * size
        at = 0
        for kind in self._kinds:
            for vector in kind.vectors:
                self.begins[vector] = at
                at += kind.size

    def gamma(self, vector: Vector) -> torch.Tensor:
        """γ [n] as last composed."""
        begin = self.begins[vector]
        return self.flat_gamma[begin : begin + vector.size]

    def compose(self) -> None:
        """γ from ``values``."""
        at = 0
        for kind in self._kinds:
            own = self.flat_gamma[at : at + len(kind.vectors) * kind.size]
            own.copy_(kind.reparam.compose(kind.values).reshape(-1))
            at += own.numel()

    def chain(self) -> None:
        """``gradients`` from the gradients of γ in ``flat_sums``."""
        at = 0
        for kind in self._kinds:
            shape = len(kind.vectors), kind.size
            sums = self.flat_sums[at : at + shape[0] * shape[1]].view(shape)
            at += sums.numel()
            with torch.enable_grad():
                leaves = {s: value.detach().requires_grad_() for s, value in kind.values.items()}
                found = torch.autograd.grad(kind.reparam.compose(leaves), list(leaves.values()), sums)
            for suffix, gradient in zip(leaves, found):
                kind.gradients[suffix].copy_(gradient)

    def revive(self, smallest: float) -> list[Vector]:
        """Set entries of γ smaller than ``smallest`` to one, in ``values``; returns the vectors changed."""
        self.compose()
        changed = []
        for kind in self._kinds:
            for row, vector in enumerate(kind.vectors):
                gamma = self.gamma(vector)
                dead = gamma.abs() < smallest
                if bool(dead.any()):
                    alive = torch.where(dead, torch.ones_like(gamma), gamma)
                    for suffix, part in kind.reparam.decompose(alive).items():
                        kind.values[suffix][row].copy_(part)
                    changed.append(vector)
        if changed:
            self.compose()
        return changed
