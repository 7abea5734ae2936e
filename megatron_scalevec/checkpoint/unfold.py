"""The way in: a stock checkpoint becomes the start of a run with scale vectors.

What :func:`megatron_scalevec.convert.apply_scale_vectors` does to a model, done to its tensors: γ of a norm
is copied to the branches behind it and fixed at one in the norm; every other scale starts at one.

Optimizer: W keeps its averages. At the start γ_in = γ and γ_out = 1, so the gradient of W is what it was:
∂L/∂W = ∂L/∂W_eff ⊙ γ in both models. A LayerNorm's bias becomes β/γ and its gradient γ ∂L/∂β, so its averages
are multiplied by γ and γ². Those of new vectors start at zero, those of retired norms are left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import torch

from megatron_scalevec.checkpoint.draft import Draft, Family
from megatron_scalevec.checkpoint.keys import raw_key, stacked_axes
from megatron_scalevec.checkpoint.store import Box
from megatron_scalevec.checkpoint.tables import (
    Dimensions,
    Site,
    find_linears,
    find_norms,
    of_experts,
    sites_by_norm,
)
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.decay import decays
from megatron_scalevec.decisions import SHARED, LinearPlan, norm_keeps_scale, plan_linear
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.reparam import get_reparameterization

__all__ = ["Unfolding"]


class Unfolding:
    """Turns a draft of a stock checkpoint into one of a strategy.

    After construction, ``changes_function`` says whether the strategy computes something else than the stock
    model from its start on, as dual-norm does where norms are added.

    Args:
        draft: Of a stock checkpoint.
        config: An active strategy.

    Raises:
        ScaleVecError: The strategy would drop what the norms have learned, or the model has nothing where
            it acts.
    """

    def __init__(self, draft: Draft, config: ScaleVecConfig) -> None:
        self.draft = draft
        self.config = config
        self.dimensions = Dimensions.of(draft.args)
        self.changes_function = False
        self._without_decay: set[bool] = set()  # as Draft.set_decay_groups takes it
        self._touched = False
        self._known: set[str] = set()  # 1-D parameters whose decay has been looked at
        keys = draft.model_keys
        for key in keys:
            if re.search(r"\.(self_attention|mlp)\.weight$", key):
                raise ScaleVecError(
                    f"{key} is a linear in the place of attention or an MLP (replace_with_linear), on which "
                    "no run builds scale vectors: one with a strategy would stop at it."
                )
        self._joined = bool(getattr(draft.args, "mla_down_proj_fusion", False))
        if self._joined and config.branches == "shared" and "attention" in config.sites:
            if config.removes_norm_scale and config.has_input_scales:
                raise ScaleVecError(
                    "one down-projection for queries, keys and values (--mla-down-proj-fusion) holds a scale "
                    f"that its branches share ({config.describe()}) by itself, where two leave it to the "
                    "norm: unfold with --branches split."
                )
        # Read before anything is changed.
        for sites in sites_by_norm(site for site in find_linears(keys) if site.kind.site in config.sites):
            self._linears(sites)
        for kind, path in find_norms(keys):
            if kind.site in config.sites:
                self._norm_site(path, needs_sum=kind.needs_sum)
        if not self._touched:
            raise ScaleVecError(
                f"the checkpoint has nothing at the sites {', '.join(config.sites)}, so nothing would change."
            )
        self._look_at_others()
        draft.set_decay_groups(without_decay=self._without_decay)
        for key in [key for key in vars(draft.args) if key.startswith("scalevec_")]:
            delattr(draft.args, key)
        for key, value in config.as_arguments().items():
            setattr(draft.args, key, value)

    def _linears(self, sites: list[Site]) -> None:
        """All linears that one norm feeds, and the norm."""
        plans = [self._linear(site) for site in sites]
        # Of a linear that is stored in parts, every part is raw where one has vectors.
        wholes = [site.whole_paths[-1] if self._joined else site.path for site in sites]
        raw = {whole for whole, (_, is_raw) in zip(wholes, plans) if is_raw}
        for site, whole in zip(sites, wholes):
            if whole in raw:
                self.draft.make_raw(site.weight)
        norm = sites[0].norm
        if norm is None:
            return
        if plans[0][0].retires_norm:
            self._retire(f"{norm}weight", f"{norm}bias")
        elif sites[0].kind.norm_feeds_others:
            self._keep_or_move(norm, "input", needs_sum=False)
        else:
            self._note(f"{norm}weight", "input", is_vector=True)

    def _linear(self, site: Site) -> tuple[LinearPlan, bool]:
        """Add the vectors of a linear. Returns its plan, and whether its weight is raw from now on."""
        weight = site.weight
        rows = self.draft.reader.tensors[weight].shape[-2]
        row_map = site.kind.rows(self.dimensions, rows)
        if row_map.branch_of_row.numel() != rows:
            raise ScaleVecError(
                f"{weight} has {rows} rows, and the arguments in the checkpoint speak of "
                f"{row_map.branch_of_row.numel()}: they do not belong together."
            )
        fed = site.kind.fed_by_norm
        plan = plan_linear(
            self.config,
            row_map.branches,
            fed_by_norm=fed,
            zero_centered=self.dimensions.zero_centered,
            has_heads=site.kind.has_heads,
            norm_feeds_others=site.kind.norm_feeds_others,
            norm_fits=site.kind.norm_fits,
        )
        self._touched = True
        if plan.retires_norm:
            self._require_kept(site, plan, row_map.branches)
        owner, like = self._owner(site)
        for branch in plan.in_branches:
            self._add_vector(
                f"{owner}.gamma_in_{branch}",
                self.draft.reader.tensors[weight].shape[-1],
                like,
                f"{site.norm}weight" if plan.retires_norm else None,
            )
        sizes = dict(zip(row_map.branches, row_map.sizes))
        for branch in plan.out_branches:
            self._add_vector(f"{owner}.gamma_out_{branch}", sizes[branch], like, None)
        added = [branch for branch in plan.normalized if self._normalize(site, branch)]
        return plan, plan.has_vectors or bool(added)

    def _owner(self, site: Site) -> tuple[str, str]:
        """Path of the vectors of a linear, and a weight that is stacked over layers and experts as they
        are."""
        owner = site.owner(shared=self.config.experts == "shared")
        if owner == site.path:
            return owner, site.weight
        # Vectors that all experts have in common are a part of the dense model, like the router.
        return owner, f"{owner.removesuffix('.experts')}.router.weight"

    def _require_kept(self, site: Site, plan: LinearPlan, branches: Iterable[str]) -> None:
        """A trained scale must have somewhere to go."""
        lost = [b for b in branches if SHARED not in plan.in_branches and b not in plan.in_branches]
        norm = f"{site.norm}weight"
        for index in self.draft.layers(norm):
            gamma, bias = self._gamma(Family("", 0), norm, index), f"{site.norm}bias"
            if lost and not bool((gamma == 1).all()):
                raise ScaleVecError(
                    f"{norm} holds a trained scale, which {self.config.describe()} leaves no place for on "
                    f"{', '.join(lost)}: use a strategy with input scales on all branches."
                )
            if bias in self.draft.reader.tensors and bool((gamma == 0).any()):
                if bool((self.draft.read_layer(Family("", 0), bias, index)[gamma == 0] != 0).any()):
                    raise ScaleVecError(
                        f"{bias} is not zero on a channel whose scale is, which cannot be kept: the bias is "
                        "scaled together with the norm's output from now on."
                    )

    def _norm_site(self, path: str, *, needs_sum: bool) -> None:
        weight = f"{path}.weight"
        self._touched = True
        if self.config.placement is None:
            for index in self.draft.layers(weight):
                if not bool((self._gamma(Family("", 0), weight, index) == 1).all()):
                    raise ScaleVecError(
                        f"{weight} holds a trained scale, which {self.config.strategy!r} would drop; use "
                        "another strategy."
                    )
            self._retire(weight, f"{path}.bias")
            return
        self._keep_or_move(f"{path}.", "input", needs_sum=needs_sum)

    def _keep_or_move(self, stem: str, role: str, *, needs_sum: bool) -> None:
        """An existing norm keeps its scale, or gives it to a vector of ours."""
        weight = f"{stem}weight"
        if norm_keeps_scale(
            self.config, role=role, zero_centered=self.dimensions.zero_centered, needs_sum=needs_sum
        ):
            self._note(weight, role, is_vector=True)
            return
        size = self.draft.reader.tensors[weight].shape[-1]
        self._add_vector(f"{stem}gamma", size, weight, weight, role=role)
        self._retire(weight, f"{stem}bias", raw=True)

    def _normalize(self, site: Site, branch: str) -> bool:
        """A norm behind q, k or v. Returns whether it was added, rather than found."""
        path = f"{site.attention}.{branch}_layernorm"
        is_v = branch == "v"
        role = self.config.decay_v_norm if is_v else "output"
        if f"{path}.weight" in self.draft.reader.tensors:
            self._keep_or_move(f"{path}.", role, needs_sum=is_v)
            return False
        self.changes_function = True
        like, size = f"{site.norm}weight", self.dimensions.head_dim
        keeps = norm_keeps_scale(
            self.config, role=role, zero_centered=self.dimensions.zero_centered, needs_sum=is_v
        )
        one = self._stored_one()
        weight = f"{path}.weight"
        self.draft.add_parameter(
            weight if keeps else raw_key(weight), size, like, lambda *_: one.expand(size), trained=keeps
        )
        if keeps:
            self._note(weight, role, is_vector=True)
        else:
            self.draft.add_guard(weight, like)
            self._add_vector(f"{path}.gamma", size, like, None, role=role)
        if self.dimensions.layernorm:
            self.draft.add_parameter(
                f"{path}.bias", size, like, lambda *_: torch.zeros(size), trained=not is_v
            )
            if not is_v:
                self._without_decay.add(False)
        return True

    def _add_vector(self, name: str, size: int, like: str, gamma: str | None, role: str = "input") -> None:
        """The stored parts of a vector, from a norm's γ or from ones."""
        kind = get_reparameterization(self.config.reparam)

        def part_of(suffix: str):
            def make(family: Family, index: tuple[int, ...]) -> torch.Tensor:
                start = torch.ones(size) if gamma is None else self._gamma(family, gamma, index)
                return kind.decompose(start)[suffix]

            return make

        for part in kind.parts:
            self.draft.add_parameter(
                f"{name}_{part.suffix}" if part.suffix else name,
                1 if part.scalar else size,
                like,
                part_of(part.suffix),
                dtype=torch.float32 if self.config.vector_dtype == "fp32" else None,
            )
            if not decays("direction" if part.direction else role, True, self.config.weight_decay):
                self._without_decay.add(of_experts(name))

    def _gamma(self, family: Family, key: str, index: tuple[int, ...]) -> torch.Tensor:
        """γ as it acts, whatever is stored."""
        values = self.draft.read_layer(family, key, index)
        return values + 1 if self.dimensions.zero_centered else values

    def _stored_one(self) -> torch.Tensor:
        return torch.zeros(1) if self.dimensions.zero_centered else torch.ones(1)

    def _retire(self, weight: str, bias: str, *, raw: bool = False) -> None:
        """Fix a norm's own scale at one, and divide its bias by the scale."""
        if bias in self.draft.reader.tensors:

            def divided(family: Family, values: torch.Tensor, box: Box) -> torch.Tensor:
                gamma = torch.stack([self._gamma(family, weight, index) for index in indices(box)])
                gamma = gamma.view(values.shape[: len(box.offsets) - 1] + (-1,))
                gamma = gamma[..., box.offsets[-1] : box.offsets[-1] + box.sizes[-1]]
                if family.power:
                    return values * gamma**family.power
                return values / torch.where(gamma == 0, torch.ones_like(gamma), gamma)

            self.draft.change(bias, bias, divided)
        stored = self.draft.reader.tensors[weight]
        one = self._stored_one()
        self.draft.drop(weight)
        self._known.add(weight)
        self.draft.put(
            raw_key(weight) if raw else weight,
            stored.shape,
            stored.dtype,
            lambda _: one.expand(stored.shape[-1]),
        )
        if raw:
            self.draft.add_guard(weight, weight)

    def _note(self, key: str, role: str, *, is_vector: bool) -> None:
        self._known.add(key)
        if not decays(role, is_vector, self.config.weight_decay):
            self._without_decay.add(of_experts(key))

    def _look_at_others(self) -> None:
        """One-dimensional parameters outside of the strategy: none decays, but q/k norms under ``all``."""
        for key in self.draft.model_keys:
            own_axes = len(self.draft.reader.tensors[key].shape) - stacked_axes(key)
            if key in self._known or own_axes != 1 or len(self.draft.of(key)) == 1:
                continue
            # Latent attention has a norm of that name too, on its latent.
            attention, _, norm = key.rpartition(".self_attention.")
            of_heads = f"{attention}.self_attention.linear_qkv.weight" in self.draft.reader.tensors
            is_qk_norm = of_heads and norm in ("q_layernorm.weight", "k_layernorm.weight")
            self._note(key, "output" if is_qk_norm else "stock", is_vector=False)


def indices(box: Box) -> list[tuple[int, ...]]:
    """Layers that a block of a stacked vector covers."""
    ranges = (range(start, start + size) for start, size in zip(box.offsets[:-1], box.sizes[:-1]))
    return list(itertools.product(*ranges))
