"""Checkpoints of small models, saved and loaded by megatron.core alone."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from ranks.initial import fill_by_name

__all__ = [
    "fold_in_process",
    "load_experts",
    "load_model",
    "logit_differences",
    "measure_memory",
    "round_trips",
    "save_model",
    "scalevec",
    "store_experts",
    "verify_wrong",
]


def arguments_of(config: Any, strategy: Any = None) -> argparse.Namespace:
    """What Megatron's own arguments would say of a model, as far as the tools look at them."""
    args = argparse.Namespace(
        num_layers=config.num_layers,
        num_experts=config.num_moe_experts,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=True,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        swiglu=config.gated_linear_unit,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        add_bias_linear=config.add_bias_linear,
        apply_layernorm_1p=config.layernorm_zero_centered_gamma,
        attention_output_gate=bool(getattr(config, "attention_output_gate", False)),
    )
    names = ["multi_latent_attention", "heterogeneous_layers_config_encoded_json", "mtp_num_layers"]
    names += ["mla_down_proj_fusion", "moe_latent_size", "moe_mlp_glu_interleave_size", "moe_grouped_gemm"]
    names += ["kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
    for name in names:
        setattr(args, name, getattr(config, name, None))
    for key, value in (strategy.as_arguments() if strategy is not None else {}).items():
        setattr(args, key, value)
    return args


def save(model: torch.nn.Module, folder: str, strategy: Any = None) -> None:
    """As Megatron's loop saves, without an optimizer."""
    from megatron.core import dist_checkpointing

    target = os.path.join(folder, "iter_0000007")
    if torch.distributed.get_rank() == 0:
        os.makedirs(target)
    torch.distributed.barrier()
    args = arguments_of(model.config, strategy)
    args.hybrid_layer_pattern = getattr(model, "hybrid_layer_pattern", None)
    state = {**model.sharded_state_dict(), "args": args, "iteration": 7}
    dist_checkpointing.save(state, target)
    if torch.distributed.get_rank() == 0:
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w") as file:
            file.write("7")


def load(model: torch.nn.Module, folder: str, strict: str = "raise_all") -> None:
    """As Megatron's loop loads; every tensor of either side must have its counterpart."""
    from megatron.core import dist_checkpointing

    target = os.path.join(folder, "iter_0000007")
    wanted = model.sharded_state_dict()
    state = dist_checkpointing.load(wanted, target, strict=strict)
    left = model.load_state_dict({name: state[name] for name in wanted if name in state}, strict=False)
    # What TransformerEngine keeps of its own is not everywhere.
    names = [*left.missing_keys, *left.unexpected_keys]
    assert all(name.endswith("_extra_state") for name in names), left


def _build(kind: str, config: dict[str, Any] | None, dtype: str, overrides: dict[str, Any] | None):
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.hybrids import BUILDERS
    from ranks.models import EXPERTS, build_gpt

    of_gpt = EXPERTS.get(kind, {} if kind in BUILDERS else {"kind": kind})
    build = BUILDERS.get(kind, build_gpt)
    model = build(dtype=getattr(torch, dtype), **{**of_gpt, **(overrides or {})})
    strategy = ScaleVecConfig(**config) if config else None
    if strategy is not None:
        apply_scale_vectors(model, strategy)
    return model, strategy


def save_model(
    folder: str,
    kind: str = "llama",
    config: dict[str, Any] | None = None,
    dtype: str = "float32",
    overrides: dict[str, Any] | None = None,
    **sizes: int,
) -> dict[str, Any]:
    """Build, fill by name and save. Returns this rank's parameters as numpy."""
    from megatron.core import parallel_state

    from ranks.models import initialize_parallel

    initialize_parallel(**sizes)
    model, strategy = _build(kind, config, dtype, overrides)
    fill_by_name(
        model,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    save(model, folder, strategy)
    return {name: param.detach().float().numpy().copy() for name, param in model.named_parameters()}


def load_model(
    folder: str,
    kind: str = "llama",
    config: dict[str, Any] | None = None,
    dtype: str = "float32",
    overrides: dict[str, Any] | None = None,
    strict: str = "raise_all",
    **sizes: int,
) -> dict[str, Any]:
    """Build and load. Returns this rank's parameters as numpy, or the error."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    from ranks.models import initialize_parallel

    initialize_parallel(**sizes)
    model, _ = _build(kind, config, dtype, overrides)
    try:
        load(model, folder, strict)
    except (KeyError, CheckpointingException, CheckpointException) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: param.detach().float().numpy().copy() for name, param in model.named_parameters()}


def store_experts(folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Models with experts, each saved from as many expert-parallel ranks as there are.

    Args:
        folder: For the checkpoints.
        cases: Kinds of models and configurations of strategies.

    Returns:
        For each case ``stock``: what a stock model says on loading it, by strictness; ``other``: names of
        parameters that are not loaded as they were saved, in the same layout.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    from ranks.models import initialize_parallel

    sizes = {"expert_model_parallel_size": int(os.environ["WORLD_SIZE"])}
    initialize_parallel(**sizes)
    results = []
    for number, (kind, config) in enumerate(cases):
        path = os.path.join(folder, str(number))
        model, strategy = _build(kind, config, "float32", sizes)
        fill_by_name(model, 0, 1)
        save(model, path, strategy)
        result: dict[str, Any] = {"stock": {}}
        for strict in ("raise_all", "ignore_all"):
            stock, _ = _build(kind, None, "float32", sizes)
            try:
                load(stock, path, strict)
                result["stock"][strict] = "loaded"
            except (KeyError, CheckpointingException, CheckpointException) as error:
                result["stock"][strict] = str(error)
        again, _ = _build(kind, config, "float32", sizes)
        result["other"] = _not_loaded(again, path)
        results.append(result)
    return results


def load_experts(folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """What :func:`store_experts` has saved, on one rank: names of parameters with other values."""
    from ranks.models import initialize_parallel

    initialize_parallel()
    return [
        _not_loaded(_build(kind, config, "float32", None)[0], os.path.join(folder, str(number)))
        for number, (kind, config) in enumerate(cases)
    ]


def _not_loaded(model: torch.nn.Module, path: str) -> list[str]:
    load(model, path)
    loaded = {name: param.detach().clone() for name, param in model.named_parameters()}
    fill_by_name(model, 0, 1)
    return [name for name, param in model.named_parameters() if not torch.equal(param, loaded[name])]


def scalevec(arguments: list[str]) -> None:
    """The command line."""
    from megatron_scalevec.cli import main

    code = main(arguments)
    assert code == 0, f"exit code {code}"


def round_trips(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stock checkpoints to a strategy and back.

    Args:
        folder: For the checkpoints.
        cases: Each with ``kind`` of model, ``config`` of the strategy, ``overrides`` and ``dtype``; ``train``
            moves the scale vectors and weights away from their start before folding; ``fresh``: the stock
            model is as it was built, its norms at one.

    Returns:
        For each case ``unfolded``: relative difference of the logits of the unfolded model and the stock
        one, ``initial``: names of parameters in the unfolded model that are not what conversion of the
        loaded stock model gives, ``folded``: difference of the logits of the folded model and the unfolded
        one, ``changed``: names of the stock model's parameters that did not come back bit by bit,
        ``product``: what the comparison without a model finds, and ``other`` beside another checkpoint.
    """
    from ranks.models import initialize_parallel

    initialize_parallel()
    return [_round_trip(os.path.join(folder, str(number)), **case) for number, case in enumerate(cases)]


def _round_trip(
    folder: str,
    kind: str,
    config: dict[str, Any],
    overrides: dict[str, Any] | None = None,
    dtype: str = "float32",
    train: bool = False,
    fresh: bool = False,
) -> dict[str, Any]:
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.checkpoint.commands import fold_checkpoint, unfold_checkpoint
    from megatron_scalevec.checkpoint.store import CheckpointReader
    from megatron_scalevec.checkpoint.verify import compare_products

    os.makedirs(folder)
    paths = {name: os.path.join(folder, name) for name in ("stock", "start", "trained", "folded")}
    strategy = ScaleVecConfig(**config)
    stock, _ = _build(kind, None, dtype, overrides)
    if not fresh:
        fill_by_name(stock, 0, 1)
    save(stock, paths["stock"])
    result: dict[str, Any] = {}
    try:
        unfold_checkpoint(paths["stock"], paths["start"], strategy, check=False)
    except ScaleVecError as error:
        return {"error": str(error)}
    model, _ = _build(kind, config, dtype, overrides)
    fill_by_name(model, 0, 1)  # whatever is not loaded shows
    load(model, paths["start"])
    result["unfolded"] = _difference(_logits(model), _logits(stock))
    apply_scale_vectors(stock, strategy)
    expected = dict(stock.named_parameters())
    result["initial"] = [
        name for name, param in model.named_parameters() if not torch.equal(param, expected[name])
    ]
    result["dtypes"] = [
        name for name, param in model.named_parameters() if param.dtype != expected[name].dtype
    ]
    source = paths["start"]
    if train:
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(0.05 * torch.randn(param.shape, generator=generator))
        save(model, paths["trained"], strategy)
        source = paths["trained"]
    try:
        fold_checkpoint(source, paths["folded"], check=False)
    except ScaleVecError as error:
        return {**result, "error": str(error)}
    heads = {"qk_layernorm": True} if strategy.placement == "dual-norm" else {}
    folded, _ = _build(kind, None, dtype, {**(overrides or {}), **heads})
    fill_by_name(folded, 0, 1)
    load(folded, paths["folded"])
    result["folded"] = _difference(_logits(folded), _logits(model))
    result["product"] = compare_products(CheckpointReader(source), CheckpointReader(paths["folded"]))
    if train:
        # Another checkpoint than the one that was folded: the comparison must be able to tell.
        result["other"] = compare_products(
            CheckpointReader(paths["start"]), CheckpointReader(paths["folded"])
        )
    else:
        first, second = CheckpointReader(paths["stock"]), CheckpointReader(paths["folded"])
        result["changed"] = [
            key
            for key in {*first.tensors, *second.tensors}
            if key not in first.tensors
            or key not in second.tensors
            or first.tensors[key].dtype != second.tensors[key].dtype
            or not torch.equal(first.read(key), second.read(key))
        ]
        result["args"] = vars(first.args) == vars(second.args)
    return result


def logit_differences(first: str, others: list[str], dtype: str = "float32") -> list[float]:
    """Of whole runs' checkpoints: the largest difference relative to the largest logit of ``first``."""
    from megatron_scalevec.checkpoint.logits import logits_of
    from ranks.models import initialize_parallel

    initialize_parallel()
    own, *theirs = (logits_of(path, getattr(torch, dtype)).double() for path in (first, *others))
    return [_difference(other, own) for other in theirs]


def _logits(model: torch.nn.Module) -> torch.Tensor:
    """All that the output layer gives, for multi-token prediction too, which up to 0.16 asks for labels."""
    from ranks.models import SIZES

    size = SIZES["sequence"]
    tokens = torch.randint(SIZES["vocabulary"], (1, size), generator=torch.Generator().manual_seed(3))
    found = []
    hook = model.output_layer.register_forward_hook(
        lambda module, _, output: found.append(output[0].double())
    )
    with torch.no_grad():
        model(tokens, torch.arange(size)[None], None, labels=tokens)
    hook.remove()
    return torch.stack(found)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def fold_in_process(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fold built models. For each case: difference of the logits, classes and names left over, errors."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.checkpoint.in_process import fold
    from ranks.models import initialize_parallel

    initialize_parallel()
    results = []
    for case in cases:
        model, _ = _build(case["kind"], case["config"], case.get("dtype", "float32"), case.get("overrides"))
        stock, _ = _build(case["kind"], None, case.get("dtype", "float32"), case.get("overrides"))
        fill_by_name(model, 0, 1)
        before = _logits(model)
        fold(model)
        result = {"difference": _difference(_logits(model), before)}
        result["classes"] = sorted(
            {type(module).__name__ for module in model.modules()}
            - {type(module).__name__ for module in stock.modules()}
        )
        result["names"] = sorted(set(dict(model.named_parameters())) - set(dict(stock.named_parameters())))
        result["frozen"] = [name for name, param in model.named_parameters() if not param.requires_grad]
        try:
            fold(stock)
        except ScaleVecError as error:
            result["stock"] = str(error)
        model, _ = _build(case["kind"], case["config"], "float32", case.get("overrides"))
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        try:
            fold(wrapped)
        except ScaleVecError as error:
            result["training"] = str(error)
        results.append(result)
    return results


def verify_wrong(source: str, folder: str, factor: float) -> dict[str, Any]:
    """Unfold with scales put wrong by a factor. Returns the error, and what is left in the folder."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError
    from megatron_scalevec.checkpoint import verify
    from megatron_scalevec.checkpoint.commands import unfold_checkpoint
    from megatron_scalevec.checkpoint.unfold import Unfolding

    right = Unfolding._gamma
    Unfolding._gamma = lambda *args: factor * right(*args)
    verify.LOGITS_LIMIT = 0  # compare products
    os.makedirs(folder)
    try:
        unfold_checkpoint(source, os.path.join(folder, "out"), ScaleVecConfig(strategy="hg"))
    except ScaleVecError as error:
        return {"error": str(error), "left": os.listdir(folder)}
    return {"error": "", "left": os.listdir(folder)}


def measure_memory(folder: str, layers: int, rows: int, columns: int) -> dict[str, int]:
    """Unfold, fold and compare a checkpoint made up for its size. Returns the growth of memory in bytes."""
    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.checkpoint.commands import fold_checkpoint, unfold_checkpoint
    from megatron_scalevec.checkpoint.store import Box, CheckpointReader, Piece, write_checkpoint
    from megatron_scalevec.checkpoint.verify import compare_products

    fc1 = "decoder.layers.mlp.linear_fc1."
    pieces = [
        Piece(key, shape, torch.float32, Box((i, *[0] * (len(shape) - 1)), (1, *shape[1:])), make)
        for key, shape, make in (
            (f"{fc1}weight", (layers, rows, columns), lambda: torch.ones(1, rows, columns)),
            (f"{fc1}layer_norm_weight", (layers, columns), lambda: torch.full((1, columns), 2.0)),
        )
        for i in range(layers)
    ]
    args = argparse.Namespace(num_attention_heads=1, kv_channels=8, swiglu=True, normalization="RMSNorm")
    common = {"args": args, "iteration": 7}
    paths = [os.path.join(folder, name) for name in ("stock", "start", "folded")]
    write_checkpoint(paths[0], iteration=7, pieces=pieces, objects={}, common=common, common_file=True)
    steps = {
        "unfold": lambda: unfold_checkpoint(
            paths[0], paths[1], ScaleVecConfig(strategy="unified-foldable", sites="mlp"), check=False
        ),
        "fold": lambda: fold_checkpoint(paths[1], paths[2], check=False),
        "compare": lambda: compare_products(CheckpointReader(paths[1]), CheckpointReader(paths[2])),
    }
    return {name: _growth(step) for name, step in steps.items()}


def _growth(work) -> int:
    """Of the largest amount of memory held, in a child of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = _peak()
        work()
        os.write(writing, str(_peak() - before).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = int(pipe.read() or -1)
    os.waitpid(pid, 0)
    return found


def _peak() -> int:
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])
