"""Both modes of execution side by side: steps of Megatron's own optimizers on small models."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from ranks.initial import fill_by_name
from ranks.jobs.faults import FAULTS

__all__ = [
    "change_after_setting_up",
    "change_from_outside",
    "compare_executions",
    "copy_without_folding",
    "load_for_evaluation",
    "set_up_again",
    "split_cut_norms",
    "start_from_dead_channels",
    "train_frozen",
    "train_unrounded",
    "train_without_an_engine",
    "train_without_ddp",
    "wrap_in_torch",
]

_STEPS = 20
_STEPS_ROUNDED = 12  # where every strategy and layout is trained three times more


@contextlib.contextmanager
def _separate_masters():
    """Have Megatron's mixed-precision optimizers take float32 parameters for half-precision ones.

    Live weights and masters are then both float32: no rounding stands between the two modes.
    """
    original = torch.Tensor.type

    def type_(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return "torch.cuda.BFloat16Tensor" if found == "torch.cuda.FloatTensor" else found

    torch.Tensor.type = type_
    try:
        yield
    finally:
        torch.Tensor.type = original


def compare_executions(
    cases: list[dict[str, Any]],
    sequence_parallel: bool = False,
    fault: str | None = None,
    rounded: bool = False,
    instances: int = 1,
    **sizes: int,
) -> list[dict[str, Any]]:
    """Train every case in both modes.

    Args:
        cases: ``config`` of the strategy; ``kind`` of model, or ``pattern`` of a hybrid; ``experts``: a key
            of :data:`ranks.models.EXPERTS`; ``without_tokens``: an expert that no token is sent to;
            ``precision`` (``exact``: float32 live weights beside float32 masters; ``bf16``; ``fp32``: float32
            live weights alone); ``distributed``: the distributed optimizer; ``overlap``: of the gradient
            reduction and of the gathering of parameters; ``model``: overrides of the model's configuration;
            ``ddp``: of DDP's; ``optimizer``: its name; ``layer_wise``: whether every weight is stepped on one
            data-parallel rank, and everything else by the distributed optimizer behind it; ``nudges``: by
            which some start values are scaled in further runs by autograd.
        sequence_parallel: Of the model.
        fault: Of :data:`ranks.jobs.faults.FAULTS`, in the optimizer's mode.
        rounded: Train every case in bfloat16 as well, by autograd a second time with a quarter of the start
            values rounded otherwise.
        instances: Of the distributed optimizer.
        sizes: Of Megatron's groups.

    Returns:
        Per case, by mode (``nudged``: the further runs, a list; in bfloat16 with ``bf16 `` in front):
        ``losses``, ``norms`` of the gradient, ``moved``: what the masters of vectors have moved by, of all
        that every tensor-parallel rank holds whole. And ``check``: the first split's largest error next to
        float64 autograd on the same gradient (``weight`` and ``vectors``), and ``live``: whether all live
        weights are cast(fold(masters)) at the end.
    """
    from ranks.models import initialize_parallel

    initialize_parallel(**sizes, num_distributed_optimizer_instances=instances)
    results = []
    for case in cases:
        case.setdefault("ddp", {})["num_distributed_optimizer_instances"] = instances
        nudges = case.pop("nudges", ())

        def trained(mode: str, case=case, **more: Any) -> dict[str, Any]:
            own = fault if mode == "optimizer" else None
            return _train(mode, sequence_parallel, own, sizes, **case, **more)

        result: dict[str, Any] = {mode: trained(mode) for mode in ("optimizer", "autograd")}
        result["nudged"] = [trained("autograd", nudged=nudge) for nudge in nudges]
        if rounded:
            half = {"precision": "bf16", "steps": _STEPS_ROUNDED}
            result |= {f"bf16 {mode}": trained(mode, **half) for mode in ("optimizer", "autograd")}
            result["bf16 nudged"] = [trained("autograd", nudged=2**-8, **half)]
        results.append(result)
    return results


def _train(
    mode: str,
    sequence_parallel: bool,
    fault: str | None,
    sizes: dict[str, int],
    *,
    steps: int = _STEPS,
    **case: Any,
) -> dict[str, Any]:
    from megatron_scalevec.execution.optimizer import engine_of, execute_in_optimizer
    from megatron_scalevec.layers.common import Folded

    chunks, wrapped, stepper = _build(mode, sequence_parallel, sizes, **case)
    record: dict[str, Any] = {"losses": [], "norms": [], "check": None}
    if mode == "optimizer":
        execute_in_optimizer(stepper, wrapped)
        stepper.reload_model_params()
        assert not any(isinstance(module, Folded) for chunk in chunks for module in chunk.modules())
        _record_check(engine_of(stepper), record)
        if fault:
            FAULTS[fault](stepper, wrapped)
    start = _whole_vectors(chunks, stepper)
    for step in range(steps):
        loss, norm = _step(wrapped, stepper, step, squared=case.get("precision") == "bf16")
        record["losses"].append(loss)
        record["norms"].append(norm)
    for chunk in wrapped:
        chunk.disable_forward_pre_hook() if chunk.ddp_config.overlap_param_gather else None
    record["moved"] = {name: value - start[name] for name, value in _whole_vectors(chunks, stepper).items()}
    if mode == "optimizer":
        record["live"] = _live_is_folded(engine_of(stepper))
        record["sets"] = len(engine_of(stepper).sets)
    return record


def _whole_vectors(chunks, stepper) -> dict[str, np.ndarray]:
    """Masters of the vectors that every tensor-parallel rank holds whole, by chunk and name."""
    from megatron_scalevec.execution.members import members_of

    members = members_of(stepper)
    return {
        f"{index} {name}": _gathered(
            next(member for member in members if param in member.params), param, lambda shard: shard.master
        ).numpy()
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
        if param.requires_grad and not getattr(param, "tensor_model_parallel", False) and param.dim() == 1
    }


def _build(
    mode: str,
    sequence_parallel: bool,
    sizes: dict[str, int],
    *,
    config: dict[str, Any] | None,
    precision: str = "exact",
    distributed: bool = True,
    overlap: bool = False,
    ddp: dict[str, Any] | None = None,
    optimizer: str = "adam",
    layer_wise: bool = False,
    nudged: float = 0.0,
    frozen: str | None = None,
    **model: Any,
):
    """(the model's chunks, the same wrapped for data parallelism, optimizer); stock without ``config``."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.execution.folds import fold_live_weights

    tp = parallel_state.get_tensor_model_parallel_rank(), sizes.get("tensor_model_parallel_size", 1)
    strategy = ScaleVecConfig() if config is None else ScaleVecConfig(**config, execution=mode)
    gather = overlap and distributed
    chunks, wrapped = [], []
    for stage in range(sizes.get("virtual_pipeline_model_parallel_size", 1)):
        chunk = _build_chunk(
            stage,
            torch.bfloat16 if precision == "bf16" else torch.float32,
            {"sequence_parallel": sequence_parallel, **sizes},
            **model,
        )
        apply_scale_vectors(chunk, strategy)
        fill_by_name(chunk, *tp)
        for param in chunk.parameters():
            _nudge(param, nudged)
        fold_live_weights(chunk)
        for name, param in chunk.named_parameters():
            if frozen and frozen in name:
                param.requires_grad_(False)
        chunks.append(chunk)
        wrapping = {
            "use_distributed_optimizer": distributed,
            "overlap_grad_reduce": overlap,
            "overlap_param_gather": gather,
            "grad_reduce_in_fp32": True,
            **(ddp or {}),
        }
        wrapping = DistributedDataParallelConfig(**wrapping)
        layout = {"full_param_layout": _layer_wise_layout(chunk, wrapping)} if layer_wise else {}
        wrapped.append(DistributedDataParallel(chunk.config, wrapping, chunk, **layout))
    with _separate_masters() if precision == "exact" else contextlib.nullcontext():
        stepper = _optimizer_of(
            wrapped,
            strategy.weight_decay,
            optimizer=optimizer,
            bf16=precision != "fp32" or layer_wise,
            use_distributed_optimizer=distributed and not layer_wise,
            overlap_param_gather=gather,
            **({"use_layer_wise_distributed_optimizer": True} if layer_wise else {}),
        )
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            syncs = [each.no_sync for each in wrapped]
            chunk.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return chunks, wrapped, stepper


def _optimizer_of(wrapped, weight_decay: str, **settings: Any):
    """Megatron's optimizer over wrapped chunks; ``settings`` of ``OptimizerConfig`` beside its usual ones."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    from megatron_scalevec.decay import with_decaying_vectors

    usual = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "bf16": True}
    steps = OptimizerConfig(**{**usual, **settings})
    overrides = with_decaying_vectors(get_standard_config_overrides(steps), weight_decay)
    stepper = get_megatron_optimizer(steps, wrapped, config_overrides=overrides)
    for group in stepper.param_groups:
        group["lr"] = steps.lr
    return stepper


@torch.no_grad()
def _nudge(param: torch.nn.Parameter, by: float) -> None:
    """Scale an eighth of the entries by 1 + ``by``, and another by 1 - ``by``; the same on every rank."""
    signs = torch.randint(8, param.shape, generator=torch.Generator().manual_seed(param.numel()))
    param.mul_(1 + by * ((signs == 1).float() - (signs == 0).float()))


def _layer_wise_layout(chunk: torch.nn.Module, ddp_config: Any) -> Any:
    """As Megatron's ``get_model`` makes it."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import layer_wise_optimizer

    layer_wise_optimizer.tag_params_for_buffer_routing([chunk])
    return layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
        [param for param in chunk.parameters() if param.requires_grad],
        None,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
    )


