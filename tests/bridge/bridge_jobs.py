"""What the ranks of the Megatron-Bridge tests do; see ``tests/ranks/jobs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import placeholders
from conversion_jobs import from_hugging_face, recipe_of_example, to_hugging_face, two_models

__all__ = [
    "from_hugging_face",
    "pretrain",
    "pretrain_with_megatron",
    "recipe_of_example",
    "to_hugging_face",
    "two_models",
]


def prepare() -> None:
    """Import Bridge once for all ranks."""
    placeholders.install()
    from megatron_scalevec import cpu

    # First: Bridge imports some of what CPU mode changes by name.
    cpu.install()
    import megatron.bridge.recipes
    import megatron.bridge.training.gpt_step
    import megatron.bridge.training.pretrain  # noqa: F401


def _record(losses: list, norms: list, end: dict[str, Any], by_name: bool):
    from megatron.bridge.training.callbacks import Callback
    from megatron.core.utils import unwrap_model
    from ranks.initial import fill_by_name

    class Record(Callback):
        def on_train_step_end(self, context):
            [loss] = context.loss_dict.values()
            losses.append(float(loss))
            norms.append(float(context.grad_norm))
            end["step"] = context.state.train_state.step

        def on_train_start(self, context):
            for chunk in unwrap_model(context.model) if by_name else ():
                fill_by_name(chunk, 0, 1)
            end["model"] = context.model
            end["optimizer"] = context.optimizer

    return Record()


def pretrain(
    kind: str,
    folder: str,
    yaml: str | None = None,
    overrides: tuple[str, ...] = (),
    iterations: int = 4,
    load: str | None = None,
    model: dict[str, Any] | None = None,
    apply: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    by_name: bool = False,
) -> dict[str, Any]:
    """Train a small model with Bridge's own loop.

    Args:
        kind: As in :func:`small.hf_config`.
        folder: For checkpoints and the configuration.
        yaml: Text that is merged into the recipe as its user's YAML file.
        overrides: Command-line overrides, merged after it.
        iterations: Steps, counted from the checkpoint's first.
        load: A folder to resume from.
        model, checkpoint: Fields to set before the merge.
        apply: A ``ScaleVecConfig`` to apply in Python.
        by_name: Start from values that depend on the parameters' names alone.

    Returns:
        ``losses``, ``norms``, ``provider`` (class name), ``error`` (type and text, where the run stopped),
        ``decays`` (name to weight-decay multiplier), ``vectors`` (name to value at the end), ``audit``.
    """
    import small
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain as run
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from on_cpu import patch_bridge

    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.patching import PatchSet

    patches = PatchSet()
    patch_bridge(patches)
    container = small.recipe(kind, Path(folder), iterations, **(model or {}))
    for name, value in (checkpoint or {}).items():
        setattr(container.checkpoint, name, value)
    container.checkpoint.load = load
    file = None
    if yaml is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = Path(folder) / "user.yaml"
        file.write_text(yaml)
    losses: list[float] = []
    norms: list[float] = []
    end: dict[str, Any] = {}
    result: dict[str, Any] = {"losses": losses, "norms": norms, "error": None}
    try:
        container = process_config_with_overrides(container, file and str(file), list(overrides))
        if apply is not None:
            from megatron_scalevec.bridge import apply as apply_to

            apply_to(container, ScaleVecConfig(**apply))
        run(container, forward_step, callbacks=[_record(losses, norms, end, by_name)])
    except BaseException as error:  # torch's CheckpointException is no Exception
        result["error"] = (type(error).__name__, str(error))
        if not end:
            return result
    result["provider"] = type(container.model).__name__
    result["step"] = end.get("step")
    result.update(_parameters(end["model"], end["optimizer"]))
    audit = Path(folder) / "scalevec_audit.json"
    result["audit"] = audit.read_text() if audit.is_file() else None
    return result


def pretrain_with_megatron(kind: str, strategy: str, iterations: int) -> dict[str, Any]:
    """Train the model of :func:`pretrain` through the flag, in Megatron's own loop, from values by name."""
    from ranks.jobs.training import train

    argv = f"""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
        --kv-channels 16 --ffn-hidden-size 96 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
        --disable-bias-linear --position-embedding-type rope --rotary-base 10000
        --untie-embeddings-and-output-weights --seq-length 32 --max-position-embeddings 64
        --micro-batch-size 2 --global-batch-size 4 --train-iters {iterations}
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-decay-iters 20 --lr-warmup-iters 2
        --weight-decay 0.033 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
        --seed 1234 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 99,1,0
        --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
        --transformer-impl local --scalevec-strategy {strategy}""".split()
    return train(argv + (["--qk-layernorm"] if kind == "qwen3" else []))


def _parameters(chunks: Any, optimizer: Any) -> dict[str, Any]:
    from megatron.core.utils import unwrap_model

    from megatron_scalevec.audit.groups import groups_of_parameters

    chunks = unwrap_model(chunks)
    groups = groups_of_parameters(chunks, optimizer)
    decays, vectors = {}, {}
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if id(param) in groups:
                decays[name] = groups[id(param)][0]
            if param.dim() == 1:
                vectors[name] = param.detach().float().tolist()
    return {"decays": decays, "vectors": vectors}
