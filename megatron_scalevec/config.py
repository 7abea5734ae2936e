"""Which scale vectors a run gets: named strategies, their components, and the rules between them.

The vocabulary is that of arXiv 2605.26895 as used throughout this package:

* an *Input-Norm* is a norm whose output goes straight into linear maps,
* a *branch* is one such map (q, k, v; gate, up),
* the *placement* says on which side of the map a branch's scale vector acts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "BRANCHES",
    "COMPONENTS",
    "EXECUTIONS",
    "PLACEMENTS",
    "REPARAMS",
    "SITES",
    "STRATEGIES",
    "WEIGHT_DECAYS",
    "ScaleVecConfig",
    "Strategy",
    "choose",
]

BRANCHES = {
    "shared": "all branches of a norm share one input scale: the norm's own γ",
    "split": "every branch has its own input scale",
}
PLACEMENTS = {
    "input": "W (γ_in ⊙ x̂)",
    "output": "γ_out ⊙ (W x̂)",
    "dual": "γ_out ⊙ (W (γ_in ⊙ x̂))",
    "dual-norm": "γ_out ⊙ Norm(W (γ_in ⊙ x̂))",
}
REPARAMS = {
    "none": "γ itself",
    "product": "γ = β · α, a scalar times a vector",
    "unit": "γ = g · u / rms(u), a magnitude times a direction",
}
WEIGHT_DECAYS = {
    "split": "scale vectors of Input-Norms decay, those of Output-Norms do not",
    "stock": "as Megatron does: no one-dimensional parameter decays",
    "all": "every scale vector decays, q/k norms included",
    "none": "no scale vector decays",
}
EXECUTIONS = {
    "auto": "the fastest mode that is proven for the run",
    "autograd": "W ⊙ (γ_out γ_inᵀ) is formed in every forward pass",
    "optimizer": "the live weight is W ⊙ (γ_out γ_inᵀ); W is the optimizer's fp32 master",
}
SITES = {
    "attention": "the pre-attention norm and the maps q, k, v that it feeds",
    "mlp": "the pre-MLP norm and the maps gate, up that it feeds",
    "head": "the final norm, which feeds the output head",
}

# Values of the method that this version does not build yet. They are known names, so the message says
# "not yet", not "unknown".
_NOT_YET = {
    "strategy": ("dnp", "or", "unified", "unified-foldable"),
    "placement": ("dual-norm",),
    "reparam": ("product", "unit"),
    "execution": ("optimizer",),
}


@dataclass(frozen=True)
class Strategy:
    """One row of the table of named strategies.

    ``placement`` is None for ``stock`` (nothing is touched) and for ``none`` (the Input-Norms lose
    their γ and get nothing in its place).
    """

    summary: str
    branches: str | None = None
    placement: str | None = None
    reparam: str | None = None
    weight_decay: str = "stock"


STRATEGIES: Mapping[str, Strategy] = {
    "stock": Strategy("the plugin changes nothing"),
    "none": Strategy("the γ of every Input-Norm is removed (the necessity ablation)"),
    "iwd": Strategy("weight decay on the γ of Input-Norms", "shared", "input", "none", "split"),
    "hg": Strategy("a γ of its own for every branch", "split", "input", "none", "split"),
    "post-qkv": Strategy("γ behind each map", "split", "output", "none", "split"),
    "dp": Strategy("γ on both sides of each map", "split", "dual", "none", "split"),
    "dnp": Strategy("both sides and a norm between", "split", "dual-norm", "none", "split"),
    "or": Strategy("γ as magnitude times direction", "shared", "input", "product", "split"),
    "unified": Strategy("the paper's strategy", "split", "dual-norm", "product", "split"),
    "unified-foldable": Strategy("unified without the norm between", "split", "dual", "product", "split"),
}

COMPONENTS: Mapping[str, Mapping[str, str]] = {
    "branches": BRANCHES,
    "placement": PLACEMENTS,
    "reparam": REPARAMS,
    "weight_decay": WEIGHT_DECAYS,
    "execution": EXECUTIONS,
}


def choose(what: str, value: str, valid: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``valid``.

    Raises:
        ScaleVecError: It is not; the message lists the valid names and points at the nearest one.
    """
    names = list(valid)
    if value in names:
        return value
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ScaleVecError(f"unknown {what} {value!r}: choose one of {', '.join(names)}.{hint}")