def _build_chunk(
    stage: int,
    dtype: torch.dtype,
    sizes: dict[str, Any],
    *,
    kind: str = "llama",
    pattern: str | None = None,
    experts: str | None = None,
    without_tokens: int | None = None,
    model: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """One of this rank's chunks; arguments as of :func:`compare_executions`."""
    from megatron.core import parallel_state

    from ranks.hybrids import build_hybrid
    from ranks.models import EXPERTS, build_gpt

    if pattern is not None:
        return build_hybrid(pattern, dtype, **sizes, **(model or {}))
    chunks = sizes.get("virtual_pipeline_model_parallel_size")
    if chunks:
        sizes = {**sizes, "vp_stage": stage}
    rank, ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        sizes.get("pipeline_model_parallel_size", 1),
    )
    ends = {
        "pre_process": rank == 0 and stage == 0,
        "post_process": rank == ranks - 1 and stage == (chunks or 1) - 1,
    }
    built = build_gpt(
        dtype=dtype, **{"kind": kind, **EXPERTS.get(experts, {}), **sizes, **ends, **(model or {})}
    )
    if without_tokens is not None:
        for name, bias in built.named_buffers():
            if name.endswith("expert_bias"):
                bias[without_tokens] = -1e4
    return built


def _step(wrapped, stepper, step: int, squared: bool = False) -> tuple[float, float]:
    """Two microbatches and an update: loss over all ranks, norm of the gradient.

    The loss is the product of outputs and targets; ``squared``: the square of their distance, without the
    constant in it.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from ranks.models import SIZES

    shape, microbatches = (2, SIZES["sequence"]), 2
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    position = torch.arange(shape[1]).expand(shape)
    loss = torch.zeros(())

    def draw(microbatch: int):
        generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
        tokens = torch.randint(SIZES["vocabulary"], shape, generator=generator)
        return tokens, torch.randn(*shape, SIZES["vocabulary"], generator=generator)

    def forward(batches, model):
        tokens, target = next(batches)

        def loss_of(output):
            output = output.float()
            own = (output * (output / 2 - target if squared else target)).mean()
            loss.add_(own.detach() / microbatches)
            return own, {}

        return model(tokens, position, None), loss_of

    for chunk in wrapped:
        chunk.zero_grad_buffer()
    stepper.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter([draw(i) for i in range(microbatches)]) for _ in wrapped],
        model=wrapped,
        num_microbatches=microbatches,
        seq_length=shape[1] * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=shape[0],
        forward_only=False,
    )
    success, norm, _ = stepper.step()
    assert success
    torch.distributed.all_reduce(loss)
    return float(loss), float(norm)


def start_from_dead_channels(reparam: str) -> dict[str, bool]:
    """Load a model without its optimizer's state in which some entries of γ are zero, and train on."""
    from megatron_scalevec.execution.optimizer import engine_of, execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()
    [gpt], wrapped, stepper = _build(
        "optimizer", False, {}, config={"strategy": "dp", "reparam": reparam}, precision="bf16"
    )
    execute_in_optimizer(stepper, wrapped)
    linear = gpt.decoder.layers[0].mlp.linear_fc1
    name = {"none": "", "product": "_alpha", "unit": "_direction"}[reparam]
    with torch.no_grad():
        getattr(linear, f"gamma_in_up{name}")[3] = 0
        getattr(linear, f"gamma_out_gate{name}")[5] = 0
        half = linear.weight.shape[0] // 2
        linear.weight[half:, 3] = 0
        linear.weight[5] = 0
    live = linear.weight.detach().clone()
    stepper.reload_model_params()
    [one] = engine_of(stepper).sets
    [fold] = [fold for fold in one.folds if fold.owner is linear]
    revived = one.table.gamma(fold.inner[1])[3], one.table.gamma(fold.outer[0])[5]
    found = {
        "function_kept": torch.equal(live, linear.weight),
        "revived": all(abs(float(value) - 1) < 1e-6 for value in revived),
        "live_is_folded": _live_is_folded(engine_of(stepper)),
    }
    for step in range(3):
        _step(wrapped, stepper, step)
    found["learns"] = bool(linear.weight[half:, 3].any()) and bool(linear.weight[5].any())
    return found


