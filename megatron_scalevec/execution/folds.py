"""What is folded together: one weight, the branches of its rows, and their vectors.

Any site registers a :class:`Fold` on the module that owns the weight; nothing else in this package asks
what kind of linear it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.shard import Part, Run, fold_parts, runs_of
from megatron_scalevec.fold import RowMap
from megatron_scalevec.vectors import compose_vector, vector_parts

__all__ = [
    "Fold",
    "Vector",
    "fold_live_weights",
    "folds_of",
    "forget_folds",
    "guard_masters",
    "own_folds",
    "register_fold",
    "release",
    "require_an_engine",
]

_ATTRIBUTE = "scalevec_folds"


@dataclass(frozen=True)
class Vector:
    """A vector by its place: ``name`` on ``owner``, as ``vectors.add_vector`` made it."""

    owner: torch.nn.Module
    name: str

    @property
    def parts(self) -> dict[str, torch.nn.Parameter]:
        """Stored parts by suffix."""
        return vector_parts(self.owner, self.name)[1]

    @property
    def kind(self) -> str:
        """Name of the reparameterization."""
        return vector_parts(self.owner, self.name)[0]

    @property
    def size(self) -> int:
        """Entries of γ."""
        return max(part.numel() for part in self.parts.values())


@dataclass(frozen=True)
class Fold:
    """W_eff[r, c] = W[r, c] · γ_in[branch of r][first_column + c] · γ_out[branch of r][channel of r].

    ``inner`` and ``outer`` have one entry per branch, None where the scale is one. ``tp_group``: of the ranks
    that share the weight, None where every rank holds it whole. ``more_groups``: over which a vector's
    gradient is a sum as well, because their ranks hold other weights with the same vector: other experts.
    """

    owner: torch.nn.Module
    weight_name: str
    runs: tuple[Run, ...]
    inner: tuple[Vector | None, ...]
    outer: tuple[Vector | None, ...]
    first_column: int = 0
    tp_group: Any = None
    more_groups: tuple[Any, ...] = ()

    @property
    def weight(self) -> torch.nn.Parameter:
        """The live weight [rows, columns], which is W_eff."""
        return getattr(self.owner, self.weight_name)

    @property
    def groups(self) -> tuple[Any, ...]:
        """All groups over which a vector's gradient is a sum, besides the ranks that share the master."""
        return (*(() if self.tp_group is None else (self.tp_group,)), *self.more_groups)

    @property
    def vectors(self) -> list[Vector]:
        """The vectors, each once."""
        return list(dict.fromkeys(v for v in (*self.inner, *self.outer) if v is not None))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The vectors' stored parts."""
        return [part for vector in self.vectors for part in vector.parts.values()]

    def part(self, begins: Mapping[Vector, int], start: int = 0, stop: int | None = None) -> Part:
        """Elements [start, stop) of the weight, all by default. ``begins``: of each γ in a flat tensor."""
        rows, columns = self.weight.shape
        return Part(
            start,
            rows * columns if stop is None else stop,
            columns,
            self.runs,
            tuple(None if v is None else begins[v] + self.first_column for v in self.inner),
            tuple(None if v is None else begins[v] for v in self.outer),
        )


def register_fold(
    owner: torch.nn.Module,
    row_map: RowMap,
    *,
    inner: Sequence[str | None],
    outer: Sequence[str | None],
    weight_name: str = "weight",
    first_column: int = 0,
    tp_group: Any = None,
    more_groups: Sequence[Any] = (),
    vectors_of: torch.nn.Module | None = None,
) -> Fold:
    """Declare that a weight is W_eff from now on, and make it so.

    Args:
        owner: Holds the weight.
        row_map: For this rank's rows.
        inner: Name of each branch's γ_in, None for ones.
        outer: Name of each branch's γ_out.
        weight_name: Of a parameter [local rows, local columns], raw W on entry.
        first_column: Where this rank's columns begin in γ_in.
        tp_group: Over which the weight is sharded, None where it is not.
        more_groups: Over whose ranks the gradient of a vector is a sum as well.
        vectors_of: Holds the vectors, ``owner`` by default.
    """

    def vector(name: str | None) -> Vector | None:
        return None if name is None else Vector(vectors_of or owner, name)

    fold = Fold(
        owner,
        weight_name,
        runs_of(row_map),
        tuple(map(vector, inner)),
        tuple(map(vector, outer)),
        first_column,
        tp_group if tp_group is not None and tp_group.size() > 1 else None,
        tuple(group for group in more_groups if group.size() > 1),
    )
    owner.__dict__.setdefault(_ATTRIBUTE, []).append(fold)
    _fold_live(fold)
    return fold


