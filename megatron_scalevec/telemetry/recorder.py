"""Looking at scale vectors around an optimizer's step, on all ranks, for one of them to tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.layers.linear import gamma_name
from megatron_scalevec.telemetry.columns import Columns
from megatron_scalevec.telemetry.holdings import holdings_of
from megatron_scalevec.telemetry.statistics import extremes_of, figures, sums_of
from megatron_scalevec.telemetry.vectors import Batch, Found, Packed, vectors_of

__all__ = ["Telemetry"]

_SUMS, _EXTREMES = 10, 5


class Telemetry:
    """Statistics of every kind of scale vector in every layer, at the steps that are asked for.

    Tensor-parallel and data-parallel copies count once; the experts of a layer are one entry, over all
    expert-parallel ranks; the layers of all pipeline stages come together on the last rank, which is also
    where Megatron has its writers. Nothing happens outside of the two calls around a step, and they change
    nothing.

    Args:
        chunks: Megatron's model chunks, wrapped or not.
        optimizer: Megatron's optimizer over them.

    Making one is collective over the pipeline group, as both calls are over the model's groups.

    Raises:
        ScaleVecError: The model carries no scale vectors on any pipeline stage.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        vectors = vectors_of(chunks)
        holdings = holdings_of(optimizer)
        self._packed = Packed(vectors, holdings) if vectors else None
        self._columns = Columns(vectors, holdings)
        self._device = next(param.device for chunk in chunks for param in chunk.parameters())
        self._rows = _Rows([vector.key for vector in vectors], [vector.expert for vector in vectors])
        self._pairs = _pairs_of(self._packed.batches if vectors else [])
        self._pair_rows = _Rows([key for *_, key in self._pairs], [v.expert for _, _, _, v, _ in self._pairs])
        self._before = False
        self._stages = self._of_all_stages((self._rows.keys, self._pair_rows.keys))
        if self._stages is not None and not any(rows for rows, _ in self._stages):
            raise ScaleVecError(
                "--scalevec-log-interval: the model carries no scale vectors that could be logged; drop it "
                "and --scalevec-log, or use a strategy that has some."
            )

    @torch.no_grad()
    def before_step(self) -> None:
        """Right before the optimizer's step, or before the forward pass in front of it. Not collective."""
        self._before = True
        if self._packed is not None:
            self._packed.remember()

    @torch.no_grad()
    def after_step(self, skipped: bool = False) -> dict[str, list[dict[str, Any]]] | None:
        """After the optimizer's step, before gradients are cleared.

        Args:
            skipped: It was skipped because gradients were not finite; then none are told.

        Returns:
            On the last rank ``vectors``: one entry for each layer, site, branch and side, with the figures of
            :data:`~megatron_scalevec.telemetry.statistics.STATISTICS`; and ``branches``: the cosine between
            the input scales of two branches of one linear. None on all others.

        Raises:
            ScaleVecError: :meth:`before_step` was not called since the last time.
        """
        if not self._before:
            raise ScaleVecError(
                "telemetry compares a step's vectors with those before it: call before_step() on every rank, "
                "then take the step, then call after_step()."
            )
        self._before = False
        tensors = [torch.zeros(0, dtype=torch.float64, device=self._device)]
        if self._packed is not None:
            self._packed.load()
            tensors = self._measure(self._columns.measure())
        own = torch.cat([tensor.reshape(-1) for tensor in tensors])
        found = self._to_last_rank(own)
        if found is None:
            return None
        result: dict[str, list[dict[str, Any]]] = {"vectors": [], "branches": []}
        for (rows, pairs), values in zip(self._stages, found):
            numbers = iter(values)

            def table(count: int, width: int, numbers=numbers) -> list[list[float]]:
                return [[next(numbers) for _ in range(width)] for _ in range(count)]

            sums, extremes = table(len(rows), _SUMS), table(len(rows), _EXTREMES)
            for key, *own_figures in zip(rows, sums, extremes):
                result["vectors"].append({**_named(key), **figures(*own_figures, skipped)})
            for key, (count, cosine) in zip(pairs, table(len(pairs), 2)):
                value = cosine / count
                result["branches"].append({**_named(key), "cosine": value if math.isfinite(value) else None})
        for entries in result.values():
            entries.sort(key=lambda entry: (entry["layer"] is None, entry["layer"] or 0))  # stable
        return result

    def _measure(self, columns: dict[Found, torch.Tensor]) -> list[torch.Tensor]:
        """Sums and extremes of this stage's rows, and cosines, over all expert-parallel ranks."""
        batches = self._packed.batches
        order = torch.cat([batch.numbers for batch in batches]).argsort()
        sums = self._rows.added(torch.cat(list(map(sums_of, batches)))[order])
        extremes = self._rows.largest(torch.cat([extremes_of(batch, columns) for batch in batches])[order])
        cosines = torch.zeros(0, 2, dtype=torch.float64, device=self._device)
        if self._pairs:
            pairs = [
                torch.nn.functional.cosine_similarity(batch.after[first], batch.after[second], dim=0, eps=0.0)
                for batch, first, second, _, _ in self._pairs
            ]
            cosines = torch.stack(pairs)
            cosines = self._pair_rows.added(torch.stack([torch.ones_like(cosines), cosines], dim=1))
        return [sums, extremes, cosines]

    def _of_all_stages(self, own: Any) -> list[Any] | None:
        """What the stages of the last rank's pipeline hold; None on ranks of other pipelines."""
        group = _pipeline_of_the_last_rank()
        if group is None:
            return None
        if group.size() == 1:
            return [own]
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, own, group=group)
        return found

    def _to_last_rank(self, own: torch.Tensor) -> list[list[float]] | None:
        group = _pipeline_of_the_last_rank()
        if group is None:
            return None
        if group.size() == 1:
            return [own.tolist()]
        lengths = [_SUMS * len(rows) + _EXTREMES * len(rows) + 2 * len(pairs) for rows, pairs in self._stages]
        padded = own.new_zeros(max(lengths))
        padded[: own.numel()] = own
        stages = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(stages, padded, group=group)
        if dist.get_rank() != dist.get_world_size() - 1:
            return None
        return [stage[:length].tolist() for stage, length in zip(stages, lengths)]


