"""Arms: what is compared in a study, a named strategy with components of it changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["Arm", "read_arm", "read_arms"]

# What the study's model has: where a strategy can act, and the branches there.
_BRANCHES = {"attention": ("q", "k", "v"), "mlp": ("gate", "up"), "head": (), "projections": ("o", "down")}
# It has no experts and is float32, and both modes of execution compute the same.
_CHANGEABLE = tuple(
    field.name
    for field in dataclasses.fields(ScaleVecConfig)
    if field.name not in ("strategy", "execution", "experts", "vector_dtype")
)


@dataclass(frozen=True)
class Arm:
    """A strategy under a label, ``unified`` or ``unified+branches-off=v``."""

    label: str
    strategy: str
    changes: tuple[tuple[str, str], ...] = ()
    """Components and their values, as in the flags without ``--scalevec-``."""

    def config(self) -> ScaleVecConfig:
        """What its runs are configured with.

        Raises:
            ScaleVecError: There is no such strategy, or the components contradict it or each other.
        """
        return ScaleVecConfig(
            strategy=self.strategy, **{name.replace("-", "_"): value for name, value in self.changes}
        )

    def build(self) -> tuple[Any, ...]:
        """What tells its model and its training from other arms', whatever they are called."""
        config = self.config()
        components = {name: getattr(config, name) for name in _CHANGEABLE}
        components["sites"] = tuple(site for site in config.sites if site in _BRANCHES)
        # With a placement the components say everything; stock and none differ in their names alone.
        return (*components.values(), None if config.placement else config.strategy)

    def flags(self) -> dict[str, str]:
        """Megatron's options without their dashes, those beside ``scalevec-strategy``."""
        return {f"scalevec-{name}": value for name, value in self.changes}


def read_arm(text: str) -> Arm:
    """Read ``STRATEGY[+COMPONENT=VALUE]...``.

    Raises:
        ScaleVecError: No such strategy or component, or they contradict each other.
    """
    strategy, *parts = (part.strip() for part in text.split("+"))
    changes = {}
    for part in parts:
        name, equals, value = part.partition("=")
        component = name.replace("-", "_")
        if not equals or not value or component not in _CHANGEABLE or len(part.split()) > 1:
            names = ", ".join(known.replace("_", "-") for known in _CHANGEABLE)
            raise ScaleVecError(
                f"{text!r}: {part!r} is no change of a strategy; give COMPONENT=VALUE with one of {names}, "
                "several values with a slash between them."
            )
        if component in changes:
            raise ScaleVecError(f"{text!r} changes {name} twice; give it once.")
        # A comma ends an arm on the command line.
        changes[component] = value.replace("/", ",")
    given = tuple((name.replace("_", "-"), value) for name, value in changes.items())
    arm = Arm("+".join([strategy, *parts]), strategy, given)
    try:
        config = arm.config()
        same = bool(parts) and arm.build() == Arm(strategy, strategy).build()
    except ScaleVecError as error:
        raise ScaleVecError(f"{text!r}: {error}") from None
    sites = [site for site in config.sites if site not in _BRANCHES] if "sites" in changes else []
    branches = {branch for site in config.sites for branch in _BRANCHES.get(site, ())}
    if absent := [*sites, *(branch for branch in config.branches_off if branch not in branches)]:
        raise ScaleVecError(
            f"{text!r}: the study's model has no {' and no '.join(absent)}. It has the sites "
            f"{', '.join(_BRANCHES)}, and at those of this arm the branches {', '.join(sorted(branches))}."
        )
    if same:
        raise ScaleVecError(
            f"{text!r} changes nothing of {strategy}; write {strategy}, or give components other values."
        )
    return arm


def read_arms(texts: Iterable[str]) -> list[Arm]:
    """Read arms, in their order; a label that is there again adds nothing.

    Raises:
        ScaleVecError: One cannot be read, or two are the same thing under different labels.
    """
    arms = list({arm.label: arm for arm in map(read_arm, texts)}.values())
    labels: dict[tuple[Any, ...], str] = {}
    for arm in arms:
        known = labels.setdefault(arm.build(), arm.label)
        if known != arm.label:
            raise ScaleVecError(
                f"{known!r} and {arm.label!r} are the same strategy under two labels, and would be trained "
                "twice; leave one out."
            )
    return arms
