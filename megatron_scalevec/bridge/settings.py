"""A strategy as YAML holds it: its name, or a mapping of the configuration's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron_scalevec.config import ScaleVecConfig, choose
from megatron_scalevec.errors import ScaleVecError

__all__ = ["read", "refuse_unknown_keys", "write"]

_WHERE = "optimizer_config_override_provider.build_config_overrides"


def read(value: Any) -> ScaleVecConfig:
    """The configuration that a setting stands for.

    Args:
        value: A strategy's name, or a mapping with ``strategy`` and any other field.

    Raises:
        ScaleVecError: It is neither, or has an unknown name in it.
    """
    if isinstance(value, ScaleVecConfig):
        return value
    if isinstance(value, str):
        return ScaleVecConfig(strategy=value)
    if isinstance(value, Mapping) and value.get("strategy"):
        names = [field.name for field in fields(ScaleVecConfig)]
        for key in value:
            choose(f"key of {_WHERE}:", str(key), names)
        given = {key: _plain(item) for key, item in value.items()}
        return ScaleVecConfig(**given)
    raise ScaleVecError(
        f"{_WHERE} is {value!r}: give a strategy's name, for example unified, or a mapping with the key "
        "strategy."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):  # lr_mult: {input: 2}
        return ",".join(f"{role}={factor}" for role, factor in value.items())
    # OmegaConf's lists are no tuples, which the configuration has to hold.
    return tuple(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value


def write(config: ScaleVecConfig) -> str | dict[str, Any]:
    """The shortest form that :func:`read` turns into this configuration again."""
    given = {key.removeprefix("scalevec_"): value for key, value in config.as_arguments().items()}
    given.pop("execution", None)
    if config.execution not in (None, "auto"):
        given["execution"] = config.execution
    return config.strategy if list(given) == ["strategy"] else given


def refuse_unknown_keys(unknown: Mapping[str, Any]) -> None:
    """Refuse keys beside the one that :class:`megatron.scalevec.Setting` has.

    Raises:
        ScaleVecError: There are any.
    """
    if unknown:
        raise ScaleVecError(
            f"megatron.scalevec.Setting has no key {', '.join(map(repr, sorted(unknown)))}: write the "
            "strategy under build_config_overrides, and its components as a mapping there."
        )
