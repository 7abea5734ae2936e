"""What the ranks of a test do. Each function runs in a freshly forked process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_scalevec.vectors import VectorInfo
from ranks.initial import fill_by_name

TESTS = Path(__file__).resolve().parent.parent


def train(
    argv: list[str],
    plugin: bool = True,
    by_name: bool = True,
    sabotage: str | None = None,
    script: str | None = None,
) -> dict[str, Any]:
    """Run a training script and record what it did, in full precision.

    Args:
        argv: The command line.
        plugin: Go through the launcher; CPU mode is on with and without.
        by_name: Replace initial values by ones that do not depend on the layout.
        sabotage: Name of a function in :data:`SABOTAGE` that breaks something on purpose.
        script: A file in ``tests/scripts``; the built-in GPT entry by default.

    Returns:
        ``losses`` (empty on ranks without the last pipeline stage), ``grad_norms``, ``vectors``: final
        values of all 1-D parameters by name over the whole pipeline, ``audit`` as a dict or None.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from megatron_scalevec import cpu
    from megatron_scalevec.integration import hooks, launch, pretrain_gpt
    from megatron_scalevec.patching import PatchSet

    patches = PatchSet()
    if sabotage:
        SABOTAGE[sabotage](patches)
    if not plugin:
        # Only what the CPU needs: the run that a plugin-less user would have.
        from megatron.training import arguments, initialize

        def choose_then(original):
            def validate(args, defaults=None):
                cpu.choose_arguments(args)
                return original(args, defaults or {})

            return validate

        patches.wrap(arguments, "validate_args", choose_then)
        if hasattr(initialize, "validate_args"):  # up to 0.17
            patches.set(initialize, "validate_args", arguments.validate_args)

    record: dict[str, Any] = {"losses": [], "grad_norms": [], "vectors": {}, "audit": None, "start": {}}
    chunks: list[torch.nn.Module] = []

    def start_by_name(original):
        def setup_model_and_optimizer(*args, **kwargs):
            model, optimizer, scheduler = original(*args, **kwargs)
            chunks.extend(unwrap_model(model))
            record["start"] = _start_of(chunks)
            if by_name:
                for chunk in chunks:
                    fill_by_name(
                        chunk,
                        parallel_state.get_tensor_model_parallel_rank(),
                        parallel_state.get_tensor_model_parallel_world_size(),
                    )
                optimizer.reload_model_params()
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def recorded(original):
        def train_step(*args, **kwargs):
            result = original(*args, **kwargs)
            if "lm loss" in result[0]:
                record["losses"].append(float(result[0]["lm loss"]))
            record["grad_norms"].append(float(result[5]))
            return result

        return train_step

    def record_run():
        patches.wrap(training, "setup_model_and_optimizer", start_by_name)
        patches.wrap(training, "train_step", recorded)

    path = str(TESTS / "scripts" / script) if script else None
    # Megatron exits by itself after some options.
    with contextlib.suppress(SystemExit):
        if not plugin:
            record_run()
            sys.argv = ["pretrain", *argv]
            runpy.run_path(path, run_name="__main__") if path else pretrain_gpt.main()
        else:
            # On top of the plugin's hooks, so that scale vectors get their start values as well.
            patches.wrap(hooks, "install", lambda original: _then(original, record_run))
            launch.launch(path, argv) if path else launch.pretrain(argv)

    for chunk in chunks:
        layers = {
            name: module.layer_number
            for name, module in chunk.named_modules()
            if hasattr(module, "layer_number") and name.split(".")[-1].isdigit()
        }
        for name, param in chunk.named_parameters():
            if param.dim() == 1 and not getattr(param, "tensor_model_parallel", False):
                for path, number in layers.items():
                    if name.startswith(path + "."):
                        name = f"layer{number}{name[len(path) :]}"
                record["vectors"][name] = param.detach().float().numpy().copy()
    if hooks.installed() and hooks.session().audit is not None:
        record["audit"] = json.loads(hooks.session().audit.to_json())
    return record