def copy_without_folding(distributed: bool) -> dict[str, Any]:
    """Names of parameters by whether a step changes them where no weight is folded after it."""
    from megatron_scalevec.execution.members import leaves_of
    from megatron_scalevec.execution.optimizer import engine_of, execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()
    case = {"config": {"strategy": "hg"}, "precision": "bf16", "distributed": distributed}
    [gpt], wrapped, stepper = _build("optimizer", False, {}, **case)
    execute_in_optimizer(stepper, wrapped)
    engine = engine_of(stepper)
    engine.write, engine.require_written = lambda member: None, lambda: None
    for group in stepper.param_groups:
        group["lr"] = 0.1  # so that every number changes, those near one in bf16 too
    before = {name: param.detach().clone() for name, param in gpt.named_parameters() if param.requires_grad}
    groups = [_groups(leaf) for leaf in leaves_of(stepper)]
    _step(wrapped, stepper, 0)
    found: dict[str, list[str]] = {"changed": [], "as it was": []}
    for name, value in before.items():
        found["as it was" if torch.equal(gpt.get_parameter(name), value) else "changed"].append(name)
    found["groups kept"] = [_groups(leaf) for leaf in leaves_of(stepper)] == groups
    return found


def _groups(leaf) -> list[list[list[int]]]:
    from megatron_scalevec.execution.members import _names_of_groups

    return [[[id(p) for p in group] for group in getattr(leaf, name)] for name in _names_of_groups(leaf)]


