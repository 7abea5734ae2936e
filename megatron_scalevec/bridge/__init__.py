"""The door for Megatron-Bridge, NeMo Framework's trainer of language models.

YAML and command lines name :class:`megatron.scalevec.Setting`; in Python :func:`apply` does the same to a
recipe's configuration. Either way the strategy belongs to that configuration object: its model configuration
gets a layer spec that brings the vectors (:class:`megatron.scalevec.LayerSpec`), whatever the class of the
model configuration is, and other models of the process stay as they are.
"""

from __future__ import annotations

from typing import Any

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["apply"]


def apply(container: Any, config: ScaleVecConfig) -> Any:
    """Give a run of Megatron-Bridge a strategy, before ``pretrain(container, ...)``.

    Args:
        container: A recipe's ``ConfigContainer``, changed in place. YAML and command-line overrides may
            follow.
        config: The strategy; ``stock`` changes nothing.

    Returns:
        ``container``.

    Raises:
        ScaleVecError: The configuration has another strategy, weight-decay rules of its own, or something
            that cannot be combined with scale vectors. It is unchanged.
    """
    from megatron.bridge.training.config import OptimizerConfigOverrideProvider

    from megatron.scalevec import Setting
    from megatron_scalevec.bridge import container as containers
    from megatron_scalevec.bridge import settings

    if not isinstance(config, ScaleVecConfig):
        raise ScaleVecError(
            f"apply needs a ScaleVecConfig as its second argument, not {config!r}; write "
            'ScaleVecConfig(strategy="unified"), for example.'
        )
    current = container.optimizer_config_override_provider
    if isinstance(current, Setting):
        if current.require_config() == config:
            return container
        raise ScaleVecError(
            f"the configuration asks for {current.require_config().describe()} already, and "
            f"{config.describe()} was asked for as well; drop one of the two."
        )
    if not config.active:
        return container
    if type(current) is not OptimizerConfigOverrideProvider:
        raise ScaleVecError(
            f"the configuration's optimizer_config_override_provider is a {type(current).__name__} with "
            "rules of its own, which the weight decay of scale vectors would replace; set it to "
            "OptimizerConfigOverrideProvider() first."
        )
    setting = Setting(settings.write(config))
    containers.give_spec(container, setting)
    container.optimizer_config_override_provider = setting
    return container
