"""The way back: a checkpoint without scale vectors, for Megatron without this package.

W becomes W ⊙ (γ_out γ_inᵀ). Where all branches of a norm have the same γ_in, γ returns to the norm instead,
so that a checkpoint that was only unfolded comes back bit for bit. A norm's own vector becomes its weight.

Optimizer: master copies are folded like the weights. With s the factor that W is multiplied by, the gradient
of the folded weight is ∂L/∂W / s, so the first average is divided by s and the second by s². That is exact as
far as s was constant while the averages were made; where s is zero they start at zero. Scales that return to
norms start with zero averages.
"""

from __future__ import annotations

import functools
import re

import torch

from megatron_scalevec.checkpoint.draft import Draft, Family
from megatron_scalevec.checkpoint.keys import raw_key, require_raw_weights
from megatron_scalevec.checkpoint.store import Box
from megatron_scalevec.checkpoint.tables import Dimensions, Site, find_linears, find_norms
from megatron_scalevec.checkpoint.unfold import indices
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.decisions import SHARED
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, fold_weight
from megatron_scalevec.reparam import get_reparameterization

__all__ = ["Folding"]

_VECTOR = re.compile(r"\.gamma(_in_|_out_|$|_[a-z]+$)")
_BLOCK = 1 << 20  # elements
_HEAD_NORM = re.compile(r"(.+)\.([qkv])_layernorm\.(scalevec_)?weight")


