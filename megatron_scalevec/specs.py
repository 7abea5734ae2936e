"""Door 2: layer specs that bring scale vectors with them.

``scalevec_layer_spec(base_spec, config)`` turns any spec of GPT layers into one whose models get the
strategy, complete, when ``GPTModel`` has built them. ``--spec megatron_scalevec.specs NAME`` does the same
in a Megatron script that knows nothing of this package: the names are the strategies, with ``_`` for ``-``
(``hg``, ``post_qkv``, ``unified_foldable``), and the layers are those that Megatron's own arguments
describe. Where ``--spec`` names one of them, weight decay, checkpoints and the audit follow, exactly as
with ``--scalevec-strategy``.

Importing this module changes nothing, unless the running Megatron was told ``--spec
megatron_scalevec.specs``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, TransformerLayer

from megatron_scalevec.config import STRATEGIES, ScaleVecConfig, choose
from megatron_scalevec.convert import applied_config, apply_scale_vectors
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.pending import MARK, pending_class, pending_config

__all__ = ["NAMES", "scalevec_layer_spec", "spec_config", "strategy_named"]

NAMES = {name.replace("-", "_"): name for name in STRATEGIES if name != "stock"}
"""Names for ``--spec megatron_scalevec.specs NAME``, and the strategies they stand for."""


def scalevec_layer_spec(base_spec: Any, config: ScaleVecConfig) -> Any:
    """The same spec, whose models carry scale vectors.

    From the first call on, every ``GPTModel`` of this process whose layers come from such a spec is
    converted at the end of its construction, as by :func:`megatron_scalevec.apply_scale_vectors`; other
    models are left alone. ``base_spec`` itself is not changed.

    Args:
        base_spec: A ``ModuleSpec`` of a transformer layer or of a block, ``TransformerBlockSubmodules``,
            or a function that returns one of these (``callable(config[, vp_stage])``).
        config: The strategy; ``stock`` returns ``base_spec``.

    Raises:
        ScaleVecError: This is no spec of layers with self-attention, or it asks for a strategy already.
    """
    if not isinstance(config, ScaleVecConfig):
        raise ScaleVecError(
            f"scalevec_layer_spec needs a ScaleVecConfig as its second argument, not {config!r}; write "
            'ScaleVecConfig(strategy="hg"), for example.'
        )
    if not config.active:
        return base_spec
    result = _mark(base_spec, config)
    _watch_models()
    return result


def spec_config(spec: Any) -> ScaleVecConfig | None:
    """The strategy that a spec asks for, None for a stock spec."""
    own = getattr(spec, MARK, None)
    if own is not None:
        return own
    if isinstance(spec, TransformerBlockSubmodules):
        found = (spec_config(layer) for layer in spec.layer_specs or ())
        return next((config for config in found if config is not None), None)
    submodules = _submodules_of(spec)
    if isinstance(submodules, TransformerBlockSubmodules):
        return spec_config(submodules)
    attention = getattr(submodules, "self_attention", None)
    return getattr(attention, "params", {}).get(MARK)


def strategy_named(name: str) -> ScaleVecConfig:
    """What ``--spec megatron_scalevec.specs NAME`` asks for.

    Raises:
        ScaleVecError: There is no such name.
    """
    return ScaleVecConfig(strategy=NAMES[choose(f"spec in {__name__}:", name, NAMES)])


# --- marking ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _MarkedBlock(TransformerBlockSubmodules):
    """A block's submodules that say what they ask for, even where a stage holds no layer at all."""

    scalevec_config: ScaleVecConfig | None = None


def _submodules_of(spec: Any) -> Any:
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    return getattr(spec, "submodules", None)


def _mark(spec: Any, config: ScaleVecConfig) -> Any:
    known = spec_config(spec)
    if known is not None:
        if known == config:
            return spec
        raise ScaleVecError(
            f"the layer spec asks for {known.describe()} already, so it cannot ask for {config.describe()}; "
            "give scalevec_layer_spec a stock spec."
        )
    if isinstance(spec, TransformerBlockSubmodules):
        # Layers that shared one spec go on sharing one.
        marked = {id(layer): _mark(layer, config) for layer in spec.layer_specs or ()}
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        fields["layer_specs"] = [marked[id(layer)] for layer in spec.layer_specs or ()]
        return _MarkedBlock(**fields, scalevec_config=config)
    if isinstance(spec, ModuleSpec):
        module = get_module(spec)
        if _is(module, TransformerBlock):
            return dataclasses.replace(spec, submodules=_mark(spec.submodules, config))
        if _is(module, BaseTransformerLayer):
            return dataclasses.replace(spec, submodules=_mark_layer(spec.submodules, config))
        raise _not_a_spec(getattr(module, "__name__", module))
    if isinstance(spec, functools.partial) and _is(spec.func, BaseTransformerLayer):
        marked_layer = _mark_layer(_submodules_of(spec), config)
        return functools.partial(spec.func, *spec.args, **{**spec.keywords, "submodules": marked_layer})
    if callable(spec) and not isinstance(spec, type):
        return _mark_builder(spec, config)
    raise _not_a_spec(getattr(spec, "__name__", type(spec).__name__))


