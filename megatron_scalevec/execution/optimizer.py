"""Where the engine is hooked into Megatron's optimizers.

Three methods of a single optimizer and four of the outermost one are extended, by a subclass that is made
for each instance's own class; no method of Megatron's classes is replaced, so optimizers of other models
are untouched.

    _copy_main_params_to_model_params    of a single one: folded weights are left out; they are folded as soon
                                         as both their own optimizer and their vectors' have stepped; the
                                         gathering of parameters over data-parallel ranks comes later
    sharded_state_dict                   of a single one: raw masters get another key than a stock
                                         Megatron asks for, which would take them for the live weight's
    load_state_dict                      of a single one: then all live weights are to be compared again
    prepare_grads                        of the outermost: then gradients are split; clipping comes later
    step_with_ready_grads                of the outermost: then every live weight has been folded
    load_state_dict                      of the outermost: then the norms' γ are composed
    reload_model_params                  of the outermost: then masters are unfolded

A layer-wise optimizer whose weights' vectors another one steps afterwards gathers its weights at the end of
the outermost's step instead of at the end of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.buckets import link_ready_signals
from megatron_scalevec.execution.engine import Engine, FoldSet
from megatron_scalevec.execution.folds import Fold, Vector, folds_of, guard_masters
from megatron_scalevec.execution.live_gamma import NormSet
from megatron_scalevec.execution.members import Member, is_layer_wise, members_of, without_copies_of
from megatron_scalevec.execution.resume import mark_raw_masters
from megatron_scalevec.layers.norm import GAMMA, ScaledNorm
from megatron_scalevec.vectors import role_of

__all__ = ["engine_of", "execute_in_optimizer"]

_ENGINE = "scalevec_engine"


def engine_of(optimizer: Any) -> Engine | None:
    """The engine that :func:`execute_in_optimizer` gave an optimizer, None where it has none."""
    return getattr(optimizer, _ENGINE, None)


def execute_in_optimizer(optimizer: Any, model_chunks: Sequence[torch.nn.Module]) -> None:
    """Fold the model's weights inside its optimizer from now on.

    Call it once, after the model was wrapped for data parallelism and before anything is loaded or
    trained. It is collective over the data-parallel ranks. A model without folds is left alone.

    Args:
        optimizer: Megatron's optimizer over the model, single or chained.
        model_chunks: The model's chunks.

    Raises:
        ScaleVecError: A weight or its vectors are in no optimizer that keeps float32 masters of them, or
            are not trained.
    """
    folds = [fold for chunk in model_chunks for fold in folds_of(chunk)]
    if not folds:
        return
    if engine_of(optimizer) is not None:
        raise ScaleVecError("this optimizer folds the model's weights already; set it up once.")
    _require_training(folds, model_chunks)
    _require_known(folds)
    _require_no_waiting(folds, model_chunks)
    members = members_of(optimizer)
    engine = Engine(_sets(folds, members), _norm_sets(model_chunks, members))
    taking_part = dict.fromkeys(
        (
            *(member for one in engine.sets for member in (one.weights, one.vectors)),
            *(one.vectors for one in engine.norms),
        )
    )
    for leaf in dict.fromkeys(leaf for member in taking_part for leaf in member.optimizers):
        setattr(leaf, _ENGINE, engine)
        leaf.__class__ = _folding_member(type(leaf))
    for late in dict.fromkeys(
        one.weights.gathers for one in engine.sets if not _in_time(one.weights, one.vectors, members)
    ):
        late.__class__ = _gathering_later(type(late))
        engine.gathering_later.append(late)
    setattr(optimizer, _ENGINE, engine)
    optimizer.__class__ = _folding_root(type(optimizer))
    link_ready_signals(model_chunks)
    masters = {one.fold.weight: one.shard.main for own in engine.sets for one in own.local}
    for chunk in model_chunks:
        guard_masters(chunk, masters)
    engine.unfold()


def _sets(folds: Sequence[Fold], members: Sequence[Member]) -> list[FoldSet]:
    """Folds by the members that hold their weight and their vectors, and by the groups of the sums."""
    grouped: dict[tuple, list[Fold]] = {}
    for fold in folds:
        of_weight = _member_of(fold.weight, fold, members)
        of_vectors, *others = dict.fromkeys(_member_of(part, fold, members) for part in fold.parameters)
        if others or not (_in_time(of_weight, of_vectors, members) or is_layer_wise(of_weight.gathers)):
            raise ScaleVecError(
                f"the weight of a {type(fold.owner).__name__} {tuple(fold.weight.shape)} and its scale "
                "vectors are stepped by different optimizers, which execution inside the optimizer does not "
                "fold; use --scalevec-execution autograd."
            )
        key = of_weight, of_vectors, tuple(map(id, fold.groups))
        grouped.setdefault(key, []).append(fold)
    sets = [FoldSet(own, weights, vectors) for (weights, vectors, _), own in grouped.items()]
    for one in sets:
        _require_masters(one)
    return sets


def _norm_sets(chunks: Sequence[torch.nn.Module], members: Sequence[Member]) -> list[NormSet]:
    """Norms by the member that steps their vector and the group over which its gradient is a sum.

    A norm whose vector is not trained, or not as a whole, goes on composing it by itself.
    """
    grouped: dict[tuple[Member, int], tuple[list[Vector], Any]] = {}
    for norm in (module for chunk in chunks for module in chunk.modules() if isinstance(module, ScaledNorm)):
        vector, group = Vector(norm, GAMMA), norm.scalevec_tp_group
        group = group if group is not None and group.size() > 1 else None
        for member in members:
            if all(part in member.params for part in vector.parts.values()):
                grouped.setdefault((member, id(group)), ([], group))[0].append(vector)
    return [NormSet(vectors, member, group) for (member, _), (vectors, group) in grouped.items()]


def _require_training(folds: Sequence[Fold], chunks: Sequence[torch.nn.Module]) -> None:
    """What is frozen has no master, and W_eff changes with what is not."""
    folded = {param for fold in folds for param in (fold.weight, *fold.parameters)}
    named = (pair for chunk in chunks for pair in chunk.named_parameters())
    frozen = [name for name, param in named if param in folded and not param.requires_grad]
    if frozen:
        raise ScaleVecError(
            f"{len(frozen)} of {len(folded)} folded weights and their scale vectors are frozen "
            f"(requires_grad is False; first: {frozen[0]}), so that the optimizer has no float32 master of "
            "them to fold; use --scalevec-execution autograd, or train them."
        )


def _require_known(folds: Sequence[Fold]) -> None:
    """A copy of a parameter has lost what it is to the plugin: it would decay as no strategy says."""
    lost = next((f for f in folds if any(role_of(part) is None for part in f.parameters)), None)
    if lost is not None:
        raise ScaleVecError(
            f"the scale vectors of a {type(lost.owner).__name__} {tuple(lost.weight.shape)} are copies that "
            "have lost what they are for, as copy.deepcopy of a model makes them; to train a copy, build it "
            "anew, give it scale vectors and load the state."
        )


def _require_no_waiting(folds: Sequence[Fold], chunks: Sequence[torch.nn.Module]) -> None:
    """torch's wrapper waits for the vectors' gradients, which come in the optimizer's step."""
    vectors = {part for fold in folds for part in fold.parameters}
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.parallel.DistributedDataParallel):
            continue
        waits = any(
            param in vectors and name not in chunk.parameters_to_ignore
            for name, param in chunk.module.named_parameters()
        )
        if waits and not chunk.find_unused_parameters and not chunk.static_graph:
            raise ScaleVecError(
                "torch's DistributedDataParallel waits for gradients of scale vectors in the backward pass, "
                "where execution inside the optimizer makes none; wrap the model with "
                "find_unused_parameters=True or static_graph=True, or in Megatron's DistributedDataParallel."
            )