def load_for_evaluation() -> dict[str, Any]:
    """A trained model gets an earlier state without its optimizer, computes, and is trained again; then it
    gets the norms of a stock model, and one norm is cast."""
    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.checkpoint.from_stock import absorb_norms
    from megatron_scalevec.execution.live_gamma import has_live_gamma, live_gamma
    from megatron_scalevec.execution.optimizer import engine_of, execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()
    [gpt], wrapped, stepper = _build("optimizer", False, {}, config={"strategy": "unified"}, precision="bf16")
    execute_in_optimizer(stepper, wrapped)
    position = torch.arange(8)[None]

    def logits():
        with torch.no_grad():
            return gpt(position, position, None).clone()

    for step in range(2):
        _step(wrapped, stepper, step)
    before = logits()
    state = {name: value.clone() for name, value in gpt.state_dict().items() if value is not None}
    for step in range(2):
        _step(wrapped, stepper, step)
    moved = float((logits() - before).abs().max())
    trained = {name: value.clone() for name, value in gpt.state_dict().items() if value is not None}
    gpt.load_state_dict(state)
    found = {
        "moved": moved,
        "same": torch.equal(logits(), before),
        "norms": sum(has_live_gamma(module) for module in gpt.modules()),
    }
    try:
        _step(wrapped, stepper, 4)
    except ScaleVecError as error:
        found["training"] = str(error)
    last = gpt.decoder.final_layernorm
    with torch.no_grad():
        last.weight.fill_(2.0)
    absorb_norms(gpt)
    found["of a stock model"] = set(live_gamma(last, "gamma").tolist())
    gpt.load_state_dict(trained)
    last.load_state_dict({}, strict=False)
    last.to(torch.bfloat16)
    for one in engine_of(stepper).norms:
        one.write()
        one.check()
    found["as before"] = 2.0 not in live_gamma(last, "gamma").tolist()
    last.double()
    found["cast"] = str(live_gamma(last, "gamma").dtype)
    try:
        for one in engine_of(stepper).norms:
            one.check()
    except ScaleVecError as error:
        found["training a cast one"] = str(error)
    return found


def change_from_outside() -> dict[str, Any]:
    """A model is evaluated with earlier weights, copied, and trained after one vector was changed."""
    import copy
    import io

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()
    [gpt], wrapped, stepper = _build("optimizer", False, {}, config={"strategy": "unified"}, precision="bf16")
    for group in stepper.param_groups:
        group["lr"] = 0.05
    execute_in_optimizer(stepper, wrapped)
    position = torch.arange(8)[None]

    def logits(model=gpt):
        model.eval()
        with torch.no_grad():
            found = model(position, position, None).clone()
        model.train()
        return found

    def put(values):
        with torch.no_grad():
            for param, value in zip(gpt.parameters(), values):
                param.copy_(value)

    _step(wrapped, stepper, 0)
    kept, before = [param.detach().clone() for param in gpt.parameters()], logits()
    for step in range(1, 4):
        _step(wrapped, stepper, step)
    own, after = [param.detach().clone() for param in gpt.parameters()], logits()
    with torch.no_grad():
        in_training = gpt(position, position, None).clone()
    put(kept)
    found = {
        "moved": float((after - before).abs().max()),
        "kept": torch.equal(logits(), before),
        "as in training": float((in_training - after).abs().max()),
    }
    put(own)
    norm = next(m for name, m in gpt.named_modules() if name.endswith("q_layernorm"))
    written = io.BytesIO()
    torch.save(norm, written)
    written.seek(0)
    copies = {"copied": copy.deepcopy(norm), "pickled": torch.load(written, weights_only=False)}
    x = torch.randn(3, norm.weight.numel(), generator=torch.Generator().manual_seed(1)).to(norm.weight.dtype)
    for name, other in copies.items():
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(2)
        out = other(x)
        out.sum().backward()
        # The parts of a product, doubled; and both learn.
        doubled = bool((out / norm(x)).allclose(torch.full_like(out, 4.0), rtol=2e-2))
        found[name] = doubled and all(
            bool(param.grad.any()) for param in other.parameters() if param.requires_grad
        )
    _step(wrapped, stepper, 4)
    with torch.no_grad():
        for name, param in norm.named_parameters():
            if name.startswith("gamma"):
                param.mul_(3)
    try:
        _step(wrapped, stepper, 5)
    except ScaleVecError as error:
        found["training"] = str(error)
    stepper.reload_model_params()
    _step(wrapped, stepper, 6)
    found["trains after reload_model_params"] = True
    return found


