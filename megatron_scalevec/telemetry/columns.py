"""Squared lengths of the columns w_j of raw weights, for the preconditioner γ_j² I + w_j w_jᵀ.

From the masters, each rank its own shard: an element is read once, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron_scalevec.audit.chunks import is_expert
from megatron_scalevec.execution.folds import own_folds
from megatron_scalevec.execution.members import Shard
from megatron_scalevec.execution.shard import Part, Run, column_squares, runs_of
from megatron_scalevec.fold import RowMap
from megatron_scalevec.layers.linear import FoldedLinear
from megatron_scalevec.layers.router import FoldedReplicated
from megatron_scalevec.telemetry.holdings import data_parallel_group
from megatron_scalevec.telemetry.vectors import Found

__all__ = ["Columns"]


@dataclass(frozen=True, eq=False)
class _Map:
    """A weight [rows, columns], for each branch of its rows the vector on its columns (None without), and the
    ranks that share the weight."""

    weight: torch.nn.Parameter
    runs: tuple[Run, ...]
    inner: tuple[Found | None, ...]
    first_column: int
    tp_group: Any


def _maps_of(owner: torch.nn.Module, known: dict[tuple[int, str], Found]) -> Iterator[_Map]:
    """Maps of the weights that a module owns together with vectors on their columns.

    Vectors that experts share belong to no single weight and are left out.
    """

    def vector(name: str | None) -> Found | None:
        return None if name is None else known.get((id(owner), name))

    for fold in own_folds(owner):
        inner = tuple(None if v is None or v.owner is not owner else vector(v.name) for v in fold.inner)
        yield _Map(fold.weight, fold.runs, inner, fold.first_column, fold.tp_group)
    if isinstance(owner, FoldedReplicated) and owner._scalevec_gammas != (None, None):
        weight = owner._parameters[owner.scaled]
        name, _ = owner._scalevec_gammas
        yield _Map(weight, (Run(0, weight.shape[0], 0, 0),), (vector(name),), 0, None)
    if isinstance(owner, FoldedLinear) and not owner.scalevec_borrows:
        sizes = tuple(size for _, size in owner.scalevec_out)
        names = tuple(name for name, _ in owner.scalevec_in)
        rows = RowMap(names, sizes, owner.scalevec_branch_of_row, owner.scalevec_slot_of_row)
        runs = runs_of(rows)
        group = None if owner.parallel == "replicated" else owner.group_of(owner)
        for weight, suffix in owner.weights_of(owner).items():
            own = getattr(owner, weight)
            first = group.rank() * own.shape[1] if owner.parallel == "row" else 0
            inner = tuple(None if name is None else vector(name + suffix) for name in names)
            yield _Map(own, runs, inner, first, group)


class Columns:
    """Squared column lengths behind every vector on the columns of one weight."""

    def __init__(self, vectors: Sequence[Found], holdings: dict[torch.nn.Parameter, Shard]) -> None:
        known = {(id(vector.owner), vector.name): vector for vector in vectors}
        by_groups: dict[tuple, tuple[list[Any], list[_Map]]] = {}
        for owner in dict.fromkeys(vector.owner for vector in vectors):
            for one in _maps_of(owner, known):
                if any(one.inner):
                    over = [data_parallel_group(is_expert(one.weight)), one.tp_group]
                    over = [group for group in over if group is not None and group.size() > 1]
                    by_groups.setdefault(tuple(map(id, over)), (over, []))[1].append(one)
        self._holdings = holdings
        self._sets = list(by_groups.values())

    @torch.no_grad()
    def measure(self) -> dict[Found, torch.Tensor]:
        """‖w_j‖² [size] float64 of each vector that has one. Collective over the ranks that share weights."""
        found: dict[Found, torch.Tensor] = {}
        for groups, maps in self._sets:
            vectors = list(dict.fromkeys(vector for one in maps for vector in one.inner if vector))
            device = maps[0].weight.device
            # One cell more for each vector: how often the ranks together have its weight.
            flat = torch.zeros(sum(v.size + 1 for v in vectors), dtype=torch.float64, device=device)
            sizes = [vector.size + 1 for vector in vectors]
            places = dict(zip(vectors, flat.split(sizes)))
            begins = dict(zip(vectors, accumulate(sizes, initial=0)))
            for one in maps:
                shard = self._holdings.get(one.weight)
                if shard is None:
                    continue
                inner = tuple(None if v is None else begins[v] + one.first_column for v in one.inner)
                columns = one.weight.shape[1]
                part = Part(shard.start, shard.stop, columns, one.runs, inner, (None,) * len(inner))
                column_squares([part], [shard.master], flat)
                ranks = 1 if one.tp_group is None else one.tp_group.size()
                for vector in dict.fromkeys(filter(None, one.inner)):
                    places[vector][-1] += (shard.stop - shard.start) / (one.weight.numel() * ranks)
            for group in groups:
                torch.distributed.all_reduce(flat, group=group)
            found.update((vector, place[:-1] / place[-1]) for vector, place in places.items())
        return found
