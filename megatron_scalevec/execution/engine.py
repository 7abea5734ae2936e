"""The passes around an optimizer's step, over all shards of all folded weights of one optimizer.

Per step: the vectors' masters are gathered, every shard's gradient is split, the vectors' gradients are
completed over the ranks, and after the step the vectors are gathered again and every shard is folded into
its live weight. The collectives are one per pass and set of folds, on all vectors at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution import shard as torch_passes
from megatron_scalevec.execution.folds import Fold, Vector
from megatron_scalevec.execution.live_gamma import NormSet
from megatron_scalevec.execution.members import Member, Shard
from megatron_scalevec.execution.shard import Part
from megatron_scalevec.execution.trial import try_kernels
from megatron_scalevec.execution.vector_set import VectorSet

__all__ = ["Engine", "FoldSet", "passes_for"]

SMALLEST = 1e-6
"""Where γ is smaller, W is not recovered from W_eff: the entry starts again at one."""


@dataclass(frozen=True)
class _Sharded:
    """A fold and this rank's shard of its weight."""

    fold: Fold
    shard: Shard
    part: Part


class FoldSet(VectorSet):
    """Folds whose weights lie in one member of an optimizer, and their vectors in one."""

    def __init__(self, folds: Sequence[Fold], weights: Member, vectors: Member) -> None:
        self.folds = list(folds)
        self.weights = weights
        self.groups = folds[0].groups
        of_folds = dict.fromkeys(vector for fold in folds for vector in fold.vectors)
        super().__init__(list(of_folds), folds[0].weight.device, vectors, weights)
        self.local = [
            _Sharded(fold, shard, fold.part(self.table.begins, shard.start, shard.stop))
            for fold, shard in ((fold, weights.shards.get(fold.weight)) for fold in folds)
            if shard is not None
        ]
        self._next_check = 0
        self._first_split = self._first_write = True
        self.check_all()

    def check_all(self) -> None:
        """Something has been loaded: look at every shard at the next step."""
        self._unchecked = list(self.local)

    def complete(self, sums: torch.Tensor) -> None:
        """Sum the vectors' gradients over the ranks that hold the other parts of the weights."""
        for group in (self.weights.group, *self.groups):
            if group is not None:
                dist.all_reduce(sums, group=group)

    # --- passes ----------------------------------------------------------------------------------------

    def split(self) -> None:
        """Gradients of W_eff in the masters become those of W; the vectors' masters get theirs."""
        self.gather()
        self.check()
        totals = torch.zeros_like(self.table.flat_sums, dtype=torch.float64)
        passes = passes_for(totals.device)
        parts = [one.part for one in self.local]
        gradients = [one.shard.gradient for one in self.local]
        masters = [one.shard.master for one in self.local]
        if self._first_split and passes is not torch_passes:
            lives = [one.shard.live for one in self.local]
            try_kernels(passes, parts, gradients, masters, lives, totals.numel())
        self._first_split = False
        passes.split_parts(parts, gradients, masters, self.table.flat_gamma, totals)
        self.table.flat_sums.copy_(totals)
        self.complete(self.table.flat_sums)
        self.hand_out()

    def write(self) -> None:
        """The live weights from the masters of weights and vectors.

        Raises:
            ScaleVecError: The first time, see :meth:`check`; of all shards.
        """
        self.gather()
        if self._first_write:
            # What is not written now shall be seen below, also where a step changes nothing in bf16.
            for one in self.local:
                one.shard.live[: one.part.columns].fill_(math.nan)
        passes_for(self.table.flat_gamma.device).fold_parts(
            [one.part for one in self.local],
            [one.shard.live for one in self.local],
            [one.shard.master for one in self.local],
            self.table.flat_gamma,
        )
        if self._first_write:
            self._first_write = False
            self.check_all()
            self.check()
        self.written = True

    def unfold(self) -> list[Vector]:
        """The masters of the weights from the live weights and the vectors' masters.

        Returns:
            Vectors that had entries too close to zero, which were set to one: W is not determined there.
        """
        self.gather()
        revived = self.table.revive(SMALLEST)
        for vector in revived:
            for part in vector.parts.values():
                value = self.table.values[part]
                part.data.copy_(value.view_as(part))
                if part in self.vectors.shards:
                    own = self.vectors.shards[part]
                    own.master.copy_(value[own.start : own.stop])
        for one in self.local:
            one.shard.master.copy_(one.shard.live)
            if getattr(one.fold.weight, "main_param", None) is not None:
                # Megatron's note of the master, which an optimizer that was made and dropped has taken.
                one.fold.weight.main_param = one.shard.main
        torch_passes.unfold_parts(
            [one.part for one in self.local],
            [one.shard.master for one in self.local],
            self.table.flat_gamma,
        )
        self.check_all()
        return revived

    # --- the invariant ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Look whether live weights are what their masters fold to, on the first row of some shards, and
        whether the stored vectors are the masters'.

        All shards at first, later one per step in turn.

        Raises:
            ScaleVecError: One is not: somebody has changed one without the other.
        """
        chosen, self._unchecked = self._unchecked, []
        if not chosen and self.local:
            chosen = [self.local[self._next_check % len(self.local)]]
            self._next_check += 1
        differs = [(one, self._differs(one)) for one in chosen]
        vectors_differ = self.stored_differ()
        if not bool(torch.stack([vectors_differ, *(flag for _, flag in differs)]).any()):
            return
        names = [
            f"{type(one.fold.owner).__name__} {tuple(one.fold.weight.shape)}" for one, flag in differs if flag
        ]
        if not names:
            raise ScaleVecError(
                "stored scale vectors of folded linears are not the optimizer's masters of them: something "
                "has changed a vector or the optimizer's state alone. After changing the model from outside "
                "call optimizer.reload_model_params()."
            )
        raise ScaleVecError(
            f"the live weight of {len(names)} of {len(differs)} folded linears (first: {names[0]}) is not "
            "what the optimizer's master and the scale vectors come to: something has changed a weight, a "
            "vector or the optimizer's state alone. After changing the model from outside call "
            "optimizer.reload_model_params()."
        )

    def _differs(self, one: _Sharded) -> torch.Tensor:
        first = dataclasses.replace(one.part, stop=min(one.part.stop, one.part.start + one.part.columns))
        live = one.shard.live[: first.stop - first.start]
        expected = torch.empty_like(live)
        master = one.shard.master[: live.numel()]
        torch_passes.fold_parts([first], [expected], [master], self.table.flat_gamma)
        # Right is also what differs by the last digit: masters that came from W_eff are rounded quotients.
        return ~torch.isclose(live, expected, rtol=1e-5, atol=0.0, equal_nan=True).all()


class Engine:
    """All folds of an optimizer, single or chained, and γ of the norms that stay norms."""

    def __init__(self, sets: Sequence[FoldSet], norms: Sequence[NormSet] = ()) -> None:
        self.sets, self.norms = list(sets), list(norms)
        self.written_here = frozenset(one.fold.weight for own in self.sets for one in own.local)
        """Weights whose live values :meth:`write` makes on this rank, whole or in part."""
        self.gathering_later: list[Any] = []
        """Optimizers that gather their parameters when all have been written."""
        self.marks_masters = True
        """Whether raw masters have keys of their own; not while a checkpoint of the other mode is loaded."""

    @property
    def folds(self) -> list[Fold]:
        """Every fold, in the order of the sets."""
        return [fold for one in self.sets for fold in one.folds]

    @property
    def remark(self) -> str:
        """What the audit is to say about how the passes are carried out, often nothing."""
        devices = {one.table.flat_gamma.device.type for one in self.sets}
        if "cuda" in devices and passes_for(torch.device("cuda")) is torch_passes:
            return f"in plain torch, as Triton cannot be imported ({_kernels()[1]})"
        return ""

    @functools.cached_property
    def _trained(self) -> list[torch.nn.Parameter]:
        """All weights and vectors, those without a master on this rank included."""
        return [
            *(fold.weight for fold in self.folds),
            *(param for one in self._all() for param in one.table.values),
        ]

    def _all(self) -> list[FoldSet | NormSet]:
        return [*self.sets, *self.norms]

    @torch.no_grad()
    def split(self) -> None:
        """See :meth:`FoldSet.split`. Gradients are complete, unscaled and not yet clipped.

        Raises:
            ScaleVecError: A weight or a vector was frozen meanwhile, or see :meth:`FoldSet.check`.
        """
        frozen = [param for param in self._trained if not param.requires_grad]
        if frozen:
            raise ScaleVecError(
                f"{len(frozen)} of {len(self._trained)} weights and scale vectors were frozen after the "
                f"optimizer that folds them was set up (first: of shape {tuple(frozen[0].shape)}), and their "
                "masters would go on learning; let them learn, or use --scalevec-execution autograd."
            )
        for one in self._all():
            one.split()
        self.expect_step()

    def expect_step(self) -> None:
        """See :meth:`VectorSet.expect_step`."""
        for one in self._all():
            one.expect_step()

    def check_all(self) -> None:
        """See :meth:`FoldSet.check_all`."""
        for one in self.sets:
            one.check_all()

    def weights_of(self, optimizer: Any) -> dict[torch.nn.Parameter, Any]:
        """The folded weights that one optimizer of the chain steps, with the tensor-parallel group that
        shares each (None where every rank holds it whole)."""
        return {
            fold.weight: fold.tp_group
            for one in self.sets
            for fold in one.folds
            if fold.weight in one.weights.weights_stepped_by(optimizer)
        }

    @torch.no_grad()
    def write(self, member: Any) -> None:
        """A member has copied its other masters to the model: fold what can be folded by now.

        Where the vectors are another member's, both must have stepped.
        """
        for one in self._all():
            one.waiting.discard(id(member))
            if not one.waiting and not one.written:
                one.write()

    @torch.no_grad()
    def unfold(self) -> list[Vector]:
        """See :meth:`FoldSet.unfold`; the norms' γ follow the masters."""
        revived = [vector for one in self.sets for vector in one.unfold()]
        self.renew()
        return revived

    @torch.no_grad()
    def renew(self) -> None:
        """Masters have been loaded: γ of the norms, to the last digit. Live weights are loaded as well."""
        for one in self.norms:
            one.write()

    def require_written(self) -> None:
        """After a step.

        Raises:
            RuntimeError: Some live weights were left as they were before the step.
        """
        if not all(one.written for one in self._all()):
            raise RuntimeError(
                "the optimizer has stepped without folding its masters into the live weights; the hook on "
                "_copy_main_params_to_model_params did not take part"
            )


def passes_for(device: torch.device) -> Any:
    """The module with ``split_parts`` and ``fold_parts`` for a device."""
    return torch_passes if device.type != "cuda" else _kernels()[0] or torch_passes


@functools.cache
def _kernels() -> tuple[Any, str]:
    """The module of kernels, or None and why there is none."""
    try:
        from megatron_scalevec.execution import kernels
    except ImportError as error:
        return None, str(error)
    return kernels, ""
