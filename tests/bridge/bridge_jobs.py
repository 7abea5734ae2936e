"""What the ranks of the Megatron-Bridge tests do; see ``tests/ranks/jobs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import placeholders

__all__ = ["pretrain"]


def prepare() -> None:
    """Import Bridge once for all ranks."""
    placeholders.install()
    import megatron.bridge.recipes
    import megatron.bridge.training.gpt_step
    import megatron.bridge.training.pretrain  # noqa: F401


def _record(losses: list, norms: list, end: dict[str, Any]):
    from megatron.bridge.training.callbacks import Callback

    class Record(Callback):
        def on_train_step_end(self, context):
            [loss] = context.loss_dict.values()
            losses.append(float(loss))
            norms.append(float(context.grad_norm))
            end["step"] = context.state.train_state.step

        def on_train_start(self, context):
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
        run(container, forward_step, callbacks=[_record(losses, norms, end)])
    except Exception as error:
        result["error"] = (type(error).__name__, str(error))
        if not end:
            return result
    result["provider"] = type(container.model).__name__
    result["step"] = end.get("step")
    result.update(_parameters(end["model"], end["optimizer"]))
    audit = Path(folder) / "scalevec_audit.json"
    result["audit"] = audit.read_text() if audit.is_file() else None
    return result


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
