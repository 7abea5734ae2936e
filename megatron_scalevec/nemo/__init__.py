"""The door for nemo-toolkit 2.7, the last line with ``nemo.collections.llm``.

One setting, in YAML or on the command line of ``nemo llm pretrain``::

    model.config.transformer_layer_spec: megatron_scalevec.nemo.unified

Each strategy has a factory of its own here, under its name with ``_`` for ``-``; :func:`layer_spec` takes the
name and the components as arguments. What they return is a ``nemo_run.Partial`` of :func:`build_layers`, so a
recipe that holds it can be sent to a cluster. In Python, ``functools.partial(build_layers, strategy="hg")``
is the same.

The weight decay follows by itself: see :mod:`megatron_scalevec.nemo.optimizer`.
"""

# No annotations as strings here: nemo_run reads the factories' to tell what an argument of a YAML line is.
import contextlib
import dataclasses
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_scalevec.config import STRATEGIES, WEIGHT_DECAYS, ScaleVecConfig, choose
from megatron_scalevec.errors import ScaleVecError

__all__ = ["NAMES", "build_layers", "layer_spec", "no_weight_decay"]

NAMES = {name.replace("-", "_"): name for name in STRATEGIES if name != "stock"}
"""Names of the factories without arguments, and the strategies they stand for."""

_COMPONENTS = ("branches", "placement", "reparam", "weight_decay", "sites")


def build_layers(
    config: Any,
    vp_stage: int | None = None,
    *,
    strategy: str,
    base: Any = None,
    branches: str | None = None,
    placement: str | None = None,
    reparam: str | None = None,
    weight_decay: str | None = None,
    sites: str | None = None,
) -> Any:
    """The layer spec of a NeMo model with scale vectors; a ``GPTConfig.transformer_layer_spec``.

    Args:
        config: The model's ``GPTConfig``, of any subclass.
        vp_stage: The virtual pipeline stage, as NeMo passes it.
        strategy: A key of :data:`megatron_scalevec.config.STRATEGIES`.
        base: The stock spec, or a function that returns it; by default what the class of ``config`` has.
        branches, placement, reparam, weight_decay, sites: As in
            :class:`~megatron_scalevec.ScaleVecConfig`.

    Raises:
        ScaleVecError: No such strategy, another megatron-core than NeMo can use, or a model that cannot
            carry scale vectors.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_scalevec.nemo import optimizer
    from megatron_scalevec.specs import scalevec_layer_spec
    from megatron_scalevec.support import refuse_unsupported
    from megatron_scalevec.versions import NEMO_TOOLKIT, require_megatron

    asked = ScaleVecConfig(
        strategy=strategy,
        branches=branches,
        placement=placement,
        reparam=reparam,
        weight_decay=weight_decay,
        sites=sites,
    )
    version = require_megatron(NEMO_TOOLKIT, "nemo-toolkit 2.7")
    refuse_unsupported(config, asked, version)
    optimizer.install()
    spec = _stock_spec(config) if base is None else base
    if not isinstance(spec, ModuleSpec) and callable(spec):
        takes_stage = "vp_stage" in inspect.signature(spec).parameters
        spec = spec(config, vp_stage=vp_stage) if takes_stage else spec(config)
    return scalevec_layer_spec(spec, asked)


def _stock_spec(config: Any) -> Any:
    """The spec that the configuration's class has where nobody sets another."""
    for field in dataclasses.fields(config):
        if field.name == "transformer_layer_spec":
            if field.default is not dataclasses.MISSING:
                return field.default
            if field.default_factory is not dataclasses.MISSING:
                return field.default_factory()
    raise ScaleVecError(
        f"{type(config).__name__} has no transformer_layer_spec: scale vectors are built on NeMo's GPTConfig "
        "and its subclasses."
    )


def layer_spec(strategy: str = "", **components: str) -> Any:
    """:func:`build_layers` with arguments, for ``nemo_run``.

    In YAML: ``model.config.transformer_layer_spec: megatron_scalevec.nemo.layer_spec(strategy=hg)``.

    Args:
        strategy: A key of :data:`megatron_scalevec.config.STRATEGIES`.
        components: ``branches``, ``placement``, ``reparam``, ``weight_decay`` and ``sites`` of
            :func:`build_layers`. Several sites have a ``+`` between them: at a comma ``nemo_run`` takes the
            next argument to begin.

    Raises:
        ScaleVecError: No such strategy or component, or components that contradict it.
    """
    import nemo_run

    # A mistake is to be known now, not when a cluster has started the run.
    with _said():
        _refuse_unknown("layer_spec", components, ["strategy", *_COMPONENTS])
        given = {name: value for name, value in components.items() if value}
        if "sites" in given:
            given["sites"] = given["sites"].replace("+", ",")
        ScaleVecConfig(strategy=choose("strategy", strategy, STRATEGIES), **given)
    return nemo_run.Partial(build_layers, strategy=strategy, **given)


def no_weight_decay(policy: str = "split", **unknown: str) -> Any:
    """``optim.no_weight_decay_cond`` in words: it is what a model with scale vectors gets anyway.

    Args:
        policy: A key of :data:`megatron_scalevec.config.WEIGHT_DECAYS`.
        unknown: Any other argument, which is an error.

    Raises:
        ScaleVecError: There is no such policy, or no such argument.
    """
    import nemo_run

    from megatron_scalevec.nemo.optimizer import DoesNotDecay

    with _said():
        _refuse_unknown("no_weight_decay", unknown, ["policy"])
        choose("weight-decay policy", policy, WEIGHT_DECAYS)
    return nemo_run.Config(DoesNotDecay, policy=policy)


def _refuse_unknown(factory: str, given: Mapping[str, str], known: Sequence[str]) -> None:
    for name in given:
        choose(f"argument of megatron_scalevec.nemo.{factory}:", name, known)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Log what is wrong: nemo_run drops what a factory raises, and its own error lacks the reason."""
    try:
        yield
    except ScaleVecError as error:
        logging.getLogger(__name__).error("%s", error)
        raise


def __getattr__(name: str) -> Any:
    """A factory of a strategy that there is none of."""
    # Imports ask here for submodules as well, and everybody for special names.
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with _said():
            choose(f"factory in {__name__}:", name, [*NAMES, "layer_spec", "no_weight_decay"])
    except ScaleVecError as error:
        raise AttributeError(str(error)) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _factory(strategy: str) -> Callable[[], Any]:
    def factory():
        return layer_spec(strategy)

    factory.__name__ = factory.__qualname__ = strategy.replace("-", "_")
    factory.__doc__ = f"The layers of {strategy!r}: {STRATEGIES[strategy].summary}."
    return factory


globals().update({name: _factory(strategy) for name, strategy in NAMES.items()})