def set_up_again(overlap: bool) -> dict[str, Any]:
    """Losses and norms of a run whose optimizer is made anew on the same chunks after two steps, by mode."""
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()
    found = {}
    for mode in ("autograd", "optimizer"):
        _, wrapped, stepper = _build(
            mode, False, {}, config={"strategy": "unified"}, precision="bf16", overlap=overlap
        )
        if mode == "optimizer":
            execute_in_optimizer(stepper, wrapped)
        steps = [_step(wrapped, stepper, step, squared=True) for step in range(2)]
        stepper = _optimizer_of(
            wrapped, "split", use_distributed_optimizer=True, overlap_param_gather=overlap
        )
        if mode == "optimizer":
            execute_in_optimizer(stepper, wrapped)
        found[mode] = steps + [_step(wrapped, stepper, step, squared=True) for step in range(2, 5)]
    return found


def train_frozen(part: str) -> str:
    """What is named so is frozen before the model is wrapped: the error."""
    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()
    _, wrapped, stepper = _build(
        "optimizer", False, {}, config={"strategy": "dp"}, precision="bf16", frozen=part
    )
    try:
        execute_in_optimizer(stepper, wrapped)
    except ScaleVecError as error:
        return str(error)
    return ""


def change_after_setting_up() -> dict[str, Any]:
    """What is no longer as it was when the optimizer was set up: the errors."""
    import copy

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()

    def built(strategy: str = "unified"):
        [gpt], wrapped, stepper = _build(
            "optimizer", False, {}, config={"strategy": strategy}, precision="bf16"
        )
        execute_in_optimizer(stepper, wrapped)
        _step(wrapped, stepper, 0)
        return gpt, wrapped, stepper

    def error_of(act, *arguments) -> str:
        try:
            act(*arguments)
        except ScaleVecError as error:
            return str(error)
        return ""

    found = {}
    gpt, wrapped, stepper = built()
    another = _optimizer_of(wrapped, "split", use_distributed_optimizer=True)
    found["another optimizer"] = error_of(_step, wrapped, another, 1)
    stepper.reload_model_params()
    _step(wrapped, stepper, 1)
    execute_in_optimizer(another, wrapped)
    _step(wrapped, another, 1)

    group = torch.distributed.ProcessGroup
    copy._deepcopy_dispatch[group] = lambda one, memo: one  # what whoever copies a model of Megatron's needs
    try:
        twin = copy.deepcopy(gpt)
    finally:
        del copy._deepcopy_dispatch[group]
    position = torch.arange(8)[None]
    found["a copy"] = error_of(twin.train(), position, position, None)
    with torch.no_grad():
        found["the copy's function"] = torch.equal(
            twin.eval()(position, position, None), gpt.eval()(position, position, None)
        )
    gpt.train()
    found["a copy's optimizer"] = error_of(execute_in_optimizer, SimpleNamespace(), [twin])
    _step(wrapped, another, 2)

    for name in ("mlp.linear_fc1.weight", "mlp.linear_fc1.gamma", "q_layernorm.gamma"):
        gpt, wrapped, stepper = built()
        for own, param in gpt.named_parameters():
            param.requires_grad_(name not in own)
        found[f"frozen {name}"] = error_of(_step, wrapped, stepper, 1)

    gpt, wrapped, stepper = built("dp")
    with torch.no_grad():
        for own, param in gpt.named_parameters():
            if own.endswith("layers.1.mlp.linear_fc1.gamma_out_up"):
                param.mul_(1.1)
    found["another vector"] = error_of(_step, wrapped, stepper, 1)
    stepper.reload_model_params()
    _step(wrapped, stepper, 1)
    return found


def wrap_in_torch() -> dict[str, str]:
    """torch's DistributedDataParallel around a model whose optimizer is to fold: the errors by its settings.

    There is no optimizer, which is the next error where the wrapper is none.
    """
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    wrapper, found = torch.nn.parallel.DistributedDataParallel, {}
    for setting in ("nothing", "find_unused_parameters", "static_graph", "ignored"):
        gpt = build_gpt("llama", torch.bfloat16)
        apply_scale_vectors(gpt, ScaleVecConfig(strategy="unified", execution="optimizer"))
        if setting == "ignored":
            vectors = [name for name, _ in gpt.named_parameters() if "gamma" in name]
            wrapper._set_params_and_buffers_to_ignore_for_model(gpt, vectors)
        model = wrapper(gpt, **({setting: True} if "_" in setting else {}))
        try:
            execute_in_optimizer(SimpleNamespace(), [model])
        except ScaleVecError as error:
            found[setting] = str(error)
    return found


