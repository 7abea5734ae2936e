"""The scale vectors of a rank's model chunks, and their values, gradients and updates from the masters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_scalevec.audit.chunks import is_expert, unwrap
from megatron_scalevec.execution.members import Shard
from megatron_scalevec.reparam import get_reparameterization
from megatron_scalevec.telemetry.holdings import data_parallel_group
from megatron_scalevec.vectors import VectorInfo, vector_info, vector_names, vector_parts, was_added

__all__ = ["Batch", "Found", "Packed", "vectors_of"]


@dataclass(frozen=True, eq=False)
class Found:
    """A vector: ``name`` on ``owner``, or a norm's own scale; ``shift`` is 1 where it is stored as γ − 1."""

    owner: torch.nn.Module
    name: str
    info: VectorInfo
    parts: dict[str, torch.nn.Parameter]
    shift: float = 0.0

    @property
    def size(self) -> int:
        """Entries of γ."""
        return max(part.numel() for part in self.parts.values())

    @property
    def expert(self) -> bool:
        """Whether it is one expert's."""
        return is_expert(next(iter(self.parts.values())))

    @property
    def key(self) -> tuple[int | None, str, str, str]:
        """Layer, site, branch and side: what the experts of a layer have in common."""
        return self.info.layer, self.info.site, self.info.branch, self.info.side


def vectors_of(chunks: Sequence[torch.nn.Module]) -> list[Found]:
    """Every vector of this rank's chunks, those of no single expert first, in the order of the modules."""
    found = []
    for root in map(unwrap, chunks):
        zero_centered = bool(getattr(root.config, "layernorm_zero_centered_gamma", False))
        for module in root.modules():
            seen: set[int] = set()
            for name in vector_names(module):
                _, parts = vector_parts(module, name)
                info = vector_info(next(iter(parts.values())))
                found.append(Found(module, name, info, parts))
                seen.update(map(id, parts.values()))
            for name, param in module.named_parameters(recurse=False):
                info = vector_info(param)
                if info is not None and id(param) not in seen:
                    shift = 1.0 if zero_centered and not was_added(param) else 0.0
                    found.append(Found(module, name, info, {"": param}, shift))
    return sorted(found, key=lambda vector: vector.expert)  # stable


class Batch:
    """Vectors of one reparameterization and size: one operation for all of them.

    ``after``, ``before``: γ float64 [vectors, size]; ``gradient``: of the stored part of that size;
    ``magnitude``, ``magnitude_gradient``: float64 [vectors] of the stored scalar, None where there is none.
    The gradients are as the optimizer took them.
    """

    after: torch.Tensor
    before: torch.Tensor
    gradient: torch.Tensor
    magnitude: torch.Tensor | None = None
    magnitude_gradient: torch.Tensor | None = None

    def __init__(self, kind: str, members: Sequence[tuple[int, Found]], places: dict, device) -> None:
        self._reparam = get_reparameterization(kind)
        self.numbers = torch.tensor([number for number, _ in members], device=device)
        """[vectors] their places in the list of all vectors."""
        self.vectors = [vector for _, vector in members]
        self.size = self.vectors[0].size
        self._shift = torch.tensor([[v.shift] for v in self.vectors], dtype=torch.float64, device=device)
        self._index = {
            part.suffix: torch.stack([places[v.parts[part.suffix]] for v in self.vectors]).to(device)
            for part in self._reparam.parts
        }

    def load(self, values: torch.Tensor) -> None:
        """Take values [3, stored elements]: before, after, gradients."""
        parts = {suffix: values[:, index] for suffix, index in self._index.items()}
        values_alone = {suffix: part[:2] for suffix, part in parts.items()}
        self.before, self.after = self._reparam.compose(values_alone) + self._shift
        for part in self._reparam.parts:
            if part.scalar:
                self.magnitude = parts[part.suffix][1, :, 0]
                self.magnitude_gradient = parts[part.suffix][2, :, 0]
            else:
                self.gradient = parts[part.suffix][2]


class Packed:
    """The stored parts of vectors one after the other, float64, complete on every rank.

    A rank puts in what it steps, and one sum over each data-parallel group completes it. What several ranks
    hold whole is divided by their number.
    """

    def __init__(self, vectors: Sequence[Found], holdings: dict[torch.nn.Parameter, Shard]) -> None:
        self.vectors = list(vectors)
        params = [part for vector in vectors for part in vector.parts.values()]
        self._device = params[0].device
        self._dense = sum(param.numel() for param in params if not is_expert(param))
        self._total = sum(param.numel() for param in params)
        places, begin = {}, {}
        start = 0
        for param in params:
            places[param] = torch.arange(start, start + param.numel())
            begin[param] = start
            start += param.numel()
        self._own = [(begin[param], holdings[param]) for param in params if param in holdings]
        self._before: list[torch.Tensor] = []
        kinds: dict[tuple[str, int], list[tuple[int, Found]]] = {}
        for number, vector in enumerate(self.vectors):
            reparam = vector.info.reparam if set(vector.parts) != {""} else "none"
            kinds.setdefault((reparam, vector.size), []).append((number, vector))
        self.batches = [Batch(kind, members, places, self._device) for (kind, _), members in kinds.items()]

    def remember(self) -> None:
        """Before the step: copies of what this rank steps."""
        self._before = [
            shard.master.double() if shard.master.dtype != torch.float64 else shard.master.clone()
            for _, shard in self._own
        ]

    def load(self) -> None:
        """After the step: fill the batches. Collective over the data-parallel groups."""
        values = torch.zeros(4, self._total, dtype=torch.float64, device=self._device)
        for (begin, shard), before in zip(self._own, self._before):
            own = values[:, begin + shard.start : begin + shard.stop]
            own[0], own[1], own[3] = before, shard.master, 1.0
            gradient = shard.main.grad
            own[2] = float("nan") if gradient is None else gradient.detach().view(-1)
        self._before = []
        complete = []
        for expert, part in enumerate(values.split([self._dense, self._total - self._dense], dim=1)):
            group = data_parallel_group(bool(expert))
            if part.numel() and group.size() > 1:
                part = part.contiguous()
                torch.distributed.all_reduce(part, group=group)
            complete.append(part)
        values = torch.cat(complete, dim=1)
        for batch in self.batches:
            batch.load(values[:3] / values[3])
