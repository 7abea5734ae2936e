"""A checkpoint that is to be written: another one's tensors, and what is made of them."""

from __future__ import annotations

import argparse
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalevec.checkpoint.keys import GUARD_SHAPE, raw_key, stacked_axes
from megatron_scalevec.checkpoint.store import Box, CheckpointReader, Piece, StoredTensor
from megatron_scalevec.checkpoint.tables import of_experts
from megatron_scalevec.errors import ScaleVecError

__all__ = ["Draft", "Family", "layer_boxes", "layers_of"]

_STATE = re.compile(r"(?P<prefix>(?:chained_\d+\.)?optimizer\.state\.(?P<state>\w+)\.)(?P<key>.+)")
_ANY_STATE = re.compile(r"(chained_\d+\.)?optimizer\b")
_CHAIN = re.compile(r"chained_\d+\.")
# Exponent of the gradient in what the optimizer keeps of it; 0 for a copy of the parameter.
_POWERS = {
    "param": 0,
    "fp32_param": 0,
    "master_param": 0,
    "exp_avg": 1,
    "momentum_buffer": 1,
    "exp_avg_sq": 2,
}


@dataclass(frozen=True)
class Family:
    """Tensors of one kind with the model's keys behind a prefix.

    ``power`` is 0 for values (the model's own, without a prefix, and the optimizer's master copies), 1 and 2
    for averages of the gradient and of its square.
    """

    prefix: str
    power: int


def layers_of(stored: StoredTensor, own_axes: int) -> list[tuple[int, ...]]:
    """Indices over the axes along which layers are stacked, before a tensor's own axes."""
    return list(itertools.product(*map(range, stored.shape[: len(stored.shape) - own_axes])))


def layer_boxes(shape: tuple[int, ...], own_axes: int) -> Iterator[tuple[tuple[int, ...], Box]]:
    """One block per layer of a stacked tensor."""
    stacked = len(shape) - own_axes
    for index in itertools.product(*map(range, shape[:stacked])):
        yield index, Box(index + (0,) * own_axes, (1,) * stacked + shape[stacked:])