class Folding:
    """Turns a draft of a checkpoint with scale vectors into one of a stock model.

    Args:
        draft: Of a checkpoint with scale vectors.

    Raises:
        ScaleVecError: The checkpoint has none, or stock Megatron cannot express what it computes.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.config = ScaleVecConfig.from_namespace(draft.args)
        if not self.config.active:
            raise ScaleVecError(
                f"{draft.reader.folder} is a stock checkpoint already: it carries no scale vectors to fold."
            )
        require_raw_weights(draft.reader.folder, draft.args)
        self.dimensions = Dimensions.of(draft.args)
        self._kind = get_reparameterization(self.config.reparam or "none")
        has_head_norms = self._look_at_head_norms()
        for key in draft.model_keys:
            if _VECTOR.search(key):
                draft.drop(key)
        linears = find_linears(draft.model_keys)
        for site in linears:
            if raw_key(f"{site.path}.weight") in draft.reader.tensors:
                self._linear(site)
            elif site.kind.fed_by_norm:
                self._thaw(f"{site.norm}weight")
        heads = [
            f"{site.attention}.{branch}_layernorm"
            for site in linears
            for branch in ("q", "k")
            if site.kind.has_heads and f"{site.attention}.{branch}_layernorm.weight" in draft.reader.tensors
        ]
        for path in [*heads, *(path for _, path in find_norms(draft.model_keys))]:
            if raw_key(f"{path}.weight") in draft.reader.tensors:
                self._norm(path)
            else:
                self._thaw(f"{path}.weight")
        draft.set_decay_groups(without_decay=True)
        if has_head_norms:
            draft.args.qk_layernorm = True
        if (getattr(draft.args, "spec", None) or [""])[0] == "megatron_scalevec.specs":
            draft.args.spec = None
        for key in [key for key in vars(draft.args) if key.startswith("scalevec_")]:
            delattr(draft.args, key)

    def _look_at_head_norms(self) -> bool:
        found: dict[str, set[str]] = {}
        for key in self.draft.model_keys:
            match = _HEAD_NORM.fullmatch(key)
            if match:
                found.setdefault(match[1], set()).add(match[2])
        for path, branches in found.items():
            if "v" in branches:
                raise ScaleVecError(
                    f"{path} normalizes its values (the v norm of {self.config.describe()}), and stock "
                    "Megatron has no place for that: without the norm the values would have other sizes and "
                    "the trained model would be lost. Train with --scalevec-placement dual, or "
                    "--scalevec-branches-off v, to have a model that folds; evaluate this one with the "
                    "package installed."
                )
            if branches != {"q", "k"}:
                raise ScaleVecError(
                    f"{path} normalizes {' and '.join(sorted(branches))} alone, and stock Megatron "
                    "(--qk-layernorm) normalizes both q and k or neither: that norm would be lost."
                )
        return bool(found)

    def _linear(self, site: Site) -> None:
        weight = f"{site.path}.weight"
        raw = raw_key(weight)
        shape = self.draft.reader.tensors[raw].shape
        row_map = site.kind.rows(self.dimensions, shape[-2])
        self.draft.drop(weight)  # the guard
        returns = site.kind.fed_by_norm and self._same_input_scales(site, row_map)
        factors = functools.lru_cache(maxsize=2)(
            lambda family, index: self._factors(site, row_map, shape[-1], family, index, returns)
        )

        def folded(family: Family, values: torch.Tensor, box: Box) -> torch.Tensor:
            rows = slice(box.offsets[-2], box.offsets[-2] + box.sizes[-2])
            columns = slice(box.offsets[-1], box.offsets[-1] + box.sizes[-1])
            layers = _layers(box)
            flat = values.view(-1, *box.sizes[-2:])  # a copy already, changed in place
            for number, index in enumerate(layers):
                # The scales of a moment are those of the masters, or of the model where there are none.
                scales = Family(self._master_of(family, raw), 0)
                gamma_in, gamma_out = factors(scales, index)
                flat[number] = _scale(
                    flat[number],
                    None if gamma_in is None else gamma_in[:, columns],
                    gamma_out,
                    row_map.branch_of_row[rows],
                    row_map.slot_of_row[rows],
                    family.power,
                )
            return values

        self.draft.change(raw, weight, folded if self._has_any(site, row_map, returns) else None)
        if site.kind.fed_by_norm:
            norm, bias = f"{site.norm}weight", f"{site.norm}bias"
            if returns:
                name = self._input_name(site, row_map)
                self._set_norm(norm, norm, bias, lambda family, index: self._compose(family, name, index))
            else:
                self._thaw(norm)

    def _names(self, site: Site, row_map: RowMap, side: str) -> list[str | None]:
        """Names of a side's vectors by branch, None where there is none."""
        shared = f"{site.path}.gamma_{side}_{SHARED}"
        if self._exists(shared):
            return [shared] * len(row_map.branches)
        names = (f"{site.path}.gamma_{side}_{branch}" for branch in row_map.branches)
        return [name if self._exists(name) else None for name in names]

    def _exists(self, name: str) -> bool:
        return self._part(name, self._kind.parts[0].suffix) in self.draft.reader.tensors

    @staticmethod
    def _part(name: str, suffix: str) -> str:
        return f"{name}_{suffix}" if suffix else name

    def _input_name(self, site: Site, row_map: RowMap) -> str:
        return self._names(site, row_map, "in")[0]

    def _compose(self, family: Family, name: str, index: tuple[int, ...]) -> torch.Tensor:
        """γ of one layer, in float32 or wider."""
        parts = {
            part.suffix: self.draft.read_layer(family, self._part(name, part.suffix), index)
            for part in self._kind.parts
        }
        return self._kind.compose(parts)

    def _same_input_scales(self, site: Site, row_map: RowMap) -> bool:
        names = self._names(site, row_map, "in")
        if None in names:
            return False
        raw = raw_key(f"{site.path}.weight")
        families = [family for family in self.draft.of(raw) if family.power == 0]
        for index in self.draft.layers(raw):
            for family in families:
                first, *others = (self._compose(family, name, index) for name in dict.fromkeys(names))
                if not all(torch.equal(first, other) for other in others):
                    return False
        return True

    def _has_any(self, site: Site, row_map: RowMap, returns: bool) -> bool:
        names = self._names(site, row_map, "out") + ([] if returns else self._names(site, row_map, "in"))
        return any(name is not None for name in names)

    def _factors(
        self, site: Site, row_map: RowMap, columns: int, family: Family, index: tuple[int, ...], returns: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """γ_in [branches, columns] and γ_out [all rows] of one layer."""

        def stacked(side: str, sizes: list[int]) -> list[torch.Tensor] | None:
            names = self._names(site, row_map, side)
            if all(name is None for name in names):
                return None
            return [
                torch.ones(size) if name is None else self._compose(family, name, index)
                for name, size in zip(names, sizes)
            ]

        inputs = None if returns else stacked("in", [columns] * len(row_map.branches))
        outputs = stacked("out", list(row_map.sizes))
        return (
            None if inputs is None else torch.stack(inputs),
            None if outputs is None else torch.cat(outputs),
        )

    def _master_of(self, family: Family, key: str) -> str:
        """Prefix of the values whose scales belong to a family of averages, or to the values themselves."""
        if family.power == 0:
            return family.prefix
        masters = [other.prefix for other in self.draft.of(key) if other.power == 0 and other.prefix]
        return masters[0] if masters else ""

    def _norm(self, path: str) -> None:
        """A norm whose scale is a vector of ours."""
        weight = f"{path}.weight"
        self.draft.drop(weight)  # the guard
        self.draft.drop(raw_key(weight))
        vector = f"{path}.gamma"
        self._set_norm(
            weight,
            raw_key(weight),
            f"{path}.bias",
            lambda family, index: self._compose(family, vector, index),
        )

    def _set_norm(self, weight: str, stored: str, bias: str, gamma) -> None:
        """Give a norm its scale back; a bias was scaled together with the norm's output."""
        size = self.draft.reader.tensors[stored].shape[-1]
        shift = 1 if self.dimensions.zero_centered else 0
        self._put_norm(weight, stored, size, lambda family, index: gamma(family, index) - shift)
        if bias in self.draft.reader.tensors:

            def scaled(family: Family, values: torch.Tensor, box: Box) -> torch.Tensor:
                scales = Family(self._master_of(family, bias), 0)
                all_gamma = torch.stack([gamma(scales, index) for index in indices(box)])
                all_gamma = all_gamma.view(values.shape[:-1] + (-1,))
                own = all_gamma[..., box.offsets[-1] : box.offsets[-1] + box.sizes[-1]]
                if family.power == 0:
                    return values * own
                return torch.where(own == 0, torch.zeros_like(values), values / own**family.power)

            self.draft.change(bias, bias, scaled)

    def _thaw(self, weight: str) -> None:
        """A norm that was frozen at one is trained by a stock run, whose optimizer asks for its state."""
        if len(self.draft.of(weight)) == 1 < len(self.draft.families):
            size = self.draft.reader.tensors[weight].shape[-1]
            self._put_norm(weight, weight, size, lambda _, index: self._own(weight, index))

    def _own(self, weight: str, index: tuple[int, ...]) -> torch.Tensor:
        return self.draft.read_layer(Family("", 0), weight, index)

    def _put_norm(self, weight: str, stored: str, size: int, make) -> None:
        """Values and zero averages, in every family that the optimizer has."""
        source = self.draft.reader.tensors[stored]
        shape = source.shape
        for family in self.draft.families:
            dtype = source.dtype if family.prefix == "" else torch.float32
            if family.power:
                self.draft.put(family.prefix + weight, shape, dtype, lambda _: torch.zeros(size))
            else:
                self.draft.put(
                    family.prefix + weight, shape, dtype, lambda index, family=family: make(family, index)
                )


def _layers(box: Box) -> list[tuple[int, ...]]:
    """Layers that a block of a stacked weight covers."""
    return indices(Box(box.offsets[:-1], box.sizes[:-1]))


def _scale(values, gamma_in, gamma_out, branch_of_row, slot_of_row, power: int) -> torch.Tensor:
    """Values times the factor; averages of gradients divided by it, once or twice.

    A block of rows at a time: the factor of all rows would be a second weight, and there are intermediates.
    """
    result = torch.empty_like(values)
    step = max(1, _BLOCK // values.shape[1])
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        maps = (gamma_in, gamma_out, branch_of_row[rows], slot_of_row[rows])
        if power == 0:
            result[rows] = fold_weight(values[rows], *maps)
        else:
            factor = fold_weight(torch.ones_like(values[rows]), *maps) ** power
            result[rows] = torch.where(factor == 0, torch.zeros_like(factor), values[rows] / factor)
    return result