def _flag(component: str) -> str:
    return "--scalevec-" + component.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class ScaleVecConfig:
    """A strategy and whatever of it the user overrides.

    The components default to None, which means "as the strategy says"; after construction every field
    holds its resolved value, so two configurations are equal exactly when they build the same thing
    under the same name.

    Raises:
        ScaleVecError: An unknown name, a value this version does not build yet, or a component that
            contradicts the strategy.
    """

    strategy: str = "stock"
    """A key of :data:`STRATEGIES`."""
    branches: str | None = None
    """A key of :data:`BRANCHES`; None where the strategy has no scale vectors."""
    placement: str | None = None
    """A key of :data:`PLACEMENTS`; None where the strategy has no scale vectors."""
    reparam: str | None = None
    """A key of :data:`REPARAMS`; None where the strategy has no scale vectors."""
    weight_decay: str | None = None
    """A key of :data:`WEIGHT_DECAYS`."""
    sites: tuple[str, ...] | None = None
    """Keys of :data:`SITES`: where the strategy acts. Norms elsewhere stay exactly stock."""
    execution: str | None = field(default=None, compare=False)
    """A key of :data:`EXECUTIONS`. Not part of equality: both modes compute the same function."""

    def __post_init__(self) -> None:
        choose("strategy", self.strategy, STRATEGIES)
        self._refuse_unbuilt("strategy", self.strategy)
        preset = STRATEGIES[self.strategy]
        given = {name: getattr(self, name) for name in COMPONENTS}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            choose(f"value for {_flag(name)}", value, COMPONENTS[name])
            self._refuse_unbuilt(name, value)
        self._refuse_contradictions(preset, given)
        resolve = {
            "branches": preset.branches,
            "placement": preset.placement,
            "reparam": preset.reparam,
            "weight_decay": preset.weight_decay,
            "execution": "auto",
        }
        for name, default in resolve.items():
            object.__setattr__(self, name, given.get(name, default))
        object.__setattr__(self, "sites", self._resolve_sites())

    def _refuse_unbuilt(self, what: str, value: str) -> None:
        if value not in _NOT_YET.get(what, ()):
            return
        valid = {"strategy": STRATEGIES, **COMPONENTS}[what]
        built = [name for name in valid if name not in _NOT_YET[what]]
        raise ScaleVecError(
            f"{_flag(what)} {value} is part of the method, but this version does not build it yet; "
            f"available now: {', '.join(built)}."
        )

    def _refuse_contradictions(self, preset: Strategy, given: Mapping[str, str]) -> None:
        if self.strategy == "stock":
            extra = [*given, *(["sites"] if self.sites is not None else [])]
            if extra:
                raise ScaleVecError(
                    f"{', '.join(map(_flag, extra))} needs a strategy to change: 'stock' (the default) "
                    "leaves the model as it is; add --scalevec-strategy, for example hg."
                )
            return
        if self.strategy == "none":
            for name in ("branches", "placement", "reparam"):
                if name in given:
                    raise ScaleVecError(
                        f"{_flag(name)} {given[name]} contradicts --scalevec-strategy none, which "
                        "removes the scale vectors; drop one of the two."
                    )
            if given.get("weight_decay", "stock") != "stock":
                raise ScaleVecError(
                    f"--scalevec-weight-decay {given['weight_decay']} contradicts "
                    "--scalevec-strategy none, which leaves no vector to decay; drop one of the two."
                )
        branches = given.get("branches", preset.branches)
        placement = given.get("placement", preset.placement)
        if branches == "shared" and placement == "output":
            raise ScaleVecError(
                "--scalevec-branches shared contradicts --scalevec-placement output: an output scale "
                "has one entry per output channel and every channel belongs to one branch, so there is "
                "nothing to share; use split, or placement input or dual."
            )

    def _resolve_sites(self) -> tuple[str, ...]:
        if self.sites is None:
            return tuple(SITES)
        names = self.sites
        if isinstance(names, str):
            names = tuple(part.strip() for part in names.split(",") if part.strip())
        if not names:
            raise ScaleVecError(
                f"--scalevec-sites is empty: give one or more of {', '.join(SITES)}, separated by commas."
            )
        for name in names:
            choose("site", name, SITES)
        return tuple(name for name in SITES if name in names)

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        return self.strategy != "stock"

    @property
    def has_input_scales(self) -> bool:
        """Whether γ_in acts somewhere, in a linear or as the norm's own γ."""
        return self.placement in ("input", "dual", "dual-norm")

    @property
    def has_output_scales(self) -> bool:
        """Whether γ_out acts somewhere."""
        return self.placement in ("output", "dual", "dual-norm")

    @property
    def removes_norm_scale(self) -> bool:
        """Whether the γ of the norms at the sites is fixed at one.

        True for the ablation that removes it and where the linears carry what takes its place.
        """
        return self.active and not (self.has_input_scales and self.branches == "shared")

    @classmethod
    def from_namespace(cls, args: Any) -> ScaleVecConfig:
        """Read ``scalevec_*`` attributes, as Megatron's arguments and checkpoints hold them.

        A namespace without them (a stock checkpoint, a YAML without the keys) gives ``stock``.
        """
        values = {f.name: getattr(args, f"scalevec_{f.name}", None) for f in fields(cls)}
        values["strategy"] = values["strategy"] or "stock"
        if isinstance(values["sites"], list):
            values["sites"] = tuple(values["sites"])
        return cls(**values)

    def describe(self) -> str:
        """One line: the strategy and its resolved components."""
        if not self.active:
            return "stock (nothing changed)"
        if self.placement is None:
            parts = "Input-Norm γ removed"
        else:
            parts = f"branches {self.branches}, placement {self.placement}, reparam {self.reparam}"
        return f"{self.strategy}: {parts}, weight decay {self.weight_decay}, sites {'+'.join(self.sites)}"
