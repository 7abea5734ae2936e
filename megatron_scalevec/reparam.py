"""Reparameterizations of a scale vector: how γ is stored, and what that makes of weight decay.

A reparameterization changes no value and no function, only the path of optimization (arXiv 2605.26895: a
global magnitude times a direction makes the preconditioner more anisotropic). Each is one small class,
registered by name. All of them store 1-D tensors, compose γ from them, and decompose any γ into them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["Part", "Reparameterization", "get_reparameterization", "register", "registered"]


@dataclass(frozen=True)
class Part:
    """One stored tensor.

    ``suffix``: appended to the vector's name with an underscore; empty for γ itself. ``scalar``: one
    element instead of the vector's size. ``direction``: only its direction matters, so decay, which would
    change its length alone, is never applied to it.
    """

    suffix: str
    scalar: bool = False
    direction: bool = False


class Reparameterization(ABC):
    """γ as a function of stored parts."""

    name: str
    parts: tuple[Part, ...]

    @abstractmethod
    def compose(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """γ [..., n] from the parts by suffix, differentiable, in the parts' dtype.

        Vectors lie along the last axis; what is before it numbers several of them.
        """

    @abstractmethod
    def decompose(self, gamma: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parts that compose to ``gamma``. For γ = 1 every part is exactly one."""


_REGISTRY: dict[str, Reparameterization] = {}


def register(reparameterization: Reparameterization) -> Reparameterization:
    """Make a reparameterization known under its name.

    Raises:
        ValueError: The name is taken, or two parts share a suffix.
    """
    if reparameterization.name in _REGISTRY:
        raise ValueError(f"a reparameterization named {reparameterization.name!r} exists already")
    suffixes = [part.suffix for part in reparameterization.parts]
    if len(set(suffixes)) != len(suffixes):
        raise ValueError(f"{reparameterization.name!r} has two parts of one suffix: {suffixes}")
    _REGISTRY[reparameterization.name] = reparameterization
    return reparameterization


def get_reparameterization(name: str) -> Reparameterization:
    """The registered one; KeyError for an unknown name."""
    return _REGISTRY[name]


def registered() -> list[str]:
    """All names."""
    return list(_REGISTRY)


class Plain(Reparameterization):
    """γ itself. Decay pulls every entry toward 0."""

    name = "none"
    parts = (Part(""),)

    def compose(self, parts):
        return parts[""]

    def decompose(self, gamma):
        return {"": gamma.clone()}


class Product(Reparameterization):
    """γ = β · α, a scalar times a vector: the paper's own form as the accounts give it.

    Both factors decay, so γ itself is pulled toward 0 about twice as fast as by its plain form. A plain γ
    is set as β = 1, α = γ, which is exact. α = 0 gives γ = 0, and α still has a gradient.
    """

    name = "product"
    parts = (Part("beta", scalar=True), Part("alpha"))

    def compose(self, parts):
        return parts["beta"] * parts["alpha"]

    def decompose(self, gamma):
        return {"beta": gamma.new_ones(1), "alpha": gamma.clone()}


class Unit(Reparameterization):
    """γ = g · u / rms(u): ``magnitude`` g is the rms of γ, ``direction`` u counts by its direction alone.

    Only g decays. A direction of zero has none: it composes to γ = 0 with finite gradients, and is the one
    case in which u's length returns, at the next step. γ = 0 is set as g = 0 with an even direction. The
    way back from a γ is exact up to rounding.
    """

    name = "unit"
    parts = (Part("magnitude", scalar=True), Part("direction", direction=True))

    def compose(self, parts):
        u = parts["direction"]
        # The largest entry is divided out first, so that squares neither overflow nor vanish. It cancels,
        # hence no gradient goes through it.
        largest = u.detach().abs().amax(-1, keepdim=True)
        v = u / torch.where(largest > 0, largest, torch.ones_like(largest))
        mean_square = v.square().mean(-1, keepdim=True)
        rms = torch.where(largest > 0, mean_square, torch.ones_like(mean_square)).sqrt()
        return parts["magnitude"] * (v / rms)

    def decompose(self, gamma):
        # Without looking at values: models are also built on the meta device.
        largest = gamma.abs().max()
        one = torch.ones_like(largest)
        scaled = gamma / torch.where(largest > 0, largest, one)
        rms = scaled.square().mean().sqrt()
        even = torch.ones_like(gamma)
        direction = torch.where(largest > 0, scaled / torch.where(largest > 0, rms, one), even)
        return {"magnitude": (largest * rms).reshape(1), "direction": direction}


register(Plain())
register(Product())
register(Unit())
