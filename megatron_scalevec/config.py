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
    "BOOLEAN_IN_YAML",
    "BRANCHES",
    "BRANCH_NAMES",
    "COMPONENTS",
    "DEFAULT_SITES",
    "EXECUTIONS",
    "EXPERTS",
    "PLACEMENTS",
    "REPARAMS",
    "SITES",
    "STRATEGIES",
    "VECTOR_DTYPES",
    "V_NORM_CLASSES",
    "WEIGHT_DECAYS",
    "ScaleVecConfig",
    "Strategy",
    "choose",
]

BRANCHES = {
    "shared": "all branches of a norm share one input scale: the norm's own γ",
    "split": "every branch has its own input scale",
}
EXPERTS = {
    "per-expert": "every routed expert has its own scale vectors",
    "shared": "the routed experts of a layer have one set of scale vectors",
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
    "auto": "optimizer where it is proven, else autograd; a resumed run keeps its mode",
    "autograd": "W ⊙ (γ_out γ_inᵀ) is formed in every forward pass",
    "optimizer": "the live weight is W ⊙ (γ_out γ_inᵀ); W is the optimizer's fp32 master",
}
SITES = {
    "attention": "the pre-attention norm and the maps q, k, v that it feeds, or the down-projections of "
    "latent attention",
    "latent": "the norms on the compressed latents of latent attention, and the up-projections",
    "mlp": "the pre-MLP norm and the maps gate, up that it feeds; with experts also the router, and the "
    "projection to their latents",
    "mamba": "the norm before a Mamba layer's in-projection, and the gated norm before its out-projection",
    "delta": "the norm before a gated delta net's in-projection, and the norm over heads before its "
    "out-projection",
    "mtp": "the norms of the multi-token-prediction block itself",
    "head": "the final norm, which feeds the output head",
    "projections": "the maps o and down (of experts as well, and all of experts on latents), which no norm "
    "feeds; only when named",
}
DEFAULT_SITES = ("attention", "latent", "mlp", "mamba", "delta", "mtp", "head")
BRANCH_NAMES = {
    "attention": ("q", "output_gate", "k", "v", "q_down", "kv_down", "k_rope"),
    "latent": ("q_up", "k_up", "v_up"),
    "mlp": (
        "gate",
        "up",
        "router",
        "expert_gate",
        "expert_up",
        "shared_gate",
        "shared_up",
        "shared_expert_gate",
        "latent_down",
    ),
    "mamba": ("z", "x", "B", "C", "dt", "out"),
    "delta": ("delta_q", "delta_k", "delta_v", "delta_z", "delta_b", "delta_a"),
    # Experts on latent tokens: gate and up are fed by the latent projection, not by the norm.
    "projections": ("o", "down", "expert_gate", "expert_up", "expert_down", "latent_up", "shared_down"),
}
V_NORM_CLASSES = {
    "input": "as an Input-Norm: attention mixes v linearly and the o map can absorb it",
    "output": "as an Output-Norm",
}
VECTOR_DTYPES = {
    "model": "the model's: bf16 or fp16 with fp32 masters in the optimizer",
    "fp32": "float32 in the model as well",
}
LR_ROLES = ("input", "output", "direction")


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
    "experts": EXPERTS,
    "placement": PLACEMENTS,
    "reparam": REPARAMS,
    "weight_decay": WEIGHT_DECAYS,
    "decay_v_norm": V_NORM_CLASSES,
    "vector_dtype": VECTOR_DTYPES,
    "execution": EXECUTIONS,
}


BOOLEAN_IN_YAML = "YAML reads yes, no, on and off as true and false: put a name in quotes."