def _require_masters(one: FoldSet) -> None:
    """Every weight and every vector has a master, on one rank or in pieces on several."""
    owners = {part: fold.owner for fold in one.folds for part in fold.parameters}
    owners |= {fold.weight: fold.owner for fold in one.folds}
    for member, params in (
        (one.weights, [fold.weight for fold in one.folds]),
        (one.vectors, list(one.table.values)),
    ):
        shards = [member.shards.get(param) for param in params]
        held = [0 if shard is None else shard.stop - shard.start for shard in shards]
        found = torch.tensor(held, device=params[0].device)
        if member.group is not None:
            torch.distributed.all_reduce(found, group=member.group)
        for param, elements in zip(params, found.tolist()):
            if elements != param.numel():
                raise _without_master(param, owners[param])


def _in_time(of_weight: Member, of_vectors: Member, members: Sequence[Member]) -> bool:
    """Whether the vectors have stepped before the weights are gathered over ranks.

    A distributed optimizer gathers as soon as it has stepped. Vectors that experts share are dense
    parameters, whose optimizer comes before that of the experts.
    """
    if of_weight.group is None or of_weight.gathers is of_vectors.gathers:
        return True
    return members.index(of_vectors) < members.index(of_weight)


def _member_of(param: torch.nn.Parameter, fold: Fold, members: Sequence[Member]) -> Member:
    for member in members:
        if param in member.params:
            return member
    raise _without_master(param, fold.owner)