def train_without_ddp(strategy: str, cast: bool = False) -> dict[str, list[float]]:
    """Losses of a training loop of one's own, without Megatron's wrapper, by mode.

    ``cast``: for an evaluation after every step the model is cast to float32, and back.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.execution.folds import fold_live_weights
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    found: dict[str, list[float]] = {}
    for mode in ("autograd", "optimizer"):
        gpt = build_gpt("llama", torch.bfloat16)
        apply_scale_vectors(gpt, ScaleVecConfig(strategy=strategy, execution=mode))
        fill_by_name(gpt, 0, 1)
        fold_live_weights(gpt)
        steps = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, clip_grad=1.0, weight_decay=0.1)
        inner = torch.optim.AdamW([p for p in gpt.parameters() if p.requires_grad], lr=1e-3)
        for group in inner.param_groups:
            group.update(is_expert_parallel=False, wd_mult=1.0, lr_mult=1.0, is_decoupled_lr=False)
        stepper = Float16OptimizerWithFloat16Params(inner, steps, None, lambda *args: None)
        stepper.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
        stepper.tp_group = parallel_state.get_tensor_model_parallel_group()
        if mode == "optimizer":
            execute_in_optimizer(stepper, [gpt])
        position = torch.arange(16)[None]
        found[mode] = []
        for _ in range(4):
            stepper.zero_grad()
            loss = gpt(position, position, None).float().pow(2).mean()
            loss.backward()
            stepper.step()
            found[mode].append(float(loss.detach()))
            if cast:
                with torch.no_grad():
                    gpt.float().eval()(position, position, None)
                gpt.bfloat16().train()
    return found


def split_cut_norms(sabotage: bool = False) -> dict[str, Any]:
    """Vectors of norms whose parts are cut between two ranks, through one split and one write.

    ``sabotage``: the ranks do not sum.
    """
    from megatron_scalevec.execution.folds import Vector
    from megatron_scalevec.execution.live_gamma import NormSet, live_gamma
    from megatron_scalevec.execution.members import Member, Shard
    from megatron_scalevec.reparam import get_reparameterization
    from megatron_scalevec.vectors import VectorInfo, add_vector
    from ranks.models import initialize_parallel

    initialize_parallel()
    rank, size = torch.distributed.get_rank(), 8
    torch.manual_seed(0)
    norms, member, all_parts = [], Member(None), []
    for kind in ("product", "unit", "none"):
        norm = torch.nn.RMSNorm(size)
        info = VectorInfo("attention", "v", "out", 1, "norm", kind)
        add_vector(norm, "gamma", torch.rand(size) + 0.5, info, "output", like=norm.weight)
        norms.append(Vector(norm, "gamma"))
        all_parts.append(list(norms[-1].parts.values()))
    flat = [part for parts in all_parts for part in parts]
    gradients = [torch.randn(part.shape) if part.numel() == size else torch.zeros(1) for part in flat]
    for part, gradient in zip(flat, gradients):
        # Scalars on the one rank, channels on both.
        start, stop = ((0, 5), (5, size))[rank] if part.numel() == size else ((0, 0), (0, 1))[rank]
        if start < stop:
            main = part.detach()[start:stop].clone().requires_grad_()
            main.grad = gradient[start:stop].clone()
            member.shards[part] = Shard(part, main, start, stop)
    member.group = torch.distributed.group.WORLD
    one = NormSet(norms, member, None)
    if sabotage:
        one.complete = lambda sums: None
    worst, same = 0.0, True
    with torch.no_grad():
        one.write()
        for vector in norms:
            composed = get_reparameterization(vector.kind).compose(vector.parts)
            same = same and torch.equal(live_gamma(vector.owner, vector.name), composed)
        one.split()
    for vector, parts in zip(norms, all_parts):
        gamma = get_reparameterization(vector.kind).compose(vector.parts)
        [of_gamma] = [g for part, g in zip(flat, gradients) if part.numel() == size and part in set(parts)]
        for part, expected in zip(parts, torch.autograd.grad(gamma, parts, of_gamma)):
            if part in member.shards:
                own = member.shards[part]
                worst = max(worst, float((own.gradient - expected[own.start : own.stop]).abs().max()))
    return {"worst": worst, "same": same}


def train_without_an_engine() -> dict[str, str]:
    """What is said when a model that is to be folded by an optimizer meets one that was not told."""
    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.audit import audit
    from megatron_scalevec.execution.engine import Engine
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from ranks.models import initialize_parallel

    initialize_parallel()
    found = {}
    [gpt], wrapped, stepper = _build("optimizer", False, {}, config={"strategy": "dp"}, precision="bf16")
    for what, act in (
        ("forward", lambda: _step(wrapped, stepper, 0)),
        ("audit", lambda: audit(gpt, stepper)),
    ):
        try:
            act()
        except ScaleVecError as error:
            found[what] = str(error)
    with torch.no_grad():
        gpt.eval()
        position = torch.arange(4)[None]
        found["evaluation"] = str(gpt(position, position, None).isfinite().all().item())
        gpt.train()
    execute_in_optimizer(stepper, wrapped)
    with mock.patch.object(Engine, "remark", "by other passes"):
        record = audit(gpt, stepper)
    found["execution"], found["reason"] = record.execution, record.execution_reason
    _step(wrapped, stepper, 0)
    try:
        execute_in_optimizer(stepper, wrapped)
    except ScaleVecError as error:
        found["twice"] = str(error)
    for kind in ("plain", "distributed"):
        case = {"config": {"strategy": "dp"}, "precision": "fp32", "distributed": kind == "distributed"}
        _, wrapped, stepper = _build("optimizer", False, {}, **case)
        try:
            execute_in_optimizer(stepper, wrapped)
        except ScaleVecError as error:
            found[f"{kind} in full precision"] = str(error)
    return found


# --- the oracle ---------------------------------------------------------------------------------------


def _record_check(engine, record: dict[str, Any]) -> None:
    """Compare the first split with float64 autograd on the same gradients."""
    original = engine.split

    def split():
        engine.split = original
        before = [_state(one) for one in engine.sets]
        norms = [_norm_state(one) for one in engine.norms]
        original()
        record["check"] = [_errors(one, state) for one, state in zip(engine.sets, before)]
        record["check"] += [_norm_errors(one, state) for one, state in zip(engine.norms, norms)]

    engine.split = split


def _state(one) -> dict[str, Any]:
    return {
        "gradients": [_whole(one, fold, lambda shard: shard.gradient) for fold in one.folds],
        "masters": [_whole(one, fold, lambda shard: shard.master) for fold in one.folds],
        "vectors": _vectors(one, lambda shard: shard.master),
    }


def _whole(one, fold, what) -> torch.Tensor:
    """A weight's value from the shards of all data-parallel ranks, float64 [rows, columns]."""
    return _gathered(one.weights, fold.weight, what)


