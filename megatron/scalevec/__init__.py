"""What Megatron-Bridge configurations name: ``_target_: megatron.scalevec.Setting``.

Bridge builds objects from YAML only if their dotted name begins with one of a few prefixes, ``megatron.``
among them, and writes the module in which a class is defined into a checkpoint's ``run_config.yaml``. So
these two classes are defined here, in a portion of the namespace package ``megatron`` that comes with
``megatron_scalevec``; all else is in :mod:`megatron_scalevec.bridge`.

Importing this module puts the hooks of :mod:`megatron_scalevec.bridge.hooks` in place: where Bridge reads a
checkpoint's ``run_config.yaml`` it imports what that names, and a run that resumes such a checkpoint
without the setting is then told so.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.bridge.training.config import OptimizerConfigOverrideProvider
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_scalevec.bridge import hooks, settings
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["LayerSpec", "Setting"]


class Setting(OptimizerConfigOverrideProvider):
    """The strategy of a run, as ``optimizer_config_override_provider`` of its ``ConfigContainer``.

    In YAML::

        optimizer_config_override_provider:
          _target_: megatron.scalevec.Setting
          build_config_overrides: unified

    The key is named after the method it stands for because of what Bridge does where this class cannot be
    built (the package is not installed, the name is misspelt): it warns, keeps its own provider and sets the
    remaining keys on that. The method is then no longer callable and the run stops before training; under
    any other key it would train without scale vectors.

    Args:
        build_config_overrides: A strategy's name, or a mapping of :class:`~megatron_scalevec.ScaleVecConfig`
            fields.
        unknown: Any other key, which is an error.

    Nothing is raised here, since Bridge turns that into a warning too: what is wrong is kept, and raised when
    the configuration is validated or the optimizer is built, whichever comes first.
    """

    def __init__(self, build_config_overrides: Any = None, **unknown: Any) -> None:
        self.given = build_config_overrides
        self.problem: ScaleVecError | None = None
        self.config = None
        self.audit_files: list[str] = []
        try:
            settings.refuse_unknown_keys(unknown)
            self.config = settings.read(build_config_overrides)
        except ScaleVecError as error:
            self.problem = error

    def require_config(self) -> ScaleVecConfig:
        """The :class:`~megatron_scalevec.ScaleVecConfig` that was asked for.

        Raises:
            ScaleVecError: The setting is not one.
        """
        if self.problem is not None:
            raise self.problem
        return self.config

    def to_cfg_dict(self) -> dict[str, Any]:
        """Bridge's form of this object in ``run_config.yaml``."""
        return {"_target_": "megatron.scalevec.Setting", "build_config_overrides": self.given}

    def build_config_overrides(self, context: Any) -> dict[Any, Any] | None:
        """Bridge's question for parameter groups: those of the strategy's weight decay.

        Raises:
            ScaleVecError: The setting is not one, or a model chunk does not carry it.
        """
        return hooks.overrides(self.require_config(), context)


class LayerSpec:
    """A model configuration's ``transformer_layer_spec`` (``hybrid_stack_spec``) that brings scale vectors.

    It is put there when the run's configuration is validated, and stays in ``run_config.yaml``, so that
    whoever loads the checkpoint's model gets the vectors too.

    Args:
        strategy: As for :class:`Setting`.
        base: The spec that the model had: a ``ModuleSpec``, or a function that returns one.

    Raises:
        ScaleVecError: ``strategy`` is none.
    """

    def __init__(self, strategy: Any, base: Any) -> None:
        self.strategy = strategy
        self.base = base
        settings.read(strategy)
        self.after_weights = False
        """Whether the model is converted later, when Hugging Face weights have been loaded into it."""

    @property
    def config(self) -> ScaleVecConfig:
        """What ``strategy`` stands for. Not kept: Bridge copies a model configuration's objects attribute by
        attribute, which a frozen one does not take."""
        return settings.read(self.strategy)

    def __call__(self, config: Any, vp_stage: int | None = None) -> Any:
        """The spec of a model's layers, marked for conversion at the end of the model's construction."""
        from megatron_scalevec.specs import scalevec_layer_spec

        base = self.base
        if not isinstance(base, ModuleSpec) and callable(base):
            takes = inspect.signature(base).parameters
            if "vp_stage" in takes:
                base = base(config, vp_stage=vp_stage)
            else:
                base = base(config) if takes else base()
        # Hybrid models are converted by their configuration: see hooks.
        if self.after_weights or hasattr(config, "hybrid_stack_spec"):
            return base
        return scalevec_layer_spec(base, self.config)

    def to_cfg_dict(self) -> dict[str, Any]:
        """Bridge's form of this object in ``run_config.yaml``."""
        from megatron.bridge.training.config import ConfigContainer

        return {
            "_target_": "megatron.scalevec.LayerSpec",
            "strategy": self.strategy,
            "base": ConfigContainer._convert_value_to_dict(self.base),
        }


hooks.install()