def _is(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _not_a_spec(what: Any) -> ScaleVecError:
    return ScaleVecError(
        f"scalevec_layer_spec was given {what}, which is no spec of transformer layers; give it a ModuleSpec "
        "of a TransformerLayer, TransformerBlockSubmodules, or a function that returns one of them."
    )


def _mark_layer(submodules: Any, config: ScaleVecConfig) -> Any:
    attention = getattr(submodules, "self_attention", None)
    params: dict[str, Any] = {}
    inner = None
    if isinstance(attention, ModuleSpec):
        kind, params, inner = get_module(attention), attention.params, attention.submodules
    elif isinstance(attention, functools.partial):
        kind, params = attention.func, dict(attention.keywords)
        inner = params.pop("submodules", None)
    else:
        kind = attention
    if not isinstance(kind, type) or issubclass(kind, IdentityOp):
        raise ScaleVecError(
            "scalevec_layer_spec was given a layer without self-attention, where this version has no place "
            "for scale vectors; give it a spec of GPT layers."
        )
    marked = ModuleSpec(module=pending_class(kind), params={**params, MARK: config}, submodules=inner)
    return dataclasses.replace(submodules, self_attention=marked)


def _mark_builder(builder: Callable[..., Any], config: ScaleVecConfig) -> Callable[..., Any]:
    # Megatron looks at the signature to see whether a builder takes vp_stage: wraps() passes it on.
    @functools.wraps(builder)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return _mark(builder(*args, **kwargs), config)

    setattr(marked, MARK, config)
    return marked


# --- completing models --------------------------------------------------------------------------------


def _watch_models() -> None:
    """Have ``GPTModel`` converted at the end of its construction where its spec asks for it."""
    current = GPTModel.__init__
    while current is not None:
        if getattr(current, "_scalevec_watches_specs", False):
            return
        current = getattr(current, "__wrapped__", None)
    original = GPTModel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = pending_config(self)
        if config is None:  # a stage without a layer
            given = signature.bind(self, *args, **kwargs).arguments
            config = spec_config(given.get("transformer_layer_spec"))
        if config is not None:
            _complete(self, config)

    init._scalevec_watches_specs = True
    GPTModel.__init__ = init


def _complete(model: GPTModel, config: ScaleVecConfig) -> None:
    if _arguments_of_running_megatron() is not None:
        from megatron_scalevec.integration import hooks

        # The same strategy, with the mode of execution that the run's arguments lead to.
        config = hooks.adopt(config, model_is_built=True).config
    if applied_config(model) != config:
        apply_scale_vectors(model, config)


def _arguments_of_running_megatron() -> Any:
    """Megatron's parsed arguments, None where its training loop is not in use."""
    variables = sys.modules.get("megatron.training.global_vars")
    return getattr(variables, "_GLOBAL_ARGS", None)


# --- named specs --------------------------------------------------------------------------------------


class _NamedSpec(ModuleSpec):
    """The dense layer that Megatron's arguments describe, with a strategy.

    Megatron takes the object that ``--spec`` names before it says which layers it wants, so what is inside
    is found when it is first looked at.
    """

    def __init__(self, config: ScaleVecConfig) -> None:
        self._built = None
        super().__init__(module=TransformerLayer)
        self.scalevec_config = config

    @property
    def submodules(self) -> Any:
        if self._built is None:
            self._built = scalevec_layer_spec(_layer_from_arguments(), self.scalevec_config).submodules
        return self._built

    @submodules.setter
    def submodules(self, value: Any) -> None:
        self._built = value

    def __repr__(self) -> str:
        return f"<layer spec {self.scalevec_config.strategy!r} of {__name__}>"

    # The dataclass's would look inside.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _layer_from_arguments() -> ModuleSpec:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

    args = _arguments_of_running_megatron()
    if args is None:
        raise ScaleVecError(
            f"the named specs of {__name__} take their layers from Megatron's command line, and there is "
            "none here; in Python use scalevec_layer_spec(base_spec, config)."
        )
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.yaml_arguments import core_transformer_config_from_yaml

    if getattr(args, "yaml_cfg", None) is not None:
        config = core_transformer_config_from_yaml(args, "language_model")
    else:
        config = core_transformer_config_from_args(args)
    if config.num_moe_experts:
        raise ScaleVecError(
            f"--spec {__name__} describes dense layers, and the run asks for experts; use "
            "--scalevec-strategy instead of --spec."
        )
    layers = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
    )
    return layers[0]


globals().update({name: _NamedSpec(ScaleVecConfig(strategy=strategy)) for name, strategy in NAMES.items()})


def _join_running_megatron() -> None:
    """Install the hooks where Megatron runs and its ``--spec`` names this module.

    A script that knows nothing of this package imports it when it looks the spec up: its arguments are
    parsed, and its model, optimizer and checkpoints are still to come.
    """
    args = _arguments_of_running_megatron()
    spec = getattr(args, "spec", None)
    if spec and spec[0] == __name__:
        from megatron_scalevec.integration import hooks

        hooks.adopt(None, name=spec[1])


_join_running_megatron()