def _start_of(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """What a model is before training: classes, and parameters with their values and attributes."""
    plain = (str, int, float, bool, tuple, type(None), VectorInfo)
    found: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            found[f"{index} {name}"] = type(module).__qualname__
        for name, param in chunk.named_parameters():
            attributes = {key: repr(value) for key, value in vars(param).items() if isinstance(value, plain)}
            values = param.detach().float().numpy().tobytes()
            found[f"{index} {name} (parameter)"] = (
                tuple(param.shape),
                str(param.dtype),
                param.requires_grad,
                attributes,
                hashlib.sha256(values).hexdigest(),
            )
    return found


def train_by_door(door: str, argv: list[str], strategy: str) -> dict[str, Any]:
    """The same run, with its scale vectors from one of the doors.

    Args:
        door: ``flag``, ``flag+spec``, ``spec`` (through the launcher); ``plain spec`` (a script that knows
            nothing of this package), ``plain own layer``, ``plain own block`` (the same with specs of a
            user's own); ``call``.
        argv: Megatron's own arguments.
        strategy: Its name.
    """
    named = ["--spec", "megatron_scalevec.specs", strategy.replace("-", "_")]
    flag = ["--scalevec-strategy", strategy]
    more = {"flag": flag, "flag+spec": [*flag, *named], "spec": named, "plain spec": named}.get(door, [])
    if door.startswith("plain own"):
        more = ["--spec", "ranks.own_specs", door.split()[-1]]
    if door == "call":
        _call_door(strategy)
    return train([*argv, *more], plugin=not door.startswith("plain") and door != "call", by_name=False)


def _call_door(strategy: str) -> None:
    """What somebody writes who builds the model himself."""
    from megatron.training import training
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.decay import with_decaying_vectors

    strategy_config = ScaleVecConfig(strategy=strategy)
    build, overrides = GPTModelBuilder.build_model, training.get_standard_config_overrides

    def build_model(self, *args, **kwargs):
        model = build(self, *args, **kwargs)
        apply_scale_vectors(model, strategy_config)
        return model

    GPTModelBuilder.build_model = build_model
    training.get_standard_config_overrides = lambda config: with_decaying_vectors(
        overrides(config), strategy_config.weight_decay
    )


def build_from_spec(case: str) -> dict[str, Any]:
    """Build models from specs with megatron.core alone."""
    import copy

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from megatron_scalevec.specs import scalevec_layer_spec, spec_config
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    config = ScaleVecConfig(strategy="unified")
    base = get_gpt_layer_local_spec(normalization="RMSNorm")
    before = repr(base)
    norm = base.submodules.input_layernorm
    block = TransformerBlockSubmodules(layer_specs=[base, base], layer_norm=norm)
    mtp = {"mtp_num_layers": 1} if case == "mtp" else {}
    try:
        spec = {
            "block": lambda: scalevec_layer_spec(block, config),
            "module-block": lambda: scalevec_layer_spec(
                ModuleSpec(TransformerBlock, submodules=block), config
            ),
            "builder": lambda: scalevec_layer_spec(lambda model_config: block, config)(None),
            "copy": lambda: copy.deepcopy(scalevec_layer_spec(base, config)),
            "by-path": lambda: scalevec_layer_spec(
                ModuleSpec(
                    ("megatron.core.transformer.transformer_layer", "TransformerLayer"),
                    submodules=base.submodules,
                ),
                config,
            ),
            "norm": lambda: scalevec_layer_spec(norm, config),
            "linear": lambda: scalevec_layer_spec(ModuleSpec(torch.nn.Linear), config),
            "no-attention": lambda: scalevec_layer_spec(
                ModuleSpec(TransformerLayer, submodules=type(base.submodules)()), config
            ),
            "string": lambda: scalevec_layer_spec(base, "hg"),
            "twice": lambda: scalevec_layer_spec(
                scalevec_layer_spec(block, config), ScaleVecConfig(strategy="hg")
            ),
            "named": lambda: __import__("megatron_scalevec.specs", fromlist=["hg"]).hg,
            "stock": lambda: scalevec_layer_spec(base, ScaleVecConfig()),
        }.get(case, lambda: scalevec_layer_spec(scalevec_layer_spec(base, config), config))()
        if case == "by-path":  # TransformerBlock itself wants the class
            spec.module = TransformerLayer
        if case == "outside":
            from megatron.core.transformer.spec_utils import build_module

            layer = build_module(spec, config=build_gpt("llama").config, layer_number=1)
            layer(torch.zeros(4, 1, 32), attention_mask=None)
        torch.manual_seed(7)
        model = build_gpt("llama", torch.float32, spec=spec, **mtp)
        if case == "differs":
            apply_scale_vectors(model, ScaleVecConfig(strategy="hg"))
        torch.manual_seed(7)
        other = build_gpt("llama", torch.float32, spec=base, **mtp)
        if case != "stock":
            apply_scale_vectors(other, config)
    except ScaleVecError as error:
        return {"error": str(error)}
    return {
        "error": None,
        "asks": repr(spec_config(spec)),
        "base_unchanged": repr(base) == before,
        "same": _start_of([model]) == _start_of([other]),
        "audit": audit(model).table() if case != "stock" else None,
    }


def _then(function, more):
    def both(*args, **kwargs):
        result = function(*args, **kwargs)
        more()
        return result

    return both


def _drop_tensor_parallel_sum(patches) -> None:
    from megatron_scalevec.layers import common

    patches.set(common, "sum_gradient_over_tensor_parallel", lambda vectors, group: vectors)


def _wrong_row_map(patches) -> None:
    """Every rank takes itself for the first one."""
    from megatron_scalevec import convert

    patches.wrap(convert, "qkv_row_map", lambda right: lambda **given: right(**{**given, "tp_rank": 0}))


def _mark_as_sharded(patches) -> None:
    """Vectors that every rank holds whole, counted on every rank in the gradient norm."""
    from megatron_scalevec.layers import linear

    def marked(add):
        def add_vector(owner, name, *args, **kwargs):
            add(owner, name, *args, **kwargs)
            for parameter in owner.parameters(recurse=False):
                if hasattr(parameter, "scalevec_info"):
                    parameter.tensor_model_parallel = True

        return add_vector

    patches.wrap(linear, "add_vector", marked)


def _forget_mtp(patches) -> None:
    """Layers inside the MTP block are passed over."""
    from megatron_scalevec import convert

    def without(find):
        def _layer_sites(path, *args):
            return () if path.startswith("mtp.") else find(path, *args)

        return _layer_sites

    patches.wrap(convert, "_layer_sites", without)
    everything = lambda model, sites: [(p, "stock") for p in model.parameters() if p.dim() == 1]  # noqa: E731
    patches.set(convert, "_plan_roles", everything)


SABOTAGE = {
    "tensor-parallel-sum": _drop_tensor_parallel_sum,
    "row-map": _wrong_row_map,
    "marked-as-sharded": _mark_as_sharded,
    "mtp-forgotten": _forget_mtp,
}


def compare_with_reference(cases: list[dict[str, Any]], dtype: str = "float64") -> list[dict[str, Any]]:
    """Build, convert, move away from the start, and compare with the reference on one sequence.

    Args:
        cases: Each with ``kind`` of model, ``config`` of the strategy and ``overrides`` of Megatron's
            configuration.
        dtype: Of the model; the reference is float64.

    Returns:
        For each case the largest differences, relative to the largest entry: ``start`` (logits before
        conversion against those after), ``logits``, and ``gradient`` over all trainable parameters; and
        ``problems``: what the audit finds missing.
    """
    from ranks.models import initialize_parallel

    initialize_parallel()
    return [_compare(getattr(torch, dtype), **case) for case in cases]


def _compare(
    dtype: torch.dtype, kind: str, config: dict[str, Any], overrides: dict[str, Any] | None = None
) -> dict[str, Any]:
    from reference import gpt_logits

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from ranks.models import SIZES, build_gpt, reference_of

    model = build_gpt(kind, dtype, **(overrides or {}))
    tokens = torch.randint(
        SIZES["vocabulary"], (SIZES["sequence"],), generator=torch.Generator().manual_seed(3)
    )
    position = torch.arange(SIZES["sequence"])[None]

    def logits():
        return model(tokens[None], position, None)[0].double()

    before = logits().detach()
    apply_scale_vectors(model, ScaleVecConfig(**config))
    result: dict[str, Any] = {"start": _difference(logits().detach(), before)}
    built = audit(model)
    result["vectors"] = len(built.vectors)
    fill_by_name(model, 0, 1)
    params, reference_config, leaves = reference_of(model)
    ours, expected = logits(), gpt_logits(tokens, params, reference_config)
    result["logits"] = _difference(ours.detach(), expected.detach())
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)).double()
    (ours * target).sum().backward()
    (expected * target).sum().backward()
    worst = 0.0
    # Some gradients are zero in exact arithmetic (a bias on all keys shifts no attention weight): what is
    # left of them is rounding, measured against the largest gradient of the model.
    floor = 1e-3 * max(float(leaf.grad.abs().max()) for leaf in leaves.values() if leaf.grad is not None)
    for name, param in model.named_parameters():
        if param.requires_grad:
            expected_grad = leaves[name].grad
            scale = max(float(expected_grad.abs().max()), floor, _size_of_terms(name, leaves))
            worst = max(worst, float((param.grad - expected_grad).abs().max()) / scale)
        elif param.grad is not None:
            raise AssertionError(f"{name} is frozen and got a gradient")
    result["gradient"] = worst
    return result


