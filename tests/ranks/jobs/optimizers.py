"""Megatron's optimizers over small models: groups, single steps, gradients."""

from __future__ import annotations

from typing import Any

import torch

from ranks.initial import fill_by_name

__all__ = [
    "decay_tables",
    "groups_refused",
    "muon_gradients",
    "replicas_of_a_broken_model",
    "steps_without_gradients",
]


def _build(
    strategy: dict[str, Any],
    kind: str,
    settings: dict[str, Any],
    model_overrides: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    more_rules=None,
):
    """(model, wrapped model, optimizer) as the launcher would have built them."""
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.decay import with_decaying_vectors, with_learning_rates
    from ranks.models import build_gpt

    strategy_config = ScaleVecConfig(**strategy)
    model = build_gpt(**{"kind": kind, "dtype": dtype, **(model_overrides or {})})
    if strategy_config.active:
        apply_scale_vectors(model, strategy_config)
    distributed = bool(settings.get("use_distributed_optimizer"))
    mup = settings.pop("mup", None)
    config = OptimizerConfig(**{"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1, **settings})
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    rules = get_standard_config_overrides(config)
    if strategy_config.active:
        rules = with_decaying_vectors(rules, strategy_config.weight_decay)
        rules = with_learning_rates(rules, strategy_config.lr_multipliers, config)
    if mup:
        rules = {**rules, **megatron_optimizer.get_mup_config_overrides(config, mup, config.optimizer)}
    rules = {**rules, **(more_rules() if more_rules else {})}
    optimizer = megatron_optimizer.get_megatron_optimizer(config, [wrapped], config_overrides=rules)
    return model, wrapped, optimizer


def decay_tables(cases: list[dict[str, Any]]) -> list[dict[str, str]]:
    """For each case the trainable parameters by name, with wd_mult and optimizer as Megatron has them.

    Args:
        cases: Each with ``kind`` of model, ``overrides`` of its configuration, ``strategy``, ``optimizer``.
    """
    from megatron_scalevec.audit.groups import groups_of_parameters
    from ranks.models import initialize_parallel

    initialize_parallel()
    tables = []
    for case in cases:
        model, wrapped, optimizer = _build(
            {"strategy": case["strategy"]},
            case["kind"],
            {"optimizer": case["optimizer"]},
            {"num_layers": 1, **case["overrides"]},
        )
        groups = groups_of_parameters([wrapped], optimizer)
        tables.append(
            {
                name: f"{groups[id(param)].weight_decay:g} {groups[id(param)].optimizer}"
                for name, param in model.named_parameters()
                if param.requires_grad
            }
        )
    return tables


def steps_without_gradients(
    strategy: dict[str, Any],
    settings: dict[str, Any],
    schedule: dict[str, Any] | None = None,
    steps: int = 1,
    kind: str = "qk-norm",
    overrides: dict[str, Any] | None = None,
    bf16: bool = False,
) -> dict[str, Any]:
    """Let Megatron's optimizer and scheduler step on gradients that are zero.

    Args:
        strategy: Its configuration.
        settings: Of Megatron's ``OptimizerConfig``; ``mup`` is the width multiplier of µP.
        schedule: Of Megatron's ``OptimizerParamScheduler``; None for constant values.

    Returns:
        ``groups``: by name (lr, weight decay) of the parameter's group at each step. ``before``, ``after``:
        values by name.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.audit import audit
    from megatron_scalevec.audit.groups import members_of
    from ranks.models import initialize_parallel

    initialize_parallel()
    dtype = torch.bfloat16 if bf16 else torch.float32
    model, wrapped, optimizer = _build(
        strategy, kind, {"clip_grad": 0.0, "bf16": bf16, **settings}, overrides, dtype
    )
    fill_by_name(model, 0, 1)
    optimizer.reload_model_params()
    if ScaleVecConfig(**strategy).active:
        audit(wrapped, optimizer, config=ScaleVecConfig(**strategy))
    lr, decay = settings.get("lr", 0.1), settings.get("weight_decay", 0.1)
    scheduler = OptimizerParamScheduler(
        optimizer,
        **{
            "init_lr": lr,
            "max_lr": lr,
            "min_lr": settings.get("min_lr", lr),
            "lr_warmup_steps": 0,
            "lr_decay_steps": 10,
            "lr_decay_style": "constant",
            "start_wd": decay,
            "end_wd": decay,
            "wd_incr_steps": 10,
            "wd_incr_style": "constant",
            **(schedule or {}),
        },
    )
    names = {id(param): name for name, param in model.named_parameters()}
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    groups: dict[str, list[tuple[float, float]]] = {}
    for _ in range(steps):
        for member in members_of(optimizer):
            inner = member.optimizer
            index_map = getattr(member, "model_param_group_index_map", None)
            if index_map is not None:
                pairs = [(param, inner.param_groups[index]) for param, (index, _) in index_map.items()]
            elif hasattr(member, "float16_groups"):
                lists = zip(inner.param_groups, member.float16_groups, member.fp32_from_fp32_groups)
                pairs = [(param, group) for group, half, whole in lists for param in [*half, *whole]]
            else:
                pairs = [(param, group) for group in inner.param_groups for param in group["params"]]
            for param, group in pairs:
                name = names[id(param)]
                groups.setdefault(name, []).append((float(group["lr"]), float(group["weight_decay"])))
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        optimizer.step()
        scheduler.step(1)
    return {
        "groups": groups,
        "before": {name: value.float().numpy() for name, value in before.items()},
        "after": {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()},
    }


def groups_refused(case: str) -> str:
    """The sentence with which an optimizer is refused whose groups are wrong, empty where it is not."""
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    from megatron_scalevec import ScaleVecConfig, ScaleVecError
    from megatron_scalevec.audit import audit
    from megatron_scalevec.vectors import role_of, vector_info
    from ranks.models import initialize_parallel

    def vectors(override, role="input"):
        predicate = ParamPredicate(
            name="vectors", fn=lambda p: vector_info(p) is not None and role_of(p) == role
        )
        return lambda: {ParamKey(predicate=predicate): override}

    initialize_parallel()
    settings: dict[str, Any] = {
        "decoupled-lr": {"decoupled_lr": 0.2},
        "mup": {"mup": 2.0, "min_lr": 0.0},
        "mup-and-decoupled-lr": {"mup": 2.0, "min_lr": 0.0, "decoupled_lr": 0.2, "decoupled_min_lr": 0.0},
        "muon": {"optimizer": "muon"},
    }.get(case, {})
    rules = {
        "equal-groups": vectors({"wd_mult": 1.0}),
        "second-rule": vectors({"wd_mult": 1.0}, role="output"),
        "half-decay": vectors({"wd_mult": 0.5}, role="input"),
        "learning-rate": vectors({"max_lr": 0.2}),
    }.get(case)
    config = ScaleVecConfig(strategy="dnp")
    try:
        _, wrapped, optimizer = _build({"strategy": "dnp"}, "llama", settings, more_rules=rules)
        if case == "matrix-optimizer":
            optimizer.chained_optimizers[0].optimizer.__class__ = type(
                "TensorParallelMuon", (torch.optim.AdamW,), {}
            )
        elif case == "missing-key":
            del optimizer.chained_optimizers[0].optimizer.param_groups[0]["wd_mult"]
        audit(wrapped, optimizer, config=config)
    except (ScaleVecError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def muon_gradients(strategy: dict[str, Any], kind: str) -> dict[str, Any]:
    """What Muon sees of the matrices in one step, beside the float64 reference.

    Returns:
        ``difference``: by name, of the gradient that Muon is given from the reference's of the raw W,
        relative to its largest entry. ``effective``: the same for the gradient of W_eff (linears with
        vectors only). ``qkv``: names that are split by q, k and v, with the shapes. ``vectors``: the
        optimizer of every 1-D parameter.
    """
    from megatron.core.optimizer import emerging_optimizers
    from reference import gpt_logits

    from megatron_scalevec.audit.groups import groups_of_parameters
    from megatron_scalevec.layers.linear import FoldedLinear
    from ranks.models import SIZES, initialize_parallel, reference_of

    initialize_parallel()
    model, wrapped, optimizer = _build(strategy, kind, {"optimizer": "muon", "clip_grad": 0.0})
    fill_by_name(model, 0, 1)
    names = {id(param): name for name, param in model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    qkv: dict[str, list[int]] = {}
    step = emerging_optimizers.TensorParallelMuon.step
    orthogonalize = emerging_optimizers.TensorParallelMuon.orthogonalize

    def recording_step(self, *args, **kwargs):
        for group in self.param_groups:
            seen.update({names[id(p)]: p.grad.double().clone() for p in group["params"]})
        return step(self, *args, **kwargs)

    def recording_split(self, p, grad, **kwargs):
        if self.split_qkv and self.is_qkv_fn(p):
            qkv[names[id(p)]] = list(getattr(p, "qkv_split_shapes", None) or self.qkv_split_shapes)
        return orthogonalize(self, p, grad, **kwargs)

    emerging_optimizers.TensorParallelMuon.step = recording_step
    emerging_optimizers.TensorParallelMuon.orthogonalize = recording_split

    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(SIZES["vocabulary"], (SIZES["sequence"],), generator=draw)
    target = torch.randn(SIZES["sequence"], SIZES["vocabulary"], generator=draw)
    params, reference_config, leaves = reference_of(model)
    (gpt_logits(tokens, params, reference_config) * target.double()).sum().backward()
    position = torch.arange(SIZES["sequence"])[None]
    wrapped.zero_grad_buffer()
    (wrapped(tokens[None], position, None)[0] * target).sum().backward()
    wrapped.finish_grad_sync()
    effective = {}
    for name, module in model.named_modules():
        if isinstance(module, FoldedLinear):
            w = module.weight.detach()
            with torch.no_grad():
                scale = (module.folded_weight() / w).double()
            raw = leaves[f"{name}.weight"].grad
            effective[f"{name}.weight"] = _relative(raw / scale, raw)
    optimizer.step()
    return {
        "difference": {name: _relative(grad, leaves[name].grad) for name, grad in seen.items()},
        "effective": effective,
        "qkv": qkv,
        "vectors": {
            name: groups_of_parameters([wrapped], optimizer)[id(p)].optimizer
            for name, p in model.named_parameters()
            if p.dim() == 1 and p.requires_grad
        },
    }


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def replicas_of_a_broken_model(breakage: str, **sizes: int) -> dict[str, Any]:
    """Check the copies of a model of which one rank has written to one copy.

    Args:
        breakage: ``none``, ``one bit``, ``NaN``, ``shard`` (a bias that is split over tensor-parallel ranks),
            ``bfloat16``.
        sizes: Of Megatron's groups.
    """
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.replicas import check_replicas
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel(**sizes)
    dtype = torch.bfloat16 if breakage == "bfloat16" else torch.float32
    model = build_gpt("gpt2", dtype, **{k: v for k, v in sizes.items() if k.startswith("tensor")})
    apply_scale_vectors(model, ScaleVecConfig(strategy="dp"))
    linear = model.decoder.layers[1].mlp.linear_fc1
    with torch.no_grad():
        if torch.distributed.get_rank() == 1:
            if breakage in ("one bit", "bfloat16"):
                step = 2.0**-8 if breakage == "bfloat16" else 2.0**-24
                linear.gamma_in_up[3] = 1 - step
            elif breakage == "NaN":
                linear.gamma_out_up[0] = float("nan")
            elif breakage == "shard":
                linear.bias[2] = 1.0
    calls = []
    reduce = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *args, **kwargs: (calls.append(1), reduce(*args, **kwargs))[1]
    try:
        compared = check_replicas([model], "now: ")
    except ScaleVecError as error:
        return {"error": str(error), "collectives": len(calls)}
    return {"error": None, "compared": compared, "collectives": len(calls)}