def _vectors(one, what) -> dict[Any, torch.Tensor]:
    return {part: _gathered(one.vectors, part, what) for fold in one.folds for part in fold.parameters}


def _gathered(member, param, what) -> torch.Tensor:
    whole = torch.zeros(param.numel(), dtype=torch.float64)
    if param in member.shards:
        shard = member.shards[param]
        whole[shard.start : shard.stop] = what(shard).double()
    if member.group is not None:
        torch.distributed.all_reduce(whole, group=member.group)
    return whole.view(param.shape)


@torch.enable_grad()
def _errors(one, state: dict[str, Any]) -> dict[str, Any]:
    """Largest differences relative to the largest entry; ``of``: the vector that has it."""
    from reference import product, unit

    from megatron_scalevec.vectors import vector_info

    leaves = {part: value.requires_grad_() for part, value in state["vectors"].items()}
    worst: dict[str, Any] = {"weight": 0.0, "vectors": 0.0}
    terms: dict[Any, float] = {}
    for fold, gradient, master in zip(one.folds, state["gradients"], state["masters"]):
        raw = master.requires_grad_()

        def value(vector):
            parts = [leaves[part] for part in vector.parts.values()]
            return {"none": lambda x: x, "product": product, "unit": unit}[vector.kind](*parts)

        (_effective(raw, fold, value) * gradient).sum().backward()
        found = _whole(one, fold, lambda shard: shard.gradient)
        worst["weight"] = max(worst["weight"], _relative(found, raw.grad))
        for vector in fold.vectors:
            if vector.size == 1:  # of a gate: a scalar by nature
                terms |= dict.fromkeys(vector.parts.values(), float((gradient * raw.detach()).norm()))
    ours = _vectors(one, lambda shard: shard.gradient)
    for vector in {vector for fold in one.folds for vector in fold.vectors}:
        parts = list(vector.parts.values())
        if len(parts) == 2 and vector.size > 1:
            scalar, whole = sorted(parts, key=torch.Tensor.numel)
            terms[scalar] = float(ours[whole].norm() * leaves[whole].detach().norm())
    for part, leaf in leaves.items():
        expected = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        for group in one.groups:
            torch.distributed.all_reduce(expected, group=group)
        # A scalar's gradient is a sum in which much may cancel: measured against the size of its terms.
        scale = max(float(expected.abs().max()), terms.get(part, 0.0))
        error = _ratio(ours[part] - expected, scale)
        if error >= worst["vectors"]:
            worst.update(vectors=error, of=vector_info(part))
    return worst


