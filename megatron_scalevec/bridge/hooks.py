"""Every place where the plugin enters Megatron-Bridge.

Installed when a configuration names the plugin, and in force for the whole process; each looks at the
configuration object at hand and leaves stock ones alone.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.patching import PatchSet, resolve

__all__ = ["install", "overrides", "uninstall"]

_patches = PatchSet()
_CONVERSION = "megatron.bridge.models.conversion.model_bridge"


def install() -> None:
    """Put the hooks in place; a second call changes nothing.

    Where one of them cannot land, nothing is lost without a word: a model that does not carry what its
    configuration asks for stops the run in :func:`overrides`, which Bridge itself calls.
    """
    if len(_patches):
        return
    for target, make in (
        ("megatron.bridge.training.config:ConfigContainer.validate", _validate),
        ("megatron.core.models.hybrid.hybrid_model:HybridModel.__init__", _hybrid_model),
        ("megatron.bridge.training.setup:setup_optimizer", _setup_optimizer),
        ("megatron.bridge.training.checkpointing:_load_base_checkpoint", _load_base_checkpoint),
        (f"{_CONVERSION}:MegatronModelBridge.stream_weights_megatron_to_hf", _stock_only("exports")),
        (f"{_CONVERSION}:MegatronModelBridge.load_weights_hf_to_megatron", _stock_only("loads")),
    ):
        owner, attribute = resolve(target)
        _patches.wrap(owner, attribute, make)


def uninstall() -> None:
    """Take the hooks out again."""
    _patches.undo()


def overrides(config: ScaleVecConfig, context: Any) -> dict[Any, Any] | None:
    """Parameter groups of a built model, as Bridge's override providers give them.

    Args:
        config: What was asked for.
        context: Bridge's ``OptimizerConfigOverrideProviderContext``.

    Raises:
        ScaleVecError: A model chunk does not carry what was asked for.
    """
    from megatron.core.optimizer import get_standard_config_overrides

    from megatron_scalevec.convert import applied_config
    from megatron_scalevec.decay import with_decaying_vectors, with_learning_rates

    standard = get_standard_config_overrides(config=context.optimizer_config)
    if not config.active:
        return standard or None
    for chunk in _chunks(context.model):
        built = applied_config(chunk)
        if built != config:
            raise ScaleVecError(
                f"optimizer_config_override_provider asks for {config.describe()}, and the model that was "
                f"built carries {built.describe() if built else 'no scale vectors'}: build it from the same "
                "ConfigContainer, after validate() or megatron_scalevec.bridge.apply. Nothing was trained."
            )
    changed = with_decaying_vectors(standard, config.weight_decay)
    return with_learning_rates(changed, config.lr_multipliers, context.optimizer_config) or None


def _chunks(model: Any) -> list[torch.nn.Module]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _validate(original):
    @functools.wraps(original)
    def validate(self):
        from megatron_scalevec.bridge.container import settle

        settle(self)
        original(self)
        # Bridge derives fields while it validates.
        settle(self)

    return validate


def _hybrid_model(original):
    """A hybrid model's configuration keeps its spec, so it says itself what the model is to carry."""

    @functools.wraps(original)
    def init(self, config, *args, **kwargs):
        from megatron.scalevec import LayerSpec
        from megatron_scalevec.convert import applied_config, apply_scale_vectors

        original(self, config, *args, **kwargs)
        spec = getattr(config, "hybrid_stack_spec", None)
        if isinstance(spec, LayerSpec) and not spec.after_weights and applied_config(self) is None:
            apply_scale_vectors(self, spec.config)

    return init


def _setup_optimizer(original):
    @functools.wraps(original)
    def setup_optimizer(*args, **kwargs):
        from megatron.scalevec import Setting

        result = original(*args, **kwargs)
        setting = kwargs.get("optimizer_config_override_provider")
        if isinstance(setting, Setting) and setting.require_config().active:
            model = kwargs["model"] if "model" in kwargs else args[2]
            _audit(model, result[0], setting)
        return result

    return setup_optimizer


def _audit(model: Any, optimizer: Any, setting: Any) -> None:
    from megatron_scalevec.audit import audit

    found = audit(_chunks(model), optimizer, config=setting.config)
    if torch.distributed.get_rank() == 0:
        print(found.table(), flush=True)
        for file in setting.audit_files:
            found.write(file)


def _load_base_checkpoint(original):
    """A checkpoint knows its strategy: its ``run_config.yaml`` has it."""

    @functools.wraps(original)
    def _load_base_checkpoint(load_dir, ckpt_cfg, *args, cfg=None, **kwargs):
        result = original(load_dir, ckpt_cfg, *args, cfg=cfg, **kwargs)
        name = result[1]
        if cfg is not None and isinstance(name, str):
            _require_same(cfg, name)
        return result

    return _load_base_checkpoint


def _require_same(container: Any, folder: str) -> None:
    import yaml

    from megatron_scalevec.bridge import settings
    from megatron_scalevec.bridge.container import SPEC_FIELDS, asked_for

    file = os.path.join(folder, "run_config.yaml")
    if not os.path.isfile(file):
        return
    with open(file, encoding="utf-8") as stream:
        model = yaml.safe_load(stream).get("model") or {}
    specs = [spec for field in SPEC_FIELDS if isinstance(spec := model.get(field), dict)]
    given = next((spec["strategy"] for spec in specs if spec.get("strategy")), None)
    was = settings.read(given) if given else ScaleVecConfig()
    config = asked_for(container)
    if was != config:
        way_out = (
            "give optimizer_config_override_provider.build_config_overrides the checkpoint's strategy, or "
            "start without checkpoint.load"
        )
        if not was.active:
            way_out = (
                "leave the setting out, or start from the weights in Hugging Face's form through "
                "AutoBridge's to_megatron_provider(load_weights=True), which loads them before the vectors "
                "are built"
            )
        raise ScaleVecError(
            f"the checkpoint in {folder} was trained with {was.describe()}, and this run asks for "
            f"{config.describe()}: {way_out}."
        )


_BY_NAME = {
    "exports": "use megatron_scalevec.bridge.export.export_ckpt (or fold_in_place on the model first), which "
    "puts the vectors into the weights",
    "loads": "start from AutoBridge's to_megatron_provider(load_weights=True), whose weights are loaded "
    "before the vectors are built",
}


def _stock_only(what: str):
    """Bridge converts weights by their names, which mean something else in a model with scale vectors."""

    def make(original):
        @functools.wraps(original)
        def convert(self, *args, **kwargs):
            from megatron_scalevec.convert import applied_config

            models = [item for value in (*args, *kwargs.values()) for item in _chunks(value)]
            for model in models:
                built = applied_config(model) if isinstance(model, torch.nn.Module) else None
                if built is not None:
                    raise ScaleVecError(
                        f"AutoBridge {what} Hugging Face weights by their names, and this model carries "
                        f"{built.describe()}: {_BY_NAME[what]}."
                    )
            return original(self, *args, **kwargs)

        return convert

    return make