def choose(what: str, value: str, valid: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``valid``.

    Raises:
        ScaleVecError: It is not; the message lists the valid names and points at the nearest one.
    """
    names = list(valid)
    if value in names:
        return value
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if isinstance(value, bool):
        hint = f" {BOOLEAN_IN_YAML}"
    raise ScaleVecError(f"unknown {what} {value!r}: choose one of {', '.join(names)}.{hint}")


def _names(component: str, value: str | Iterable[str]) -> tuple[str, ...]:
    """Names from a comma-separated string, or from any iterable of them."""
    if not isinstance(value, Iterable):
        raise ScaleVecError(f"{_flag(component)} is {value!r}: give names, separated by commas.")
    items = value.split(",") if isinstance(value, str) else map(str, value)
    return tuple(item.strip() for item in items if item.strip())


def _flag(component: str) -> str:
    return "--scalevec-" + component.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class ScaleVecConfig:
    """A strategy and whatever of it the user overrides.

    The components default to None, which means "as the strategy says"; after construction every field
    holds its resolved value, so two configurations are equal exactly when they build the same thing
    under the same name.

    Raises:
        ScaleVecError: An unknown name, or a component that contradicts the strategy.
    """

    strategy: str = "stock"
    """A key of :data:`STRATEGIES`."""
    branches: str | None = None
    """A key of :data:`BRANCHES`; None where the strategy has no scale vectors."""
    experts: str | None = None
    """A key of :data:`EXPERTS`: whose the vectors of routed experts are."""
    placement: str | None = None
    """A key of :data:`PLACEMENTS`; None where the strategy has no scale vectors."""
    reparam: str | None = None
    """A key of :data:`REPARAMS`; None where the strategy has no scale vectors."""
    weight_decay: str | None = None
    """A key of :data:`WEIGHT_DECAYS`."""
    sites: tuple[str, ...] | None = None
    """Keys of :data:`SITES`: where the strategy acts. Norms elsewhere stay exactly stock."""
    decay_v_norm: str | None = None
    """A key of :data:`V_NORM_CLASSES`: the weight-decay class of the scale behind the v norm; None where
    there is no such norm."""
    vector_dtype: str | None = None
    """A key of :data:`VECTOR_DTYPES`: how the vectors are stored in a bf16 or fp16 model."""
    branches_off: tuple[str, ...] | None = None
    """Branches (:data:`BRANCH_NAMES`) without scale vectors of their own: their scale is one."""
    lr_mult: str | None = None
    """Learning-rate multipliers by role, ``input=2,output=0.5``; None for one everywhere."""
    execution: str | None = field(default=None, compare=False)
    """A key of :data:`EXECUTIONS`. Not part of equality: both modes compute the same function."""

    def __post_init__(self) -> None:
        choose("strategy", self.strategy, STRATEGIES)
        preset = STRATEGIES[self.strategy]
        given = {name: getattr(self, name) for name in COMPONENTS}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            choose(f"value for {_flag(name)}", value, COMPONENTS[name])
        placement = given.get("placement", preset.placement)
        defaults = {
            "branches": preset.branches,
            "experts": "per-expert",
            "placement": preset.placement,
            "reparam": preset.reparam,
            "weight_decay": preset.weight_decay,
            "decay_v_norm": "input" if placement == "dual-norm" else None,
            "vector_dtype": "model",
            "execution": "auto",
        }
        # Saying what holds anyway contradicts nothing, so a resolved configuration resolves to itself.
        given = {name: value for name, value in given.items() if value != defaults[name]}
        object.__setattr__(self, "sites", self._resolve_sites())
        self._refuse_contradictions(preset, given)
        for name, default in defaults.items():
            object.__setattr__(self, name, given.get(name, default))
        object.__setattr__(self, "branches_off", self._resolve_branches_off())
        object.__setattr__(self, "lr_mult", self._resolve_lr_mult())
        self._refuse_without_effect(given)

    def _refuse_without_effect(self, given: Mapping[str, str]) -> None:
        """A flag that could change nothing is a misunderstanding, not a preference."""
        if "decay_v_norm" in given and self.placement != "dual-norm":
            raise ScaleVecError(
                f"--scalevec-decay-v-norm has no effect with --scalevec-placement {self.placement}: only "
                "dual-norm has a norm on v; drop the flag."
            )
        if "decay_v_norm" in given and self.weight_decay != "split" and not self.lr_mult:
            raise ScaleVecError(
                f"--scalevec-decay-v-norm has no effect with --scalevec-weight-decay {self.weight_decay}, "
                "which does not tell the classes apart; drop one of the two."
            )
        if "vector_dtype" in given and self.placement is None:
            raise ScaleVecError(
                f"--scalevec-vector-dtype has no effect with --scalevec-strategy {self.strategy}, "
                "which leaves no scale vectors; drop the flag."
            )
        if self.decay_alone and self.weight_decay in ("stock", "none"):
            raise ScaleVecError(
                f"--scalevec-strategy {self.strategy} has no effect here: with these components it only lets "
                "the norms' own scales decay, and --scalevec-weight-decay "
                f"{self.weight_decay} does not; drop one of the two."
            )
        self._refuse_shared_experts_without_effect()
        normalized = {"q", "k", "v"} - set(self.branches_off)
        if self.placement == "dual-norm" and ("attention" not in self.sites or not normalized):
            raise ScaleVecError(
                "--scalevec-placement dual-norm has its norms on q, k and v, and --scalevec-sites or "
                "--scalevec-branches-off leave none of them: use --scalevec-placement dual."
            )
        if "decay_v_norm" in given and "v" in self.branches_off:
            raise ScaleVecError(
                "--scalevec-decay-v-norm has no effect with --scalevec-branches-off v; drop one of the two."
            )
        for role, needed in {
            "output": self.placement == "dual-norm",
            "direction": self.reparam == "unit",
        }.items():
            if role in self.lr_multipliers and not needed:
                raise ScaleVecError(
                    f"--scalevec-lr-mult {role}=... has no effect here: "
                    + (
                        "the class 'output' holds the scales of q and k norms, which dual-norm placement "
                        "brings; γ_out on a linear is of class 'input'."
                        if role == "output"
                        else "only --scalevec-reparam unit has directions."
                    )
                )

    def _refuse_shared_experts_without_effect(self) -> None:
        if self.experts != "shared":
            return
        own = self.branches == "split" or self.has_output_scales
        at_mlp = own and "mlp" in self.sites
        if self.placement is None or not (at_mlp or "projections" in self.sites):
            raise ScaleVecError(
                "--scalevec-experts shared has no effect here: the routed experts get no scale vectors of "
                "their own with these branches, placement and sites; drop the flag."
            )

    def _refuse_contradictions(self, preset: Strategy, given: Mapping[str, str]) -> None:
        if self.strategy == "stock":
            extra = [*given, *(name for name in ("branches_off", "lr_mult") if getattr(self, name))]
            if self.sites != DEFAULT_SITES:
                extra.append("sites")
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
            for name in ("branches_off", "lr_mult"):
                if getattr(self, name):
                    raise ScaleVecError(
                        f"{_flag(name)} contradicts --scalevec-strategy none, which leaves no scale "
                        "vectors; drop one of the two."
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
            return DEFAULT_SITES
        names = _names("sites", self.sites)
        if not names:
            raise ScaleVecError(
                f"--scalevec-sites is empty: give one or more of {', '.join(SITES)}, separated by commas."
            )
        for name in names:
            choose("site", name, SITES)
        if self.strategy == "none" and "projections" in names:
            raise ScaleVecError(
                "--scalevec-sites projections contradicts --scalevec-strategy none: no norm feeds those "
                "maps, so there is no scale to remove."
            )
        return tuple(name for name in SITES if name in names)

    def _resolve_branches_off(self) -> tuple[str, ...]:
        names = _names("branches_off", self.branches_off or ())
        valid = list(dict.fromkeys(name for group in BRANCH_NAMES.values() for name in group))
        for name in names:
            choose("branch", name, valid)
        if names and self.branches == "shared":
            raise ScaleVecError(
                f"--scalevec-branches-off {','.join(names)} contradicts --scalevec-branches shared, where "
                "branches have no input scale of their own; use split."
            )
        return tuple(name for name in valid if name in names)

    def _resolve_lr_mult(self) -> str | None:
        multipliers = {}
        for item in _names("lr_mult", self.lr_mult or ()):
            role, _, text = item.partition("=")
            role = choose("role", role.strip(), LR_ROLES)
            if role in multipliers:
                raise ScaleVecError(f"--scalevec-lr-mult gives {role} twice; give it once.")
            try:
                factor = float(text)
            except ValueError:
                factor = 0.0
            if not 0 < factor < float("inf"):
                raise ScaleVecError(
                    f"--scalevec-lr-mult {item!r}: give ROLE=FACTOR with a positive factor, for example "
                    "input=2."
                )
            multipliers[role] = factor
        factors = {role: multipliers[role] for role in LR_ROLES if multipliers.get(role, 1.0) != 1.0}
        # Without a digit lost, and whole numbers as people write them.
        items = [f"{role}={repr(factor).removesuffix('.0')}" for role, factor in factors.items()]
        return ",".join(items) or None

    @property
    def lr_multipliers(self) -> dict[str, float]:
        """Role to learning-rate multiplier, those other than one."""
        items = (item.split("=") for item in _names("lr_mult", self.lr_mult or ()))
        return {role: float(factor) for role, factor in items}

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
    def owns_vectors(self) -> bool:
        """Whether parameters are added; otherwise all scales are the norms' own or none."""
        own = self.removes_norm_scale or self.has_output_scales or "projections" in self.sites
        return self.placement is not None and own

    @property
    def decay_alone(self) -> bool:
        """Whether weight decay of the norms' own scales is all that differs from stock."""
        return self.placement is not None and not self.owns_vectors and not self.lr_mult

    @property
    def plain(self) -> bool:
        """Whether a norm's own parameter, as it stands, can be the scale vector."""
        return self.reparam == "none" and self.vector_dtype == "model"

    @property
    def removes_norm_scale(self) -> bool:
        """Whether the γ of the norms at the attention and mlp sites is fixed at one.

        True for the ablation that removes it and where the linears carry what takes its place. A shared
        γ in its plain form stays in the norm; in another form it moves to the linear like any other.
        """
        stays = self.has_input_scales and self.branches == "shared" and self.plain
        return self.active and not stays

    @classmethod
    def from_namespace(cls, args: Any) -> ScaleVecConfig:
        """Read ``scalevec_*`` attributes, as Megatron's arguments and checkpoints hold them.

        A namespace without them (a stock checkpoint, a YAML without the keys) gives ``stock``.
        """
        values = {f.name: getattr(args, f"scalevec_{f.name}", None) for f in fields(cls)}
        if values["strategy"] is None:
            values["strategy"] = "stock"
        for name in ("sites", "branches_off"):
            if values[name] is not None:
                values[name] = _names(name, values[name])
        return cls(**values)

    def as_arguments(self) -> dict[str, str]:
        """The ``scalevec_*`` attributes that :meth:`from_namespace` turns into this configuration again.

        What the strategy says anyway is left open, as on a command line.
        """
        preset = ScaleVecConfig(strategy=self.strategy)
        given = {"scalevec_strategy": self.strategy}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value != getattr(preset, name):
                given[f"scalevec_{name}"] = ",".join(value) if isinstance(value, tuple) else value
        return given

    def describe(self) -> str:
        """One line: the strategy and its resolved components."""
        if not self.active:
            return "stock (nothing changed)"
        if self.placement is None:
            parts = "Input-Norm γ removed"
        else:
            parts = f"branches {self.branches}, placement {self.placement}, reparam {self.reparam}"
        if self.experts == "shared":
            parts += ", experts shared"
        if self.branches_off:
            parts += f", without {'+'.join(self.branches_off)}"
        parts += f", weight decay {self.weight_decay}"
        if self.placement == "dual-norm" and self.decay_v_norm != "input":
            parts += f" (v norm as {self.decay_v_norm})"
        if self.lr_mult:
            parts += f", learning rate x {self.lr_mult}"
        if self.vector_dtype != "model":
            parts += f", vectors in {self.vector_dtype}"
        return f"{self.strategy}: {parts}, sites {'+'.join(self.sites)}"
