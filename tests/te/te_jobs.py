"""What the ranks of the TransformerEngine tests do; see ``tests/ranks/jobs``."""

from __future__ import annotations

from typing import Any

import kernels
import torch
from ranks import jobs
from ranks.initial import name_of_expert
from ranks.jobs import building, training

TE = "transformer_engine"


def prepare() -> None:
    """Import TransformerEngine, and keep CPU mode from hiding it."""
    kernels.import_without_gpu()
    kernels.replace_kernels()
    from megatron_scalevec import cpu

    cpu._GPU_ONLY_PACKAGES = ("apex",)


def compare_with_reference(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the job of that name, on TransformerEngine's layers."""
    return jobs.compare_with_reference(
        [{**case, "overrides": {**case.get("overrides", {}), "implementation": TE}} for case in cases]
    )


def expert_gradients(**given: Any) -> dict[str, Any]:
    """As the job of that name, on TransformerEngine's layers."""
    kernels.replace_optimizers()
    return jobs.expert_gradients(**{**given, "overrides": {**given["overrides"], "implementation": TE}})


def expert_audit(overrides: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """As the job of that name, on TransformerEngine's grouped experts."""
    own = {"implementation": TE, "moe_grouped_gemm": True}
    return jobs.expert_audit(**given, overrides={**own, **(overrides or {})})


def round_trips(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the job of that name, on TransformerEngine's layers."""
    return jobs.round_trips(
        folder, [{**case, "overrides": {**case.get("overrides", {}), "implementation": TE}} for case in cases]
    )


def joined_and_apart(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save latent attention with one down-projection, load it into a model with two.

    Returns:
        Digests of both models' parameters by checkpoint key, the joined weight cut into its halves.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from ranks.initial import fill_by_name
    from ranks.jobs import storing
    from ranks.models import initialize_parallel

    initialize_parallel()
    found = []
    for joined in (True, False):
        overrides = {"implementation": TE, "mla_down_proj_fusion": joined}
        model, strategy = storing._build("mla", {"strategy": "unified"}, "float32", overrides)
        fill_by_name(model, 0, 1)
        if joined:
            storing.save(model, folder, strategy)
        else:  # the two differ in what TransformerEngine keeps of its own
            storing.load(model, folder, strict="ignore_all")
        found.append(
            {
                (entry.key, entry.global_offset): float(entry.data.double().sum())
                for entry in model.sharded_state_dict().values()
                if isinstance(entry, ShardedTensor) and "down_proj" in entry.key
            }
        )
    return tuple(found)


def fold_joined(folder: str) -> float:
    """Fold a model whose one down-projection has one input scale; the difference of the products."""
    from ranks.initial import fill_by_name
    from ranks.jobs import storing
    from ranks.models import initialize_parallel

    from megatron_scalevec.checkpoint.commands import fold_checkpoint
    from megatron_scalevec.checkpoint.store import CheckpointReader
    from megatron_scalevec.checkpoint.verify import compare_products

    initialize_parallel()
    overrides = {"implementation": TE, "mla_down_proj_fusion": True}
    model, strategy = storing._build("mla", {"strategy": "or"}, "float32", overrides)
    fill_by_name(model, 0, 1)
    storing.save(model, f"{folder}/saved", strategy)
    before = storing._logits(model)
    fold_checkpoint(f"{folder}/saved", f"{folder}/out", check=False)
    stock, _ = storing._build("mla", None, "float32", overrides)
    storing.load(stock, f"{folder}/out")
    paths = (CheckpointReader(f"{folder}/{name}") for name in ("saved", "out"))
    return max(storing._difference(storing._logits(stock), before), compare_products(*paths))


def gradients(sabotage: str | None = None, **given: Any) -> dict[str, Any]:
    """As the job of that name, on TransformerEngine's layers.

    ``sabotage``: ``summed-twice`` (vectors of a weight that every rank holds whole are summed as those of a
    shared one are), ``not-summed`` (the mark that makes Megatron sum them is missing).
    """
    from megatron_scalevec.layers import te

    if sabotage == "summed-twice":
        whole = te.ScaleVecTELinear.folded_weight

        def folded_weight(self):
            self.__dict__["parallel"] = "column"
            return whole(self)

        te.ScaleVecTELinear.folded_weight = folded_weight
    elif sabotage == "not-summed":
        convert = te.ScaleVecTELinear.convert.__func__

        def unmarked(cls, linear, *args, **kwargs):
            convert(cls, linear, *args, **kwargs)
            for name, parameter in linear.named_parameters():
                if "gamma" in name:
                    parameter.sequence_parallel = False

        te.ScaleVecTELinear.convert = classmethod(unmarked)
    return jobs.gradients(implementation=TE, **given)


def _build(kind: str = "llama", dtype: torch.dtype = torch.float64, implementation: str = TE, **overrides):
    from ranks.models import build_gpt

    return build_gpt(kind, dtype, implementation, **overrides)


def _convert(model, **config: Any) -> None:
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors

    apply_scale_vectors(model, ScaleVecConfig(**config))


def _stock_name(name: str, latent: bool) -> str:
    """A local model's parameter name as TransformerEngine's layers have it."""
    name = name_of_expert(name, 0)
    if latent:
        for which in ("q", "kv"):
            name = name.replace(f".{which}_layernorm.", f".linear_{which}_up_proj.layer_norm_")
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def describe(
    kind: str, config: dict[str, Any], device: str = "cpu", experts: str | None = None, **overrides: Any
) -> dict[str, Any]:
    """Parameters and checkpoint entries of the converted model, for both implementations.

    Returns:
        Per implementation: ``parameters``, name to what a vector or any trainable 1-D parameter is;
        ``checkpoint``, key to what would be saved, without TransformerEngine's extra states; ``audit``.
    """
    from dataclasses import astuple

    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from ranks.models import EXPERTS, initialize_parallel

    from megatron_scalevec.audit import audit
    from megatron_scalevec.convert import parameter_roles
    from megatron_scalevec.vectors import vector_info, was_added

    sizes = {name: value for name, value in overrides.items() if name.endswith("_parallel_size")}
    initialize_parallel(**sizes)
    overrides = {**EXPERTS.get(experts, {}), **overrides}
    if device == "meta":
        overrides = {**overrides, "use_cpu_initialization": False, "init_model_with_meta_device": True}
    result = {}
    # Local layers name their device, which in CPU mode is the CPU.
    for implementation in ("local", TE) if device == "cpu" else (TE,):
        # Local experts are a module each.
        grouped = {"moe_grouped_gemm": True} if experts and implementation == TE else {}
        with torch.device(device):
            model = _build(kind, torch.float32, implementation, **overrides, **grouped)
        _convert(model, **config)
        roles = parameter_roles(model)
        parameters = {}
        for name, parameter in model.named_parameters():
            # Embeddings and the output head are Megatron's own, whose device is the CPU in CPU mode.
            assert parameter.device.type == device or "layers" not in name, name
            info = vector_info(parameter)
            attributes = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
            parameters[_stock_name(name, kind == "mla")] = {
                "shape": tuple(parameter.shape),
                "trains": parameter.requires_grad,
                "role": roles.get(name),
                "info": None if info is None else astuple(info),
                "added": was_added(parameter),
                # Megatron's own parameters differ in these between the two.
                "attributes": [was_added(parameter) and getattr(parameter, a, None) for a in attributes],
                "sequence_parallel": bool(getattr(parameter, "sequence_parallel", False)),
            }
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        entries = {}
        for entry in model.sharded_state_dict(metadata=metadata).values() if device == "cpu" else ():
            if isinstance(entry, ShardedTensor):
                entries[f"{entry.key}@{entry.global_offset}"] = (
                    tuple(entry.global_shape),
                    tuple(entry.local_shape),
                    entry.axis_fragmentations,
                    entry.replica_id,
                )
        found = audit(model)
        result[implementation] = {
            "parameters": parameters,
            "checkpoint": entries,
            "audit": (
                *(found.linears_converted, found.norm_scales_retired),
                *(found.parameters_stock, found.parameters_added, found.built_vectors),
            ),
        }
    return result


def train_once(config: dict[str, Any], kind: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A sum over all logits from start values by name, and the gradients of the vectors on linears."""
    from megatron.core import parallel_state
    from ranks.initial import fill_by_name
    from ranks.models import SIZES, initialize_parallel

    size = overrides.get("tensor_model_parallel_size", 1)
    initialize_parallel(tensor_model_parallel_size=size)
    model = _build(kind, **overrides)
    _convert(model, **config)
    fill_by_name(model, parallel_state.get_tensor_model_parallel_rank(), size)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(SIZES["vocabulary"], (2, SIZES["sequence"]), generator=generator)
    position = torch.arange(SIZES["sequence"])[None].expand(2, -1)
    logits = model(tokens, position, None)
    loss = (logits * torch.randn(logits.shape, generator=generator)).sum()
    loss.backward()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if "linear" in n and "gamma" in n}
    return {"loss": loss.item(), "gradients": gradients}


def fp32_vectors() -> dict[str, Any]:
    """Vectors in float32 in a bf16 model, through Megatron's cast of the whole model, in two passes."""
    from ranks.models import SIZES, initialize_parallel

    initialize_parallel()
    model = _build("llama", torch.bfloat16)
    _convert(model, strategy="unified", vector_dtype="fp32")
    model.bfloat16()
    tokens = torch.arange(SIZES["sequence"])[None]
    for _ in range(2):
        model(tokens, tokens, None).float().square().mean().backward()
    vectors = {n: p for n, p in model.named_parameters() if "gamma" in n}
    return {
        "dtypes": {str(p.dtype) for p in vectors.values()},
        "others": {str(p.dtype) for n, p in model.named_parameters() if n not in vectors},
        "moved": all(bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in vectors.values()),
    }


def retired_and_flags(strategy: str, **overrides: Any) -> dict[str, Any]:
    """Fused norms, and the flags by which TransformerEngine adds to ``main_grad`` itself."""
    from ranks.initial import fill_by_name
    from ranks.models import SIZES, initialize_parallel

    initialize_parallel()
    model = _build("gpt2" if strategy != "unified" else "llama", **overrides)
    fill_by_name(model, 0, 1)
    if overrides.get("layernorm_zero_centered_gamma"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("layer_norm_weight", "layernorm.weight")):
                    parameter.sub_(1)
    layer = model.decoder.layers[0]
    linears = {
        "qkv": layer.self_attention.linear_qkv,
        "proj": layer.self_attention.linear_proj,
        "fc1": layer.mlp.linear_fc1,
        "fc2": layer.mlp.linear_fc2,
    }
    for linear in linears.values():
        linear.fuse_wgrad_accumulation = True
    tokens = torch.arange(SIZES["sequence"])[None]
    before = model(tokens, tokens, None).detach()
    _convert(model, strategy=strategy)
    after = model(tokens, tokens, None).detach()
    norm = linears["qkv"]
    return {
        "fused": {name: linear.fuse_wgrad_accumulation for name, linear in linears.items()},
        "classes": {name: type(linear).__name__ for name, linear in linears.items()},
        "difference": float((after - before).abs().max() / before.abs().max()),
        "norm": sorted(set(norm.layer_norm_weight.tolist())),
        "trains": norm.layer_norm_weight.requires_grad,
        "role": getattr(norm.layer_norm_weight, "scalevec_role", None),
    }


def refused(case: str) -> dict[str, Any]:
    """Make a linear unfit, convert, and look at the model; or break the forward pass afterwards."""
    import transformer_engine.pytorch as te
    from ranks.models import SIZES, initialize_parallel
    from transformer_engine.pytorch.module._common import WeightGradStore

    from megatron_scalevec import ScaleVecError

    initialize_parallel()
    model = _build()
    last = model.decoder.layers[-1]
    linear = last.mlp.linear_fc1
    if case == "no-interception":
        del te.LayerNormLinear._get_weight_and_bias_tensors
    elif case == "split-weight":
        linear.weight_names = ["gate_weight", "up_weight"]
    elif case == "quantized":
        linear.weight.__class__ = type("Quantized", (torch.nn.Parameter,), {})
    elif case == "fp8":
        model.config.fp8 = "hybrid"
    elif case == "delayed":
        linear.wgrad_store = WeightGradStore(True)
    elif case == "overlap":
        linear.ub_overlap_ag_fprop = True
    elif case == "two-norms":
        last.pre_mlp_layernorm = te.RMSNorm(SIZES["hidden"], device="cpu")
    before = building._state(model)
    try:
        _convert(model, strategy="hg")
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": building._same(before, building._state(model))}
    if case == "bypassed":
        te.LayerNormLinear.forward = lambda self, inp, **_: inp @ self.weight.T
        tokens = torch.arange(SIZES["sequence"])[None]
        try:
            model(tokens, tokens, None)
        except RuntimeError as error:
            return {"error": str(error), "unchanged": True}
    return {"error": "", "unchanged": False}


def norm_with_gamma(
    kind: str, zero_centered: bool = False, sabotage: bool = False, small: bool = False
) -> dict[str, Any]:
    """A norm of TransformerEngine's with γ = β α, forward and backward, beside plain torch; float64, or
    bfloat16 where γ is to be ``small``.

    ``sabotage``: its forward pass does not hand its parameters to autograd.
    """
    import transformer_engine.pytorch as te
    from megatron.core.extensions import transformer_engine as of_megatron
    from transformer_engine.pytorch.ops.basic import layer_norm, rmsnorm

    from megatron_scalevec.layers.norm import scale_norm
    from megatron_scalevec.vectors import VectorInfo

    norm_class = getattr(te, kind, None) or getattr(of_megatron, kind)
    rows, size, eps = 24, 16, 1e-5
    torch.manual_seed(0)
    dtype = torch.bfloat16 if small else torch.float64
    norm = norm_class(size, eps=eps, device="cpu", dtype=dtype, zero_centered_gamma=zero_centered)
    x, g = (torch.randn(rows, size, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    info = VectorInfo("attention", "q", "out", 1, "norm", "product")
    scale_norm(norm, info, "output", zero_centered=zero_centered, dtype=None)
    parts = {"beta": norm.gamma_beta, "alpha": norm.gamma_alpha, "x": x}
    if kind == "LayerNorm":
        parts["bias"] = norm.bias
    with torch.no_grad():
        for name in parts.keys() - {"x"}:
            parts[name].copy_(torch.rand(parts[name].shape) + 0.5)
        if small:
            parts["beta"].fill_(1e-3)
    seen = []
    module, name = (layer_norm, "layernorm_fwd") if kind == "LayerNorm" else (rmsnorm, "rmsnorm_fwd")
    kernel = getattr(module, name)

    def watched(x, weight, *more):
        seen.append(weight.detach().clone())
        return kernel(x, weight, *more)

    setattr(module, name, watched)
    if sabotage:
        norm_class.forward = lambda self, x: x * self.weight.detach()
    try:
        out = norm(x)
    except RuntimeError as error:
        return {"error": str(error)}
    if isinstance(out, tuple):
        out, residual = out
        assert torch.equal(residual, x)
    last = type(out.grad_fn).__name__
    out.backward(g)

    wide = {name: value.detach().double().requires_grad_() for name, value in parts.items()}
    centered = wide["x"] - (wide["x"].mean(-1, keepdim=True) if kind == "LayerNorm" else 0)
    plain = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) + wide.get("bias", 0)
    gamma = wide["beta"] * wide["alpha"]
    expected = plain * gamma
    expected.backward(g.double())
    errors = {n: float((p.grad - wide[n].grad).norm() / wide[n].grad.norm()) for n, p in parts.items()}
    return {
        "last": last,
        "scales": [torch.equal(scale, gamma.to(dtype)) for scale in seen],
        "own": set(norm.weight.tolist()),
        "untouched": norm.weight.grad is None,
        "errors": {"out": float((out - expected).norm() / expected.norm()), **errors},
    }


def own_hybrid_stack(**overrides: Any) -> dict[str, Any]:
    """The audit of Megatron's own stack of hybrid layers: latent attention and an MLP."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from ranks.models import SIZES, initialize_parallel, settings_of

    from megatron_scalevec.audit import audit

    initialize_parallel()
    settings = {**settings_of("mla", torch.float32), "num_layers": 2, **overrides}
    latent = hybrid_stack_spec.submodules.mla_layer.submodules.self_attention.submodules
    latent.core_attention = DotProductAttention  # the weights are not in it
    model = HybridModel(
        MLATransformerConfig(**settings),
        hybrid_stack_spec=hybrid_stack_spec,
        vocab_size=SIZES["vocabulary"],
        max_sequence_length=SIZES["sequence"],
        hybrid_layer_pattern="+-",
    )
    _convert(model, strategy="hg")
    found = audit(model)
    return {"linears": found.linears_converted, "vectors": found.built_vectors}


def latent_refused(**overrides: Any) -> str:
    """Convert latent attention on all ranks; what is said."""
    from ranks.models import initialize_parallel

    from megatron_scalevec import ScaleVecError

    initialize_parallel(tensor_model_parallel_size=overrides.get("tensor_model_parallel_size", 1))
    model = _build("mla", **overrides)
    try:
        _convert(model, strategy="hg")
    except ScaleVecError as error:
        return str(error)
    return ""


def classes_by_name() -> bool:
    """Whether pickle finds every class of a converted model where it says it is."""
    import pickle

    from ranks.models import initialize_parallel

    initialize_parallel()
    model = _build()
    _convert(model, strategy="unified")
    classes = {type(module) for module in model.modules()}
    return all(pickle.loads(pickle.dumps(cls)) is cls for cls in classes)


def gpu_check_on_the_cpu(implementation: str, precision: str, broken: bool = False) -> dict[str, Any]:
    """The functions of benchmarks/gpu_check.py, on models small enough for a CPU.

    ``broken``: the linears multiply by their raw weight.
    """
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import gpu_check
    from ranks.models import initialize_parallel

    from megatron_scalevec.layers.linear import FoldedLinear

    if broken:
        FoldedLinear.folded_weight = lambda self: (
            self.weight + sum(0 * p.sum() for n, p in self._parameters.items() if "gamma" in n)
        )
    initialize_parallel()
    rows = [
        gpu_check.compare(implementation, precision, kind, strategy, device="cpu")
        for kind, strategy in (("llama", "unified"), ("gpt2", "dp"))
    ]
    lines = [gpu_check.describe_numbers(row) for row in rows]
    return {"right": [row["right"] for row in rows], "lines": lines}


def spec_and_call(strategy: str) -> bool:
    """Whether a layer spec and the call build the same model of TransformerEngine's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from ranks.models import initialize_parallel

    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.specs import scalevec_layer_spec

    initialize_parallel()
    base = get_gpt_layer_with_transformer_engine_spec()
    base.submodules.self_attention.submodules.core_attention = DotProductAttention
    torch.manual_seed(7)
    called = _build(dtype=torch.float32, spec=base)
    _convert(called, strategy=strategy)
    torch.manual_seed(7)
    built = _build(dtype=torch.float32, spec=scalevec_layer_spec(base, ScaleVecConfig(strategy=strategy)))
    return training._start_of([built]) == training._start_of([called])


def convert_grouped(case: str) -> dict[str, Any]:
    """Make grouped experts unfit, convert, and look at the model; or break the forward pass afterwards."""
    import transformer_engine.pytorch as te
    from ranks.models import EXPERTS, SIZES, initialize_parallel

    from megatron_scalevec import ScaleVecError

    initialize_parallel()
    model = _build(moe_grouped_gemm=True, **EXPERTS["mixtral"])
    linear = model.decoder.layers[-1].mlp.experts.linear_fc1
    linear.fuse_wgrad_accumulation = True
    if case == "no-interception":
        linear._get_weight_tensors = None
    elif case == "quantized":
        linear.weight0.__class__ = type("Quantized", (torch.nn.Parameter,), {})
    before = building._state(model)
    try:
        _convert(model, strategy="hg")
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": building._same(before, building._state(model))}
    if case == "bypassed":
        te.GroupedLinear.forward = lambda self, inp, *_, **__: inp @ self.weight0.T
        tokens = torch.arange(SIZES["sequence"])[None]
        try:
            model(tokens, tokens, None)
        except RuntimeError as error:
            return {"error": str(error), "unchanged": True}
    return {"error": "", "unchanged": False, "fused": linear.fuse_wgrad_accumulation}


def stock_entries(kind: str, experts: str) -> dict[str, tuple[int, ...] | None]:
    """What a stock model of TransformerEngine's layers asks of a checkpoint.

    Args:
        kind: Of model, see :func:`ranks.models.build_gpt`.
        experts: ``none``, or four as ``sequential`` or ``grouped`` linears.

    Returns:
        Key to the whole tensor's shape; name of an extra state to None.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_base
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from ranks.models import initialize_parallel

    initialize_parallel()
    grouped = experts == "grouped"
    overrides: dict[str, Any] = {}
    if experts != "none":
        overrides = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
        overrides["moe_grouped_gemm"] = grouped
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=overrides.get("num_moe_experts"), moe_grouped_gemm=grouped, qk_layernorm=True
    )
    spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    model = _build(kind, torch.float32, spec=spec, **overrides)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    entries, _ = extract_sharded_base(state)
    found: dict[str, tuple[int, ...] | None] = {}
    for entry in _leaves(entries):
        if isinstance(entry, ShardedObject):
            found[entry.unique_key] = None
        else:
            found[entry.key] = tuple(entry.global_shape)
    return found


def _leaves(node: Any):
    if isinstance(node, dict):
        node = node.values()
    elif not isinstance(node, (list, tuple)):
        yield node
        return
    for item in node:
        yield from _leaves(item)


def compare_executions(cases: list[dict[str, Any]], **given: Any) -> list[dict[str, Any]]:
    """As the job of that name, on TransformerEngine's layers."""
    kernels.replace_optimizers()
    return jobs.compare_executions(
        [{**case, "model": {"implementation": TE, **case.get("model", {})}} for case in cases], **given
    )


def telemetry_of_a_step(cases: list[dict[str, Any]], **given: Any) -> list[dict[str, Any] | None]:
    """As the job of that name, on TransformerEngine's layers."""
    kernels.replace_optimizers()
    return jobs.telemetry_of_a_step(
        [{**case, "model": {"implementation": TE, **case.get("model", {})}} for case in cases], **given
    )


telemetry_by_the_reference = jobs.telemetry_by_the_reference