class Draft:
    """Pieces by key, at first those of ``reader``; nothing is read before a piece's turn has come.

    Args:
        reader: The source.
        optimizer: Whether the optimizer's state is carried over; otherwise it is left out.

    Raises:
        ScaleVecError: The optimizer's state is in a form in which parameters cannot be told apart.
    """

    def __init__(self, reader: CheckpointReader, *, optimizer: bool) -> None:
        self.reader = reader
        self.common: dict[str, Any] = dict(reader.common)
        self.args = argparse.Namespace(**vars(reader.args))
        self.common["args"] = self.args
        self.objects = list(reader.objects)
        self.model_keys = [key for key in reader.tensors if not _ANY_STATE.match(key)]
        self.families = [Family("", 0)]
        self._prefixes_of_experts: set[str] = set()
        self._pieces: dict[str, list[Piece]] = {}
        if optimizer:
            self._find_families()
        else:
            self.objects = [name for name in self.objects if not _ANY_STATE.match(name)]
            self.common.pop("optimizer", None)
            self.args.no_save_optim = True
        for key in reader.tensors if optimizer else self.model_keys:
            self.keep(key)

    def _find_families(self) -> None:
        prefixes: dict[str, int] = {}
        dense: set[str] = set()
        for key in self.reader.tensors:
            if not _ANY_STATE.match(key):
                continue
            match = _STATE.fullmatch(key)
            if match is None or match["state"] not in _POWERS:
                raise ScaleVecError(
                    f"the optimizer's state in {self.reader.folder} ({key}) does not say which parameter it "
                    "belongs to, as in Megatron's default format: save with "
                    "--dist-ckpt-optim-fully-reshardable, or leave the state behind with --no-optimizer."
                )
            prefixes[match["prefix"]] = _POWERS[match["state"]]
            if not of_experts(match["key"]):
                dense.add(match["prefix"])
        self.families += [Family(prefix, power) for prefix, power in prefixes.items()]
        self._prefixes_of_experts = prefixes.keys() - dense

    @property
    def values(self) -> list[Family]:
        return [family for family in self.families if family.power == 0]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self._pieces.values() for piece in pieces]

    def of(self, key: str) -> list[Family]:
        """The families in which the source has a tensor for a model's key."""
        return [family for family in self.families if family.prefix + key in self.reader.tensors]

    @property
    def dense_families(self) -> list[Family]:
        """Those of the model without its routed experts, which may have an optimizer of their own."""
        return [family for family in self.families if family.prefix not in self._prefixes_of_experts]

    def key_in(self, family: Family, key: str) -> str:
        """Where a parameter is stored that belongs with a family: there, in the same state of another of the
        chained optimizers, or in the model alone."""
        state = _CHAIN.sub("", family.prefix, count=1)
        prefixes = [family.prefix]
        prefixes += [
            other.prefix for other in self.families if _CHAIN.sub("", other.prefix, count=1) == state
        ]
        stored = (prefix + key for prefix in prefixes if prefix + key in self.reader.tensors)
        return next(stored, key)

    def keep(self, key: str) -> None:
        """Take a tensor over as it is."""
        stored, read = self.reader.tensors[key], self.reader.read
        self._pieces[key] = [
            Piece(key, stored.shape, stored.dtype, box, lambda box=box: read(key, box))
            for box in stored.chunks
        ]

    def drop(self, key: str) -> None:
        """Leave a tensor out, in all families."""
        for family in self.families:
            self._pieces.pop(family.prefix + key, None)

    def change(
        self, key: str, new: str, make: Callable[[Family, torch.Tensor, Box], torch.Tensor] | None = None
    ) -> None:
        """Store a tensor under another key (or the same), in all families, chunk by chunk.

        ``make(family, values, box)`` gets a chunk in float32 or wider and returns what it becomes; without
        it the bits stay.
        """
        for family in self.of(key):
            source = family.prefix + key
            stored = self.reader.tensors[source]

            def made(box: Box, family=family, source=source, stored=stored) -> torch.Tensor:
                values = self.reader.read(source, box)
                if make is None:
                    return values
                wide = values.to(torch.promote_types(values.dtype, torch.float32))
                return make(family, wide, box).to(stored.dtype)

            self._pieces.pop(source, None)
            target = family.prefix + new
            self._pieces[target] = [
                Piece(target, stored.shape, stored.dtype, box, lambda box=box, made=made: made(box))
                for box in stored.chunks
            ]

    def put(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make: Callable[[tuple[int, ...]], torch.Tensor],
        own_axes: int = 1,
    ) -> None:
        """Add or replace a small tensor, one block per layer; ``make(layer)`` returns its own axes."""
        self._pieces[key] = [
            Piece(key, shape, dtype, box, lambda index=index, box=box: make(index).to(dtype).view(box.sizes))
            for index, box in layer_boxes(shape, own_axes)
        ]

    def add_parameter(
        self,
        key: str,
        size: int,
        like: str,
        make: Callable[[Family, tuple[int, ...]], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        trained: bool = True,
    ) -> None:
        """Add a one-dimensional parameter: its values, and zero averages.

        Args:
            key: Of the model's tensor.
            size: Elements per layer.
            like: A source tensor of the same layers, which decides where and in which dtypes it exists.
            make: Values [size] of a layer for a family of values.
            dtype: In the model; None for that of ``like``.
            trained: Whether the optimizer knows it.
        """
        stacked = self.reader.tensors[like].shape[: stacked_axes(like)]
        for family in self.of(like) if trained else self.families[:1]:
            stored = self.reader.tensors[family.prefix + like]
            kind = (dtype or stored.dtype) if family.prefix == "" else stored.dtype
            if family.power:
                self.put(family.prefix + key, (*stacked, size), kind, lambda _: torch.zeros(size))
            else:
                self.put(
                    family.prefix + key,
                    (*stacked, size),
                    kind,
                    lambda index, family=family: make(family, index),
                )

    def add_guard(self, key: str, like: str) -> None:
        """Put a guard at a stock key; see :mod:`megatron_scalevec.checkpoint.keys`."""
        stacked = self.reader.tensors[like].shape[: stacked_axes(like)]
        shape = (*stacked, *GUARD_SHAPE)
        self.put(key, shape, torch.float32, lambda _: torch.zeros(GUARD_SHAPE), own_axes=len(GUARD_SHAPE))

    def make_raw(self, weight: str) -> None:
        """Give a weight the key that stock Megatron does not know, and its old key a guard."""
        self.change(weight, raw_key(weight))
        self.add_guard(weight, weight)

    def read_layer(self, family: Family, key: str, index: tuple[int, ...]) -> torch.Tensor:
        """One layer of a stacked vector of the source, in float32 or wider; the model's where the family
        has none.

        ``index`` may go on with an expert's where all experts have the vector in common.
        """
        name = self.key_in(family, key)
        shape = self.reader.tensors[name].shape
        index = index[: len(shape) - 1]
        values = self.reader.read(name, Box((*index, 0), ((1,) * len(index)) + shape[len(index) :]))
        return values.flatten().to(torch.promote_types(values.dtype, torch.float32))

    def layers(self, weight: str) -> list[tuple[int, ...]]:
        """Indices of a weight's layers and experts; the weight may be a norm's."""
        return layers_of(
            self.reader.tensors[weight], len(self.reader.tensors[weight].shape) - stacked_axes(weight)
        )

    def set_decay_groups(self, *, without_decay: set[bool]) -> None:
        """Leave the parameter groups that the run will have: Megatron pairs them one by one.

        Args:
            without_decay: Where there are parameters that do not decay: False in it stands for the model
                without its routed experts, True for those experts.

        Raises:
            ScaleVecError: There are groups of another kind, which only the run that saved knows.
        """
        if "optimizer" not in self.common:
            return
        self.common["optimizer"] = copy.deepcopy(self.common["optimizer"])
        owners = list(_owners_of_groups(self.common["optimizer"]))
        # Experts that are spread over ranks have an optimizer of their own; otherwise one has them all.
        apart = any(_is_of_experts(owner) for owner in owners)
        for owner in owners:
            groups = owner["param_groups"]
            by_decay = {group.get("wd_mult"): group for group in groups}
            if len(by_decay) != len(groups) or not {1.0} <= by_decay.keys() <= {0.0, 1.0}:
                raise ScaleVecError(
                    "the optimizer has parameter groups beyond those with and without weight decay, which "
                    "cannot be rebuilt here; leave its state behind with --no-optimizer."
                )
            kept = [by_decay[1.0]]
            if without_decay & ({_is_of_experts(owner)} if apart else {False, True}):
                kept.append(by_decay.get(0.0) or {**by_decay[1.0], "wd_mult": 0.0, "weight_decay": 0.0})
            owner["param_groups"] = kept


def _is_of_experts(owner: dict[str, Any]) -> bool:
    return any(group.get("is_expert_parallel") for group in owner["param_groups"])


def _owners_of_groups(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "param_groups" in node:
            yield node
        for value in node.values():
            yield from _owners_of_groups(value)