class _Rows:
    """Entries of several vectors become one row for each key; those of experts over all their ranks."""

    def __init__(self, keys: Sequence[tuple], expert: Sequence[bool]) -> None:
        number = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        self.keys = list(number)
        self._row_of = torch.tensor([number[key] for key in keys], dtype=torch.int64)
        of_experts = dict.fromkeys(number[key] for key, yes in zip(keys, expert) if yes)
        self._of_experts = torch.tensor(list(of_experts), dtype=torch.int64)

    def added(self, entries: torch.Tensor) -> torch.Tensor:
        """Sums of float64 [vectors, n], as [keys, n]."""
        rows = entries.new_zeros(len(self.keys), entries.shape[1])
        rows.index_add_(0, self._row_of.to(entries.device), entries)
        return self._over_experts(rows, dist.ReduceOp.SUM)

    def largest(self, entries: torch.Tensor) -> torch.Tensor:
        """Maxima of float64 [vectors, n], as [keys, n]."""
        rows = entries.new_full((len(self.keys), entries.shape[1]), -torch.inf)
        index = self._row_of.to(entries.device)[:, None].expand_as(entries)
        rows.scatter_reduce_(0, index, entries, "amax")
        return self._over_experts(rows, dist.ReduceOp.MAX)

    def _over_experts(self, rows: torch.Tensor, op: Any) -> torch.Tensor:
        from megatron.core import parallel_state

        if len(self._of_experts) and parallel_state.get_expert_model_parallel_world_size() > 1:
            index = self._of_experts.to(rows.device)
            own = rows[index]
            dist.all_reduce(own, op=op, group=parallel_state.get_expert_model_parallel_group())
            rows[index] = own
        return rows


def _pairs_of(batches: Sequence[Batch]) -> list[tuple[Batch, int, int, Found, tuple]]:
    """Input scales of two branches of one linear: batch, places in it, one of them, and the pair's key."""
    found = []
    for batch in batches:
        linears: dict[tuple[int, str], list[int]] = {}
        for place, vector in enumerate(batch.vectors):
            name = gamma_name("in", vector.info.branch)
            if vector.info.side == "in" and vector.name.startswith(name):
                # Grouped linears hold the vectors of several experts, told apart by what their names end in.
                linears.setdefault((id(vector.owner), vector.name.removeprefix(name)), []).append(place)
        for places in linears.values():
            for number, first in enumerate(places):
                for second in places[number + 1 :]:
                    one, other = batch.vectors[first], batch.vectors[second]
                    layer, site, branch, side = one.key
                    key = layer, site, f"{branch}-{other.info.branch}", side
                    found.append((batch, first, second, one, key))
    return found


def _named(key: tuple[int | None, str, str, str]) -> dict[str, Any]:
    return dict(zip(("layer", "site", "branch", "side"), key))


def _pipeline_of_the_last_rank() -> Any:
    """The pipeline group with the last rank in it, None on ranks of others."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    return group if dist.get_world_size() - 1 in dist.get_process_group_ranks(group) else None