def compare_with_apex_norms(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As :func:`compare_with_reference`, with Megatron's norms over apex, and torch for apex's kernel."""
    from megatron.core.fusions import fused_layer_norm

    class Kernel:
        @staticmethod
        def forward(ctx, x, weight, bias, shape, eps):
            raise AssertionError("only its signature is looked at")

        @staticmethod
        def apply(x, weight, bias, shape, eps):
            return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    fused_layer_norm.HAVE_FUSED_LAYER_NORM = True
    fused_layer_norm.FusedLayerNormAffineFunction = Kernel
    norms = {"norm_class": fused_layer_norm.FusedLayerNorm}
    return compare_with_reference([{**case, "overrides": norms} for case in cases])


def _size_of_terms(name: str, leaves: dict[str, torch.Tensor]) -> float:
    """A scalar part's gradient is a sum over the channels in which much may cancel; its rounding is that of
    the terms. Zero for anything else."""
    for scalar, vector in (("_beta", "_alpha"), ("_magnitude", "_direction")):
        if name.endswith(scalar):
            base = name.removesuffix(scalar)
            whole = leaves[base + vector].grad
            if scalar == "_magnitude":  # the direction's gradient lacks the part along the direction
                return float(leaves[name].grad.abs().max() + whole.norm() * leaves[name].detach().abs().max())
            return float(whole.norm() * leaves[base + vector].detach().norm())
    return 0.0


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def _state(model: torch.nn.Module):
    """What an observer sees of a model: classes, parameters, whether they train, attributes."""
    return (
        [(name, type(module)) for name, module in model.named_modules()],
        {
            name: (p.detach().clone(), p.requires_grad, sorted(vars(p)))
            for name, p in model.named_parameters()
        },
    )


def _same(a, b) -> bool:
    return (
        a[0] == b[0]
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][k][0], b[1][k][0]) and a[1][k][1:] == b[1][k][1:] for k in a[1])
    )


def convert_trained(config: dict[str, Any], kind: str = "llama") -> dict[str, Any]:
    """Convert a model whose norms have moved away from one."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from ranks.models import SIZES, build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt(kind)
    fill_by_name(model, 0, 1)
    tokens = torch.arange(SIZES["sequence"])[None]

    def logits():
        return model(tokens, tokens, None).detach()

    before, state = logits(), _state(model)
    try:
        apply_scale_vectors(model, ScaleVecConfig(**config))
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": _same(state, _state(model))}
    norms = [m for n, m in model.named_modules() if n.endswith(("input_layernorm", "mlp_layernorm"))]
    return {
        "difference": _difference(logits(), before),
        "norms": {float(value) for norm in norms for value in norm.weight},
    }


def convert_refused(case: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask for the impossible and look at the model afterwards."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", layernorm_zero_centered_gamma=case == "zero-centered")
    last = model.decoder.layers[-1]
    if case == "twice":
        apply_scale_vectors(model, ScaleVecConfig(strategy="dp"))
    elif case == "wrapped":

        class Wrapper(torch.nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

        model = Wrapper(model)
    elif case == "linear":
        last.mlp.linear_fc1.__class__ = type("Other", (type(last.mlp.linear_fc1),), {})
    elif case == "attention":
        last.self_attention.__class__ = type("Latent", (type(last.self_attention),), {})
    elif case == "unknown-vector":
        model.decoder.extra = torch.nn.Parameter(torch.ones(3))
    state = _state(model)
    try:
        apply_scale_vectors(model, ScaleVecConfig(**(config or {"strategy": "hg"})))
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": _same(state, _state(model))}
    return {"error": "", "unchanged": False}


def audit_broken(breakage: str | None) -> dict[str, Any]:
    """Convert, break one thing, and audit with an optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer import get_standard_config_overrides as standard
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from megatron_scalevec.decay import with_decaying_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", torch.float32)
    sites = ("mtp",) if breakage == "nothing-there" else None
    config = ScaleVecConfig(strategy="hg", sites=sites)
    apply_scale_vectors(model, config)
    optimizer_config = OptimizerConfig(lr=0.1, weight_decay=0.1, optimizer="adam")
    overrides = standard(optimizer_config)
    if breakage != "no-decay-rule":
        overrides = with_decaying_vectors(overrides, "split")
    last = model.decoder.layers[-1]
    if breakage == "not-in-optimizer":
        last.mlp.linear_fc1.gamma_in_up.requires_grad_(False)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], config_overrides=overrides)
    if breakage == "drop-layer":
        last.mlp.linear_fc1.__class__ = ColumnParallelLinear
    elif breakage == "drop-vector":
        del last.mlp.linear_fc1.gamma_in_gate
    elif breakage == "thaw-norm":
        last.pre_mlp_layernorm.weight.requires_grad_(True)
        last.pre_mlp_layernorm.weight.scalevec_role = "stock"
    elif breakage == "late-vector":
        model.decoder.extra = torch.nn.Parameter(torch.ones(3))
    elif breakage == "other-config":
        config = ScaleVecConfig(strategy="dp")
    try:
        result = audit(wrapped, optimizer, config=config)
    except ScaleVecError as error:
        return {"error": str(error), "audit": None}
    return {"error": None, "audit": json.loads(result.to_json())}


def checkpoint_tensors(folder: str) -> dict[str, Any]:
    """Every tensor of a torch_dist checkpoint, complete, as numpy."""
    from megatron.core import dist_checkpointing

    torch.distributed.init_process_group("gloo")
    return dict(_tensors(dist_checkpointing.load_plain_tensors(folder), ""))


def _tensors(node: Any, path: str):
    if isinstance(node, torch.Tensor):
        yield path, node.float().numpy()
    elif isinstance(node, (dict, list, tuple)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _tensors(value, f"{path}/{key}")


def _hook_bindings() -> dict[str, Any]:
    """Every attribute that a hook replaces, as it is now."""
    from megatron_scalevec.integration import hooks
    from megatron_scalevec.patching import resolve

    found = {}
    for hook in hooks.HOOKS:
        owner, attribute = resolve(hook.target)
        found[hook.target] = getattr(owner, attribute)
        for module, _ in hook.by_name:
            other = sys.modules.get(module)
            if other is not None and hasattr(other, attribute):
                found[f"{module}:{attribute}"] = getattr(other, attribute)
    return found


def install_and_uninstall() -> dict[str, Any]:
    """Install twice, uninstall once."""
    from megatron_scalevec.integration import hooks

    before = _hook_bindings()
    first = hooks.install(["--scalevec-strategy", "hg"])
    once = _hook_bindings()
    second = hooks.install([])
    twice = _hook_bindings()
    hooks.uninstall()
    return {
        "targets": [hook.target for hook in hooks.HOOKS],
        "second_is_first": first is second and once == twice,
        "changed": sum(once[name] is not before[name] for name in before),
        "restored": _hook_bindings() == before and not hooks.installed(),
    }


def install_broken(breakage: str, target: str) -> dict[str, Any]:
    """Install after something has been taken away, and look at what is left changed."""
    import dataclasses

    import megatron.core.optimizer
    import megatron.core.package_info
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import training

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.integration import hooks

    if breakage == "missing" and target == "GPTModel.__init__":
        hooks.HOOKS = tuple(
            dataclasses.replace(h, target=h.target.replace("GPTModel", "GPTModelOfTomorrow"))
            if h.name == "model"
            else h
            for h in hooks.HOOKS
        )
        target = "GPTModelOfTomorrow.__init__"
    elif breakage == "missing":
        delattr(megatron.core.optimizer, target)
    elif breakage == "version":
        hooks.HOOKS = tuple(
            dataclasses.replace(h, versions=">=0.16.1,<0.17") if target in h.target else h
            for h in hooks.HOOKS
        )
    elif breakage == "replaced":
        setattr(training, target, lambda config: {})
    elif breakage == "megatron":
        megatron.core.package_info.__version__ = target
    stock = GPTModel.__init__
    try:
        hooks.install(["--scalevec-strategy", "hg"])
    except ScaleVecError as error:
        message = str(error).replace("GPTModelOfTomorrow", "GPTModel")
        return {
            "error": message,
            "restored": GPTModel.__init__ is stock and len(hooks._patches) == 0,
        }
    return {"error": "", "restored": False}


def launch_only(argv: list[str], script: str) -> bool:
    """Launch a script without recording anything."""
    from megatron_scalevec.integration import launch

    launch.launch(str(TESTS / "scripts" / script), argv)
    return True


def _bypass_model(patches) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_scalevec.integration import hooks

    stock = GPTModel.__init__
    patches.wrap(
        hooks, "install", lambda install: _then(install, lambda: setattr(GPTModel, "__init__", stock))
    )


def _bypass_decay(patches) -> None:
    from megatron.training import training

    from megatron_scalevec.integration import hooks

    stock = training.get_standard_config_overrides

    def put_back():
        training.get_standard_config_overrides = stock

    patches.wrap(hooks, "install", lambda install: _then(install, put_back))


SABOTAGE.update({"bypass model": _bypass_model, "bypass decay overrides": _bypass_decay})


def parse_arguments(argv: list[str]) -> dict[str, Any]:
    """What Megatron's parser makes of a command line with the hooks in place."""
    from megatron.training import arguments

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.integration import hooks

    sys.argv = ["x", *argv]
    try:
        hooks.install(argv)
        args = arguments.parse_args(ignore_unknown_args=True)
    except ScaleVecError as error:
        return {"error": str(error)}
    return {key: value for key, value in vars(args).items() if isinstance(value, (str, int, type(None)))}


def run_readme_code(code: str) -> str:
    """Execute the README's Python with a model, and return what it prints."""
    import io

    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {"gpt_model": build_gpt("llama")})
    return output.getvalue()


def gradients(config: dict[str, Any], kind: str, **sizes: Any) -> dict[str, Any]:
    """One forward and backward pass through megatron.core alone: loss and reduced gradients.

    Args:
        config: The strategy.
        kind: Of model.
        sizes: Of Megatron's groups; ``sequence_parallel`` goes to the model.

    Returns:
        ``loss``, and ``gradients`` of the parameters that every rank holds whole, by name.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.models import SIZES, build_gpt, initialize_parallel

    sequence_parallel = sizes.pop("sequence_parallel", False)
    initialize_parallel(**sizes)
    model = build_gpt(kind, sequence_parallel=sequence_parallel, **sizes)
    apply_scale_vectors(model, ScaleVecConfig(**config))
    fill_by_name(
        model,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    draw = torch.Generator().manual_seed(3)
    shape = (2, SIZES["sequence"])
    tokens = torch.randint(SIZES["vocabulary"], shape, generator=draw)
    # Not Megatron's cross-entropy, which computes in float32.
    target = torch.randn(*shape, SIZES["vocabulary"], generator=draw)
    position = torch.arange(shape[1]).expand(shape)
    loss = (wrapped(tokens, position, None) * target).mean()
    loss.backward()
    finalize_model_grads([wrapped])
    return {
        "loss": float(loss),
        "gradients": {
            name: param.main_grad.double().numpy().copy()
            for name, param in model.named_parameters()
            if param.requires_grad and not getattr(param, "tensor_model_parallel", False)
        },
    }


def linear_in_bfloat16(reparam: str) -> dict[str, float]:
    """One converted linear in bf16 against the same computation in plain torch.

    Returns:
        The largest difference of the output and of each gradient, in units in the last place (bf16).
    """
    from reference import product, unit

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", torch.bfloat16)
    config = ScaleVecConfig(strategy="hg", placement="dual", reparam=reparam)
    apply_scale_vectors(model, config)
    fill_by_name(model, 0, 1)
    linear = model.decoder.layers[0].mlp.linear_fc1
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, linear.input_size, generator=draw).bfloat16().requires_grad_()
    out, _ = linear(x)
    grad = torch.randn(out.shape, generator=draw).bfloat16()
    out.backward(grad)

    wide = {n: p.detach().double().requires_grad_() for n, p in linear.named_parameters()}

    def vector(name):
        if reparam == "none":
            return wide[name]
        if reparam == "product":
            return product(wide[f"{name}_beta"], wide[f"{name}_alpha"])
        return unit(wide[f"{name}_magnitude"], wide[f"{name}_direction"])

    halves = wide["weight"].chunk(2)
    w_eff = torch.cat(
        [
            half * vector(f"gamma_in_{branch}") * vector(f"gamma_out_{branch}")[:, None]
            for half, branch in zip(halves, ("gate", "up"))
        ]
    )
    plain_x = x.detach().clone().requires_grad_()
    plain_w = w_eff.detach().bfloat16().requires_grad_()
    expected = torch.nn.functional.linear(plain_x, plain_w)
    expected.backward(grad)
    w_eff.backward(plain_w.grad.double())
    found = {"output": _ulps(out, expected), "input": _ulps(x.grad, plain_x.grad)}
    for name, parameter in linear.named_parameters():
        found[name] = _ulps(parameter.grad, wide[name].grad)
    return found


def _ulps(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest distance, in bf16 units of each entry; entries near zero in units of the largest's 2^-8."""
    a, b = a.detach().double(), b.detach().double()
    exponent = torch.floor(torch.log2(b.abs().clamp_min(b.abs().max() * 2.0**-8)))
    return float(((a - b).abs() / 2.0 ** (exponent - 7)).max())


def _converted(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", dtype)
    apply_scale_vectors(model, ScaleVecConfig(**config))
    return model


def audit_table(config: dict[str, Any]) -> str:
    """The printed form."""
    from megatron_scalevec.audit import audit

    return audit(_converted(config)).table()


def write_audit(path: str) -> dict[str, str]:
    """Write, write again with an interruption, and write where nothing can be written."""
    import os

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.audit import audit

    record = audit(_converted({"strategy": "hg"}))
    record.write(path)
    found = {}

    def full(*args):
        raise OSError(28, "No space left on device")

    keep, os.replace = os.replace, full
    try:
        record.write(path)
    except ScaleVecError as error:
        found["interrupted"] = type(error.__cause__).__name__
    os.replace = keep
    try:
        record.write(os.path.dirname(path))
    except ScaleVecError as error:
        found["refused"] = str(error)
    return found


def own_loop(overrides: bool) -> dict[str, Any]:
    """Build model and optimizer by hand under the hooks, with Megatron's rules or with rules of one's own."""
    import io

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, ParamKey
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.integration import hooks
    from ranks.models import build_gpt, initialize_parallel

    hooks.install(["--scalevec-strategy", "hg"])
    import megatron.core.optimizer as optimizer

    initialize_parallel()
    model = build_gpt("llama", torch.float32)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    config = OptimizerConfig(lr=0.1, weight_decay=0.1)
    one_dimensional = ParamPredicate(name="1d", fn=lambda p: p.dim() == 1)
    own = {ParamKey(predicate=one_dimensional): {"wd_mult": 0.0}}
    rules = own if overrides else optimizer.get_standard_config_overrides(config)
    output, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(output):
            optimizer.get_megatron_optimizer(config, [wrapped], config_overrides=rules)
    except ScaleVecError as caught:
        error = str(caught)
    return {
        "error": error,
        "audited": hooks.session().audit is not None,
        "printed": output.getvalue(),
    }


def choose_for_cpu(argv: list[str]) -> str:
    """What is printed while Megatron's arguments are validated in CPU mode."""
    import io

    from megatron.training import arguments

    from megatron_scalevec.integration import hooks

    sys.argv = ["x", *argv]
    hooks.install(argv, cpu=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        arguments.validate_args(arguments.parse_args())
    return output.getvalue()


def fold_by_hand(config: dict[str, Any], overrides: dict[str, Any], drop: bool = False) -> float:
    """Copy W_eff and the remaining norm scales into a stock model; the difference of the logits.

    Args:
        config: The strategy.
        overrides: Of Megatron's configuration.
        drop: Copy W instead, as somebody would who forgets the vectors.
    """
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.layers.linear import FoldedLinear
    from megatron_scalevec.layers.norm import ScaledNorm
    from megatron_scalevec.vectors import compose_vector
    from ranks.models import SIZES, build_gpt, initialize_parallel

    initialize_parallel()
    stock, model = build_gpt("llama", **overrides), build_gpt("llama", **overrides)
    apply_scale_vectors(model, ScaleVecConfig(**config))
    fill_by_name(model, 0, 1)
    with torch.no_grad():
        theirs = dict(stock.named_modules())
        for name, module in model.named_modules():
            other = theirs[name]
            for key, param in module.named_parameters(recurse=False):
                if hasattr(other, key):
                    getattr(other, key).copy_(param)
            if isinstance(module, FoldedLinear) and not drop:
                other.weight.copy_(module.folded_weight())
            elif isinstance(module, ScaledNorm):
                gamma = compose_vector(module, "gamma")
                zero_centered = model.config.layernorm_zero_centered_gamma
                other.weight.copy_(gamma - 1 if zero_centered else gamma)
                if getattr(other, "bias", None) is not None:
                    other.bias.copy_(gamma * module.bias)
        tokens = torch.arange(SIZES["sequence"])[None]
        return _difference(model(tokens, tokens, None), stock(tokens, tokens, None))


def explain_line(arguments: list[str], of: int | None = None, **options: Any) -> dict[str, Any]:
    """What ``scalevec explain`` finds, or its sentence."""
    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.explain import explain
    from megatron_scalevec.explain.display import text

    try:
        found = explain(arguments, world_size=of, **options)
    except ScaleVecError as error:
        return {"error": str(error)}
    return {"error": None, "text": text(found), **json.loads(found.to_json())}


def dtypes(config: dict[str, Any]) -> set[str]:
    """Dtypes of all scale vectors of a float32 model that Megatron has cast to bf16."""
    from megatron_scalevec.vectors import vector_info

    model = _converted(config, torch.float32).bfloat16()
    vectors = [param for param in model.parameters() if vector_info(param) is not None]
    assert vectors and next(model.decoder.layers[0].mlp.parameters()).dtype is torch.bfloat16
    return {str(param.dtype).removeprefix("torch.") for param in vectors}
