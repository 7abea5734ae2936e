"""Execution inside the optimizer, broken on purpose: each must be noticed, by the run or by a comparison."""

from __future__ import annotations

import torch

__all__ = ["FAULTS"]


def _engine(optimizer):
    from megatron_scalevec.execution.optimizer import engine_of

    return engine_of(optimizer)


def _leave_one_out(optimizer, wrapped) -> None:
    """The first weight is not folded after a step."""
    for one in _engine(optimizer).sets:
        original, kept = one.write, one.local

        def write(one=one, original=original, kept=kept):
            one.local = kept[1:]
            original()
            one.local = kept

        one.write = write


def _fold_twice(optimizer, wrapped) -> None:
    """Live weights are folded once more after every step."""
    from megatron_scalevec.execution.folds import fold_live_weights

    original = optimizer.step

    def step():
        result = original()
        with torch.no_grad():
            for chunk in wrapped:
                fold_live_weights(chunk)
        return result

    optimizer.step = step


def _scale_vectors(optimizer, wrapped) -> None:
    """After every step γ counts for a hundredth more than it is, and the run does not look."""
    for one in _engine(optimizer).sets:
        write, gather = one.write, one.gather

        def gather_scaled(one=one, gather=gather):
            gather()
            one.table.flat_gamma.mul_(1.01)

        def write_scaled(one=one, write=write, gather=gather, scaled=gather_scaled):
            one.gather = scaled
            write()
            one.gather = gather

        one.write, one.check = write_scaled, lambda: None


def _fold_late(optimizer, wrapped) -> None:
    """Live weights are folded when the step is over, and with it the gathering of parameters."""
    engine, step = _engine(optimizer), optimizer.step_with_ready_grads
    write = engine.write

    def step_then_fold():
        members, engine.write = [], lambda member: members.append(member)
        engine.require_written = lambda: None
        success = step()
        engine.write = write
        for member in members:
            write(member)
        return success

    optimizer.step_with_ready_grads = step_then_fold


def _drop_reduction(optimizer, wrapped) -> None:
    """Vectors get the gradient of this rank's rows and shards alone."""
    for one in _engine(optimizer).sets:
        one.complete = lambda sums: None


def _drop_reduction_of_norms(optimizer, wrapped) -> None:
    """The vectors of norms get the gradient of this rank's shards and heads alone."""
    for one in _engine(optimizer).norms:
        one.complete = lambda sums: None


def _leave_norms_alone(optimizer, wrapped) -> None:
    """After a step the norms have the scale of the step before."""
    for one in _engine(optimizer).norms:

        def write(one=one):
            one.written = True

        one.write = write


def _step_by(kernels: type, optimizer) -> None:
    """Steps are taken with these passes instead of torch's."""
    from megatron_scalevec.execution import engine

    original, step = engine.passes_for, optimizer.step

    def step_by_kernels():
        engine.passes_for = lambda device: kernels
        try:
            return step()
        finally:
            engine.passes_for = original

    optimizer.step = step_by_kernels


def _wrong_kernels(optimizer, wrapped) -> None:
    """Passes that are not torch's own do not apply γ to the weights' gradients. At a fresh start γ is one,
    so nothing else would notice before the second step."""
    from megatron_scalevec.execution import shard

    class Kernels:
        fold_parts = staticmethod(shard.fold_parts)

        @staticmethod
        def split_parts(parts, gradients, masters, gamma, totals) -> None:
            given = [gradient.clone() for gradient in gradients]
            shard.split_parts(parts, given, masters, gamma, totals)

    _step_by(Kernels, optimizer)


def _fold_nothing(optimizer, wrapped) -> None:
    """Passes that were right in the first step's trial leave one weight as it is, where a step changes no
    number: what is in the model is as good as what should be."""
    from megatron_scalevec.execution import shard

    class Kernels:
        split_parts = staticmethod(shard.split_parts)

        @staticmethod
        def fold_parts(parts, lives, masters, gamma) -> None:
            shard.fold_parts(parts[1:], lives[1:], masters[1:], gamma)

    for one in _engine(optimizer).sets:
        one._first_split = False
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _step_by(Kernels, optimizer)


def _forget_to_write(optimizer, wrapped) -> None:
    _engine(optimizer).write = lambda member: None


def _load_vectors_alone(optimizer, wrapped) -> None:
    """Between two steps somebody loads vectors into the optimizer and leaves the model as it is."""
    _load_masters(optimizer, _engine(optimizer).sets)


def _load_norms_alone(optimizer, wrapped) -> None:
    """The same with the vectors of norms alone."""
    _load_masters(optimizer, _engine(optimizer).norms)


def _load_masters(optimizer, sets) -> None:
    original = optimizer.step
    steps = []

    def step():
        if len(steps) == 2:
            for one in sets:
                for shard in one._masters:
                    shard.master.mul_(1.5)
                one._unchecked = []
        steps.append(1)
        return original()

    optimizer.step = step


def _load_weights_alone(optimizer, wrapped) -> None:
    """Between two steps somebody loads earlier weights and vectors into the model, and leaves the optimizer
    as it is."""
    original = optimizer.step
    steps, earlier = [], []

    def step():
        if len(steps) == 1:
            earlier.extend(
                {name: value.clone() for name, value in chunk.state_dict().items() if value is not None}
                for chunk in wrapped
            )
        if len(steps) == 3:
            for chunk, state in zip(wrapped, earlier):
                chunk.load_state_dict(state)
        steps.append(1)
        return original()

    optimizer.step = step


FAULTS = {
    "load-weights-alone": _load_weights_alone,
    "leave-one-out": _leave_one_out,
    "fold-twice": _fold_twice,
    "scale-vectors": _scale_vectors,
    "fold-late": _fold_late,
    "drop-reduction": _drop_reduction,
    "drop-reduction-of-norms": _drop_reduction_of_norms,
    "leave-norms-alone": _leave_norms_alone,
    "load-norms-alone": _load_norms_alone,
    "wrong-kernels": _wrong_kernels,
    "fold-nothing": _fold_nothing,
    "forget-to-write": _forget_to_write,
    "load-vectors-alone": _load_vectors_alone,
}
