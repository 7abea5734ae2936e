"""Counts what torch does: bytes that its operations read and write, arithmetic, and the peak of memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Counter"]

_A = torch.ops.aten
# Operations per element: of the result, or of the first argument where it is summed.
_PER_RESULT = {
    _A.mul.Tensor,
    _A.mul_.Tensor,
    _A.mul.Scalar,
    _A.mul_.Scalar,
    _A.mul.out,
    _A.add.Tensor,
    _A.add_.Tensor,
    _A.sub.Tensor,
    _A.div.Tensor,
    _A.div_.Tensor,
}
_PER_ARGUMENT = {_A.sum.default: 1, _A.sum.dim_IntList: 1, _A.mv.default: 2}


class Counter(TorchDispatchMode):
    """While it is entered, every operation below autograd is counted, those of the backward pass included.

    Attributes:
        bytes: Sum over operations of the sizes of their arguments and results. Views move nothing. What
            stays in a cache between two operations is counted all the same.
        flops: Of multiplications, additions, divisions and sums by element; matrix products are left out.
        peak: The most bytes of tensors made meanwhile that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.flops = self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # What a result is written to is counted as the result; it is not read.
        read = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        given = list(_tensors((args, read)))
        made = list(_tensors(result))
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments)
        if changes or any(tensor.untyped_storage()._cdata not in storages for tensor in made):
            self.bytes += sum(tensor.nbytes for tensor in (*given, *made))
        if function in _PER_RESULT:
            self.flops += sum(tensor.numel() for tensor in made)
        elif function in _PER_ARGUMENT:
            self.flops += _PER_ARGUMENT[function] * given[0].numel()
        for tensor in made:
            self._watch(tensor.untyped_storage(), storages)
        return result

    def _watch(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._known:
            return
        self._known.add(key)
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