def _without_master(param: torch.nn.Parameter, owner: torch.nn.Module) -> ScaleVecError:
    return ScaleVecError(
        f"a parameter {tuple(param.shape)} of a {type(owner).__name__} with folded weights is in no "
        "optimizer that keeps a float32 master of it; train in bf16 or fp16 with Megatron's mixed-precision "
        "or distributed optimizer, or use --scalevec-execution autograd."
    )


@functools.cache
def _folding_member(base: type) -> type:
    class Folding(base):
        def _copy_main_params_to_model_params(self):
            engine = engine_of(self)
            with without_copies_of(engine.written_here, self) as some_left:
                # The distributed optimizer copies one parameter at a time, float32 ones besides.
                if some_left or isinstance(self, DistributedOptimizer):
                    super()._copy_main_params_to_model_params()
            engine.write(self)

        def sharded_state_dict(self, *args, **kwargs):
            state = super().sharded_state_dict(*args, **kwargs)
            engine = engine_of(self)
            if engine.marks_masters:
                mark_raw_masters(state, engine.weights_of(self), self, *args, **kwargs)
            return state

        def load_state_dict(self, *args, **kwargs):
            super().load_state_dict(*args, **kwargs)
            engine_of(self).check_all()

    return _named(Folding, f"Folding{base.__name__}")


@functools.cache
def _folding_root(base: type) -> type:
    class FoldingRoot(base):
        def prepare_grads(self):
            found_inf = super().prepare_grads()
            if not found_inf:
                engine_of(self).split()
            return found_inf

        def step_with_ready_grads(self):
            success = super().step_with_ready_grads()
            if success:
                engine_of(self).require_written()
                for layer_wise in engine_of(self).gathering_later:
                    layer_wise.gather_now()
            return success

        def load_state_dict(self, *args, **kwargs):
            super().load_state_dict(*args, **kwargs)
            engine_of(self).renew()

        def reload_model_params(self, *args, **kwargs):
            super().reload_model_params(*args, **kwargs)
            engine_of(self).unfold()

    return _named(FoldingRoot, f"Root{base.__name__}")


@functools.cache
def _gathering_later(base: type) -> type:
    """The layer-wise optimizer in front of another one that steps its weights' vectors."""

    class GatheringLater(base):
        def step_with_ready_grads(self):
            # As where the next forward pass gathers.
            overlaps, self.overlap_param_gather = self.overlap_param_gather, True
            try:
                return super().step_with_ready_grads()
            finally:
                self.overlap_param_gather = overlaps

        def gather_now(self):
            """What the step has left out."""
            if self.overlap_param_gather:
                return
            if self.use_buffer_param_sync:
                self.start_param_sync_for_bucket_group_subset()
            else:
                self.allgather_params()

    return _named(GatheringLater, f"GatheringLater{base.__name__}")


def _named(cls: type, name: str) -> type:
    cls.__name__ = cls.__qualname__ = name
    return cls