def folds_of(model: torch.nn.Module) -> Iterator[Fold]:
    """Every fold of a model, in the order of its modules, which is that of every data-parallel rank."""
    for module in model.modules():
        yield from own_folds(module)


def own_folds(module: torch.nn.Module) -> Sequence[Fold]:
    """The folds of the weights that a module owns itself."""
    return module.__dict__.get(_ATTRIBUTE, ())


def forget_folds(module: torch.nn.Module) -> None:
    """The vectors are taken away: the module's weights stay what they are, W_eff."""
    module.__dict__.pop(_ATTRIBUTE, None)


def fold_live_weights(model: torch.nn.Module) -> None:
    """Take the live weights for raw W, as they are after an initialization from outside: make them W_eff."""
    for fold in folds_of(model):
        _fold_live(fold)


@torch.no_grad()
def _fold_live(fold: Fold) -> None:
    weight = fold.weight
    if weight.is_meta:
        return
    values = {v: compose_vector(v.owner, v.name) for v in fold.vectors}
    if all(bool((value == 1).all()) for value in values.values()):
        return
    raw = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).reshape(-1).clone()
    begins = dict(zip(values, accumulate((value.numel() for value in values.values()), initial=0)))
    gamma = torch.cat(list(values.values())).to(raw.dtype)
    fold_parts([fold.part(begins)], [weight.data.view(-1)], [raw], gamma)


_GUARD = "scalevec_guard"
_HOOK = "scalevec_guard_hook"


class _Guard:
    """A forward pre-hook that stops a training forward pass as long as no optimizer folds the weights.

    An optimizer that is made after the one that does has masters of its own, and Megatron notes them at
    the parameters, which is how it is seen. A copy of the model has a guard that knows of no optimizer.
    """

    def __init__(self) -> None:
        self._told = False
        self._masters: list[tuple[weakref.ref, weakref.ref]] = []

    def expect(self, masters: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """An optimizer folds the weights, from these masters. One of them stands for all."""
        noted = (pair for pair in masters.items() if getattr(pair[0], "main_param", None) is pair[1])
        self._masters = [(weakref.ref(param), weakref.ref(main)) for param, main in [*noted][:1]]
        self._told = True

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if not self._told or any(
            getattr(param(), "main_param", None) is not main() for param, main in self._masters
        ):
            who, way_out = "no optimizer was told", "build the model with execution 'autograd'"
            if self._told:
                who = "the optimizer made last was not told"
                way_out = "go on with the one before after its reload_model_params()"
            raise ScaleVecError(
                f"the model's weights are folded inside the optimizer, and {who}: call "
                "megatron_scalevec.execution.optimizer.execute_in_optimizer(optimizer, model_chunks) before "
                f"the first step, or {way_out}."
            )

    def __deepcopy__(self, memo: dict) -> _Guard:
        return _Guard()

    def __reduce__(self) -> tuple[type, tuple]:
        return _Guard, ()


def require_an_engine(model: torch.nn.Module) -> None:
    """Stop a training forward pass of ``model`` as long as no optimizer folds its weights."""
    guard = _Guard()
    setattr(model, _GUARD, guard)
    setattr(model, _HOOK, model.register_forward_pre_hook(guard))


def guard_masters(model: torch.nn.Module, masters: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
    """An optimizer folds the model's weights: what :func:`require_an_engine` asks for.

    Args:
        model: The model, wrapped or not.
        masters: Weights to the float32 masters that this rank has.
    """
    for module in model.modules():
        if _GUARD in module.__dict__:
            own = set(module.parameters())
            module.__dict__[_GUARD].expect({p: main for p, main in masters.items() if p in own})


def release(model: torch.nn.Module) -> None:
    """The vectors are taken away: take the check of :func:`require_an_engine` off again."""
    for module in model.modules():
        if module.__dict__.pop(_GUARD, None) is not None:
            module.__dict__.pop(_HOOK).remove()