def _norm_state(one) -> dict[Any, dict[str, Any]]:
    """By vector: values of the stored parts by suffix, and what came as a gradient of γ's size."""
    found = {}
    for vector in one.table.begins:
        largest = max(vector.parts.values(), key=torch.Tensor.numel)
        gradient = _gathered(one.vectors, largest, lambda shard: shard.gradient)
        if one.group is not None:
            torch.distributed.all_reduce(gradient, group=one.group)
        found[vector] = {"values": _norm_values(one, vector), "gradient": gradient}
    return found


def _norm_values(one, vector) -> dict[str, torch.Tensor]:
    return {s: _gathered(one.vectors, p, lambda shard: shard.master) for s, p in vector.parts.items()}


@torch.enable_grad()
def _norm_errors(one, state: dict[Any, dict[str, Any]]) -> dict[str, float]:
    """As :func:`_errors`, for vectors that stay with their norms."""
    from reference import product, unit

    worst = 0.0
    for vector, before in state.items():
        # As the model has them.
        leaves = {
            suffix: value.to(vector.parts[suffix].dtype).double().requires_grad_()
            for suffix, value in before["values"].items()
        }
        gamma = {"none": lambda x: x, "product": product, "unit": unit}[vector.kind](*leaves.values())
        (gamma * before["gradient"]).sum().backward()
        terms = float(before["gradient"].norm() * gamma.detach().norm())
        for suffix, part in vector.parts.items():
            found = _gathered(one.vectors, part, lambda shard: shard.gradient)
            scale = max(float(leaves[suffix].grad.abs().max()), terms if part.numel() == 1 else 0.0)
            worst = max(worst, _ratio(found - leaves[suffix].grad, scale))
    return {"weight": 0.0, "vectors": worst}


def _blocks(raw: torch.Tensor, fold, value):
    """Rows of one branch, γ_in of this rank's columns, γ_out of these rows; None for ones."""
    own = slice(fold.first_column, fold.first_column + raw.shape[1])
    for run in fold.runs:
        inner, outer = fold.inner[run.branch], fold.outer[run.branch]
        yield (
            raw[run.start : run.stop],
            None if inner is None else value(inner)[own],
            None if outer is None else value(outer)[run.channel : run.channel + run.stop - run.start],
        )


def _effective(raw: torch.Tensor, fold, value) -> torch.Tensor:
    """W_eff, branch by branch with diagonal matrices, from the reference."""
    from reference import effective_weight

    return torch.cat([effective_weight(*block) for block in _blocks(raw, fold, value)])


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return _ratio(found - expected, float(expected.abs().max()))


def _ratio(difference: torch.Tensor, scale: float) -> float:
    """The largest entry in units of ``scale``; where that is zero, as in experts without tokens, only zero
    is right."""
    largest = float(difference.abs().max())
    return largest / scale if scale and math.isfinite(largest) else float("inf") if largest else 0.0


def _live_is_folded(engine) -> bool:
    """Whether every shard of every live weight is cast(fold(masters)), bit by bit, computed whole; and γ of
    every norm what its masters compose to as the model has them."""
    from megatron_scalevec.execution.live_gamma import live_gamma
    from megatron_scalevec.reparam import get_reparameterization

    for one in engine.sets:
        one.gather()
        for local in one.local:
            fold, shard = local.fold, local.shard
            raw = torch.zeros(fold.weight.numel())
            raw[shard.start : shard.stop] = shard.master
            rows = []
            for block, inner, outer in _blocks(raw.view(fold.weight.shape), fold, one.table.gamma):
                block = block if inner is None else block * inner
                rows.append(block if outer is None else block * outer[:, None])
            expected = torch.cat(rows).view(-1)[shard.start : shard.stop].to(fold.weight.dtype)
            if not torch.equal(expected, shard.live):
                return False
    for one in engine.norms:
        for vector in one.table.begins:
            values = {s: v.to(one.live.dtype).float() for s, v in _norm_values(one, vector).items()}
            expected = get_reparameterization(vector.kind).compose(values).to(one.live.dtype)
            if not torch.equal(expected, live_gamma(vector.owner, vector.name)):
                return False
    return True


def train_unrounded(argv: list[str], **more: Any) -> dict[str, Any]:
    """A whole bf16 run in which nothing is rounded: live weights and masters are float32, both exist.

    Arguments and result are those of ``train``.
    """
    from ranks.jobs.training import train

    masters = _separate_masters()
    # Made when it is first needed, to read a checkpoint, and by then bfloat16 is another.
    torch.storage._dtype_to_storage_type_map(), torch.storage._storage_type_to_dtype_map()
    torch.bfloat16 = torch.float32
    torch.Tensor.bfloat16 = torch.nn.Module.bfloat16 = lambda self: self

    import megatron.core.optimizer as optimizer
    from megatron.training import training

    original = optimizer.get_megatron_optimizer

    def get_megatron_optimizer(*args, **kwargs):
        with masters:
            return original(*args, **kwargs)

    optimizer.get_megatron_optimizer = training.get_megatron_optimizer = get_megatron_optimizer
    return train(argv, **more)
