"""Arms: what is compared in a study, a named strategy with components of it changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["Arm", "read_arm"]

_CHANGEABLE = tuple(
    field.name for field in dataclasses.fields(ScaleVecConfig) if field.name not in ("strategy", "execution")
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
        if not equals or not value or component not in _CHANGEABLE:
            names = ", ".join(known.replace("_", "-") for known in _CHANGEABLE)
            raise ScaleVecError(
                f"{text!r}: {part!r} is no change of a strategy; give COMPONENT=VALUE with one of {names}, "
                "several values with a slash between them."
            )
        # A comma ends an arm on the command line.
        changes[component] = value.replace("/", ",")
    given = tuple((name.replace("_", "-"), value) for name, value in changes.items())
    arm = Arm("+".join([strategy, *parts]), strategy, given)
    try:
        arm.config()
    except ScaleVecError as error:
        raise ScaleVecError(f"{text!r}: {error}") from None
    return arm
