"""Giving a ``ConfigContainer``'s model its layer spec, and refusing what cannot be combined."""

from __future__ import annotations

import functools
import os
from typing import Any

from megatron_scalevec.bridge import settings
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.support import refuse_unsupported
from megatron_scalevec.versions import require_bridge, require_supported_megatron

__all__ = ["SPEC_FIELDS", "Fields", "asked_for", "give_spec", "settle", "spec_field"]

AUDIT_FILE = "scalevec_audit.json"

SPEC_FIELDS = ("transformer_layer_spec", "hybrid_stack_spec")
"""Where a model configuration of Bridge keeps the spec of its layers: GPT models, and hybrid ones."""

_SECTIONS = ("model", "optimizer", "ddp", "dist", "train", "checkpoint", "scheduler")


class Fields:
    """A ``ConfigContainer``'s sections under the names that Megatron's arguments have.

    Where several sections have a field, a value that asks for something counts: ``ddp.use_megatron_fsdp``
    and ``dist.use_megatron_fsdp`` both ask for the same.
    """

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getattr__(self, name: str) -> Any:
        sections = [self._container, *(getattr(self._container, section, None) for section in _SECTIONS)]
        if name in _SECTIONS:
            sections = sections[1:]
        found = [getattr(section, name) for section in sections if hasattr(section, name)]
        if not found:
            raise AttributeError(name)
        return next((value for value in found if value), found[0])


def spec_field(model: Any) -> str | None:
    """The field of a model configuration that holds the spec of its layers, None where it has none."""
    return next((field for field in SPEC_FIELDS if hasattr(model, field)), None)


def asked_for(container: Any) -> ScaleVecConfig:
    """What a configuration asks for; ``stock`` where it says nothing.

    Raises:
        ScaleVecError: What it says is no strategy, or its two places contradict each other.
    """
    from megatron.scalevec import LayerSpec, Setting

    setting = container.optimizer_config_override_provider
    field = spec_field(container.model)
    spec = getattr(container.model, field) if field else None
    config = setting.require_config() if isinstance(setting, Setting) else ScaleVecConfig()
    if isinstance(spec, LayerSpec) and spec.config != config:
        raise ScaleVecError(
            f"model.{field} asks for {spec.config.describe()}, and "
            f"optimizer_config_override_provider for {config.describe()}: give both the same strategy, by "
            "build_config_overrides or by megatron_scalevec.bridge.apply alone."
        )
    return config


def settle(container: Any) -> None:
    """Called when a configuration is validated: from here on its models carry what it asks for.

    Raises:
        ScaleVecError: It cannot be given what it asks for.
    """
    from megatron.scalevec import Setting

    config = asked_for(container)
    setting = container.optimizer_config_override_provider
    if isinstance(setting, Setting) and config.active:
        give_spec(container, setting)
        save = getattr(container.checkpoint, "save", None)
        setting.audit_files = [os.path.join(save, AUDIT_FILE)] if save else []


def give_spec(container: Any, setting: Any) -> None:
    """Put the strategy's layer spec around the one that the model configuration has.

    Args:
        container: The configuration. Only its model's spec of layers is changed.
        setting: A :class:`megatron.scalevec.Setting`.

    Raises:
        ScaleVecError: The megatron-core version, the kind of model or another field does not go with it.
    """
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.bridge.package_info import __version__

    from megatron.scalevec import LayerSpec

    config = setting.require_config()
    model = container.model
    require_bridge(__version__)
    version = require_supported_megatron()
    field = spec_field(model)
    spec = getattr(model, field) if field else None
    if spec is None and field == "hybrid_stack_spec":
        from megatron.bridge.models.hybrid.hybrid_provider import get_default_hybrid_stack_spec as spec
    if spec is None or not isinstance(model, ModelProviderMixin):
        raise ScaleVecError(
            f"scale vectors were asked for, and the recipe's model is a {type(model).__name__}: they are "
            "built on GPTModelProvider, HybridModelProvider and their subclasses alone; leave the setting "
            "out for this recipe."
        )
    refuse_unsupported(Fields(container), config, version)
    if config.vector_dtype == "fp32":
        raise ScaleVecError(
            "vector_dtype fp32 is not proven with Megatron-Bridge yet, where nothing orders the parameters "
            "of a group of two dtypes; drop it."
        )
    if not isinstance(spec, LayerSpec):
        spec = LayerSpec(settings.write(config), spec)
        setattr(model, field, spec)
    if getattr(model, "_pre_wrap_hooks", None) and not spec.after_weights:
        # They load Hugging Face weights by name, so the vectors come after them and start at the norms'
        # trained scales.
        spec.after_weights = True
        model.register_pre_wrap_hook(functools.partial(_convert, config=config))


def _convert(chunks: list[Any], config: ScaleVecConfig) -> list[Any]:
    from megatron_scalevec.audit.chunks import unwrap
    from megatron_scalevec.convert import apply_scale_vectors

    for chunk in chunks:
        apply_scale_vectors(unwrap(chunk), config)
    return chunks
