"""Models and their checkpoints for the conversion tools, many in one process."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from ranks.initial import fill_by_name

__all__ = ["logits_of_checkpoints", "save_models"]


def save_models(cases: list[dict[str, Any]], tokens: list[int]) -> list[dict[str, Any]]:
    """Build models, move them away from their start, and save each as a torch_dist checkpoint.

    Args:
        cases: Each with ``argv``: Megatron's arguments; ``folder``; and optionally ``strategy``: fields of
            the ScaleVecConfig, ``constants``: fill every parameter with a constant of its own instead of
            random values, ``zero_centered``: store γ − 1 in the norms, and say so in the arguments.
        tokens: One sequence.

    Returns:
        For each case ``logits`` [tokens, vocabulary] in float64, and ``constants``: name to the value that a
        parameter was filled with.
    """
    from ranks.models import initialize_parallel

    initialize_parallel()
    made = [_save(tokens=tokens, **case) for case in cases]
    # Megatron's writer process waits for more, and a rank ends without telling it.
    for child in multiprocessing.active_children():
        child.terminate()
    return made


def logits_of_checkpoints(cases: list[dict[str, Any]], tokens: list[int]) -> list[Any]:
    """Load checkpoints into models that the arguments say, and return logits as :func:`save_models` does.

    Args:
        cases: Each with ``argv``, ``folder`` (of one iteration), and optionally ``strategy``.
        tokens: One sequence.
    """
    from ranks.models import initialize_parallel

    initialize_parallel()
    return [_load(tokens=tokens, **case) for case in cases]


def _save(
    argv: list[str],
    folder: str,
    tokens: list[int],
    strategy: dict[str, Any] | None = None,
    constants: bool = False,
    zero_centered: bool = False,
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    model, args = _build(argv, strategy)
    if constants:
        values = {}
        for number, (name, param) in enumerate(model.named_parameters()):
            if param.requires_grad:
                # Exact in float32, also in products of three.
                param.data.fill_(1 + (number + 1) / 256)
            values[name] = float(param.detach().flatten()[0])
    else:
        values = {}
        fill_by_name(model, 0, 1)
    logits = _logits(model, tokens)
    if zero_centered:
        args.layernorm_zero_centered_gamma = True
        for name, param in model.named_parameters():
            if "norm" in name:
                param.data -= 1
    target = Path(folder) / "iter_0000001"
    target.mkdir(parents=True)
    state = {"args": args, "iteration": 1, "checkpoint_version": 3.0, "model": _sharded(model)}
    dist_checkpointing.save(state, str(target))
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("1")
    return {"logits": logits, "constants": values}


def _load(argv: list[str], folder: str, tokens: list[int], strategy: dict[str, Any] | None = None):
    from megatron.core import dist_checkpointing

    model, _ = _build(argv, strategy)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    state = dist_checkpointing.load({"model": _sharded(model)}, folder)
    model.load_state_dict(state["model"], strict=False)
    left = [name for name, param in model.named_parameters() if bool(param.isnan().any())]
    assert not left, f"not in the checkpoint: {left}"
    return _logits(model, tokens)


def _build(argv: list[str], strategy: dict[str, Any] | None):
    from megatron.training import arguments, global_vars

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors, cpu
    from megatron_scalevec.integration.pretrain_gpt import model_provider

    sys.argv = ["pretrain", *argv]
    args = arguments.parse_args()
    if getattr(args, "padded_vocab_size", None) is None:
        args.padded_vocab_size = args.vocab_size
    cpu.choose_arguments(args)
    arguments.validate_args(args)
    global_vars._GLOBAL_ARGS = None
    global_vars.set_args(args)
    model = model_provider().to(args.params_dtype)
    if strategy:
        config = ScaleVecConfig(**strategy)
        apply_scale_vectors(model, config)
        for name, value in config.as_arguments().items():
            setattr(args, name, value)
    return model.eval(), args


def _sharded(model: torch.nn.Module) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


@torch.no_grad()
def _logits(model: torch.nn.Module, tokens: list[int]):
    # The mask hides what comes later.
    mask = torch.ones(len(tokens), len(tokens)).tril()[None, None] < 0.5
    position = torch.arange(len(tokens))[None]
    out = model(torch.tensor(tokens)[None], position, mask)
    return out[0].double().numpy()
