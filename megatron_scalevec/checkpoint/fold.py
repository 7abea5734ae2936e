"""The way back: a checkpoint without scale vectors, for Megatron without this package.

W becomes W ⊙ (γ_out γ_inᵀ). Where all branches of a norm have the same γ_in, γ returns to the norm instead,
so that a checkpoint that was only unfolded comes back bit for bit; before a mixture of experts that means the
router, every expert and the shared ones. A norm's own vector becomes its weight.

What a run that folds inside its optimizer has saved keeps its weights, which are W_eff already; no γ returns
to a norm then.

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
from megatron_scalevec.checkpoint.keys import raw_key, saved_execution
from megatron_scalevec.checkpoint.store import Box
from megatron_scalevec.checkpoint.tables import (
    Dimensions,
    Site,
    find_linears,
    find_norms,
    of_experts,
    sites_by_norm,
)
from megatron_scalevec.checkpoint.unfold import indices
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.decisions import SHARED
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, fold_weight
from megatron_scalevec.hybrid_layers import hybrid_pattern
from megatron_scalevec.reparam import get_reparameterization

__all__ = ["Folding"]

_VECTOR = re.compile(r"\.(layer_norm_)?gamma(_in_|_out_|$|_[a-z]+$)")
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
        self._live_is_folded = saved_execution(draft.args) == "optimizer"
        self.dimensions = Dimensions.of(draft.args)
        self._kind = get_reparameterization(self.config.reparam or "none")
        linears = find_linears(draft.model_keys)
        has_head_norms = self._look_at_head_norms({s.attention for s in linears if s.kind.has_heads})
        for key in draft.model_keys:
            if _VECTOR.search(key):
                draft.drop(key)
        for sites in sites_by_norm(linears):
            self._linears(sites)
        heads = [
            f"{site.attention}.{branch}_layernorm"
            for site in linears
            for branch in ("q", "k")
            if site.kind.has_heads and f"{site.attention}.{branch}_layernorm.weight" in draft.reader.tensors
        ]
        for path in [*heads, *(path for _, path in find_norms(draft.model_keys))]:
            self._norm(f"{path}.")
        biases = {of_experts(key) for key in draft.model_keys if key.endswith(".bias")}
        draft.set_decay_groups(without_decay={False} | biases)
        if has_head_norms:
            draft.args.qk_layernorm = True
        if (getattr(draft.args, "spec", None) or [""])[0] == "megatron_scalevec.specs":
            draft.args.spec = None
        for key in [key for key in vars(draft.args) if key.startswith("scalevec_")]:
            delattr(draft.args, key)

    def _look_at_head_norms(self, attentions: set[str]) -> bool:
        found: dict[str, set[str]] = {}
        for key in self.draft.model_keys:
            match = _HEAD_NORM.fullmatch(key)
            if match and match[1] in attentions:
                found.setdefault(match[1], set()).add(match[2])
        hybrid = hybrid_pattern(self.draft.args) is not None
        for path, branches in found.items():
            if "v" in branches:
                way = "" if hybrid else ", or --scalevec-branches-off v,"
                raise ScaleVecError(
                    f"{path} normalizes its values (the v norm of {self.config.describe()}), and stock "
                    "Megatron has no place for that: without the norm the values would have other sizes and "
                    f"the trained model would be lost. Train with --scalevec-placement dual{way} to have a "
                    "model that folds; evaluate this one with the package installed."
                )
            if branches != {"q", "k"}:
                raise ScaleVecError(
                    f"{path} normalizes {' and '.join(sorted(branches))} alone, and stock Megatron "
                    "(--qk-layernorm) normalizes both q and k or neither: that norm would be lost."
                )
            if hybrid and self.config.placement == "dual-norm":
                raise ScaleVecError(
                    f"{path} normalizes q and k ({self.config.describe()}), and the attention layers of "
                    "Megatron's hybrid models do not, whatever --qk-layernorm says: those norms would be "
                    "lost. Train with --scalevec-placement dual to have a model that folds; evaluate this "
                    "one with the package installed."
                )
        return bool(found)

    def _linears(self, sites: list[Site]) -> None:
        """All linears that one norm feeds, and the norm."""
        scaled = [site for site in sites if self._is_scaled(site)]
        norm = sites[0].norm
        returns = (
            not self._live_is_folded
            and norm is not None
            and len(scaled) == len(sites)
            and self._same_input_scales(sites)
        )
        for site in scaled:
            self._linear(site, returns)
        if returns:
            [name, *_] = self._names(sites[0], self._row_map(sites[0]), "in")
            self._set_norm(
                f"{norm}weight",
                f"{norm}weight",
                f"{norm}bias",
                lambda family, index: self._compose(family, name, index),
            )
        elif norm is not None:
            self._norm(norm)

    def _stored(self, site: Site) -> str:
        """The weight's key here: its stock key may hold a guard."""
        raw = raw_key(site.weight)
        return raw if raw in self.draft.reader.tensors else site.weight

    def _is_scaled(self, site: Site) -> bool:
        if self._stored(site) != site.weight:
            return True
        return self._live_is_folded and self._has_any(site, self._row_map(site), returns=False)

    def _row_map(self, site: Site) -> RowMap:
        return site.kind.rows(self.dimensions, self.draft.reader.tensors[self._stored(site)].shape[-2])

    def _linear(self, site: Site, returns: bool) -> None:
        """``returns``: whether the input scales go back to the norm."""
        weight = site.weight
        stored = self._stored(site)
        shape = self.draft.reader.tensors[stored].shape
        row_map = self._row_map(site)
        if stored != weight:
            self.draft.drop(weight)  # the guard
        factors = functools.lru_cache(maxsize=2)(
            lambda family, index: self._factors(site, row_map, shape[-1], family, index, returns)
        )

        def folded(family: Family, values: torch.Tensor, box: Box) -> torch.Tensor:
            if self._live_is_folded and not family.prefix:
                return values
            rows = slice(box.offsets[-2], box.offsets[-2] + box.sizes[-2])
            columns = slice(box.offsets[-1], box.offsets[-1] + box.sizes[-1])
            layers = _layers(box)
            flat = values.view(-1, *box.sizes[-2:])  # a copy already, changed in place
            for number, index in enumerate(layers):
                # The scales of a moment are those of the masters, or of the model where there are none.
                scales = Family(self._master_of(family, stored), 0)
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

        self.draft.change(stored, weight, folded if self._has_any(site, row_map, returns) else None)

    def _names(self, site: Site, row_map: RowMap, side: str) -> list[str | None]:
        """Names of a side's vectors by branch, None where there is none."""
        for path in site.whole_paths:
            shared = f"{path}.gamma_{side}_{SHARED}"
            if self._exists(shared):
                return [shared] * len(row_map.branches)
        owner = site.owner(shared=self.config.experts == "shared")
        names = (f"{owner}.gamma_{side}_{branch}" for branch in row_map.branches)
        return [name if self._exists(name) else None for name in names]

    def _exists(self, name: str) -> bool:
        return self._part(name, self._kind.parts[0].suffix) in self.draft.reader.tensors

    @staticmethod
    def _part(name: str, suffix: str) -> str:
        return f"{name}_{suffix}" if suffix else name

    def _compose(self, family: Family, name: str, index: tuple[int, ...]) -> torch.Tensor:
        """γ of one layer, in float32 or wider."""
        parts = {
            part.suffix: self.draft.read_layer(family, self._part(name, part.suffix), index)
            for part in self._kind.parts
        }
        return self._kind.compose(parts)

    def _same_input_scales(self, sites: list[Site]) -> bool:
        """Whether all branches of a norm have the same γ_in, in the model and in the master copies."""
        by_site = [self._names(site, self._row_map(site), "in") for site in sites]
        if any(None in names for names in by_site):
            return False
        first = by_site[0][0]
        for site, names in zip(sites, by_site):
            raw = raw_key(site.weight)
            for index in self.draft.layers(raw):
                for family in self.draft.of(raw):
                    if family.power == 0 and not all(
                        torch.equal(self._compose(family, first, index), self._compose(family, name, index))
                        for name in dict.fromkeys(names)
                    ):
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

    def _norm(self, stem: str) -> None:
        """A norm whose scale is a vector of ours, or stays what it is."""
        weight = f"{stem}weight"
        if raw_key(weight) not in self.draft.reader.tensors:
            self._thaw(weight)
            return
        self.draft.drop(weight)  # the guard
        self.draft.drop(raw_key(weight))
        vector = f"{stem}gamma"
        self._set_norm(
            weight,
            raw_key(weight),
            f"{stem}bias",
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
        if len(self.draft.of(weight)) == 1 < len(self.draft.dense_families):
            size = self.draft.reader.tensors[weight].shape[-1]
            self._put_norm(weight, weight, size, lambda _, index: self._own(weight, index))

    def _own(self, weight: str, index: tuple[int, ...]) -> torch.Tensor:
        return self.draft.read_layer(Family("", 0), weight, index)

    def _put_norm(self, weight: str, stored: str, size: int, make) -> None:
        """Values and zero averages, in every family that the optimizer has for norms."""
        source = self.draft.reader.tensors[stored]
        shape = source.shape
        for family in self.draft.dense_families:
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
