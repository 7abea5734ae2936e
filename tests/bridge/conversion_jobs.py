"""Recipes at full width without memory, and the ways to and from Hugging Face."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["exported_checkpoint", "from_hugging_face", "recipe_of_example", "to_hugging_face", "two_models"]


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Process groups of one rank, as Bridge's own conversion makes them."""
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from megatron.core import tensor_parallel

    with temporary_distributed_context(backend="gloo"):
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


def _provider(kind: str, **more: Any):
    import small
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_config(small.hf_config(kind)), small.provider(kind, **more)


def _build(provider) -> torch.nn.Module:
    provider.finalize()
    [model] = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return model.eval()


def _logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(16)[None] * 7 % 128
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        return model(tokens, torch.arange(16)[None], mask).float()


def _perturb(model: torch.nn.Module) -> None:
    """Values that a fold must get right: nothing is one any more."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1 and param.requires_grad:
                param.mul_(1 + 0.3 * torch.randn(param.shape, generator=generator))


def _container(kind: str, provider: Any) -> Any:
    import small

    container = small.recipe(kind, Path(tempfile.mkdtemp()))
    container.model = provider
    return container


def to_hugging_face(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Build a model with scale vectors, fold it, and convert it with ``AutoBridge``.

    Returns:
        ``logits`` before and after folding, ``tensors`` (name to value) that ``AutoBridge`` exports,
        ``tokens``, or ``refused``: what Bridge's export of the model with vectors says, and ``error``.
    """
    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.bridge import apply
    from megatron_scalevec.bridge.export import fold_in_place

    result: dict[str, Any] = {"error": None}
    with _one_rank():
        bridge, provider = _provider(kind)
        apply(_container(kind, provider), ScaleVecConfig(**config))
        model = _build(provider)
        _perturb(model)
        try:
            list(bridge.export_hf_weights(model, show_progress=False))
        except Exception as error:
            result["refused"] = (type(error).__name__, str(error))
        before = _logits(model)
        try:
            fold_in_place(model)
        except Exception as error:
            result["error"] = (type(error).__name__, str(error))
            return result
        result["before"], result["after"] = before.numpy(), _logits(model).numpy()
        exported = bridge.export_hf_weights(model, cpu=True, show_progress=False)
        result["tensors"] = {name: weight.float().numpy() for name, weight in exported}
        result["config"] = bridge.hf_pretrained.to_dict()
    return result


def from_hugging_face(kind: str, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """A model whose provider loads Hugging Face weights, then gets its vectors.

    Args:
        folder: A Hugging Face model with trained norm scales.

    Returns:
        ``stock`` and ``converted`` logits, ``norms``: the retired scales, ``gamma``: one of the vectors.
    """
    import small
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec

    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.bridge import apply
    from megatron_scalevec.convert import applied_config

    result: dict[str, Any] = {}
    with _one_rank():
        for name in ("stock", "converted"):
            bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=torch.float32)
            provider = bridge.to_megatron_provider(load_weights=True)
            for field, value in small.LOCAL.items():
                setattr(provider, field, value)
            provider.transformer_layer_spec = local_layer_spec
            if name == "converted":
                apply(_container(kind, provider), ScaleVecConfig(**config))
            model = _build(provider)
            result[name] = _logits(model).numpy()
        result["strategy"] = applied_config(model).strategy
        layer = model.decoder.layers[0]
        result["norm"] = layer.input_layernorm.weight.detach().tolist()
        result["gamma"] = dict(layer.self_attention.linear_qkv.named_parameters())[
            "gamma_in_q_alpha"
        ].tolist()
    return result


def exported_checkpoint(
    kind: str, checkpoint: str, folder: str, stock: bool = False, absent: bool = False
) -> dict[str, Any]:
    """A checkpoint of a run, as the model that Bridge's loader makes of it, and as Hugging Face.

    Args:
        checkpoint: What Bridge's training has written, one iteration.
        folder: To write the Hugging Face model to.
        stock: Use ``AutoBridge.export_ckpt`` itself.
        absent: The package is not installed.

    Returns:
        ``logits`` of the loaded model, ``strategy`` that it carries, ``error``: type and text.
    """
    import small
    from megatron.bridge import AutoBridge

    result: dict[str, Any] = {"error": None}
    bridge = AutoBridge.from_hf_config(small.hf_config(kind))
    try:
        if absent:
            import bridge_jobs

            bridge_jobs.leave_out_the_package()
        if stock:
            bridge.export_ckpt(checkpoint, folder, show_progress=False)
            return result
        with _one_rank():
            [model] = bridge.load_megatron_model(checkpoint, wrap_with_ddp=False)
            from megatron_scalevec.convert import applied_config

            result["logits"] = _logits(model.eval()).numpy()
            result["strategy"] = applied_config(model).strategy
        from megatron_scalevec.bridge.export import export_ckpt

        export_ckpt(bridge, checkpoint, folder)
    except Exception as error:
        result["error"] = (type(error).__name__, str(error))
    return result


def two_models() -> dict[str, Any]:
    """Two models of one process, of which one was asked for; and a provider of a subclass."""
    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.bridge import apply
    from megatron_scalevec.convert import applied_config

    with _one_rank():
        _, asked = _provider("llama")
        apply(_container("llama", asked), ScaleVecConfig(strategy="hg"))
        first = applied_config(_build(asked))
        _, stock = _provider("llama")
        second = applied_config(_build(stock))
        _, gemma = _provider("gemma2")
        kind = type(gemma).__name__
        container = _container("gemma2", gemma)
        apply(container, ScaleVecConfig(strategy="hg"))
    return {
        "asked": first.strategy,
        "stock": second,
        "provider": (kind, type(container.model).__name__),
    }


def recipe_of_example(
    recipe: str, files: list[str], hf: dict[str, Any] | None, layers: int = 2
) -> dict[str, Any]:
    """A recipe of Bridge's own with YAML files merged into it, built on the meta device and audited.

    Args:
        recipe: A function of ``megatron.bridge.recipes``.
        files: YAML files.
        hf: The Hugging Face config that the recipe would fetch.
        layers: As many layers are built; everything else has its full size.

    Returns:
        ``audit`` as a dict, None for a stock model; ``provider``: class name; ``error``.
    """
    import megatron.bridge.recipes as recipes
    import small
    import transformers
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from megatron_scalevec.audit import audit
    from megatron_scalevec.bridge.container import settle
    from megatron_scalevec.convert import applied_config

    if hf is not None:
        hf = dict(hf)
        config = getattr(transformers, hf.pop("class"))(**hf)
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        AutoBridge.from_hf_pretrained = classmethod(lambda cls, *args, **kwargs: cls.from_hf_config(config))
    try:
        container = getattr(recipes, recipe)()
        for file in files:
            container = process_config_with_overrides(container, config_filepath=file)
        model = container.model
        result = {"error": None, "provider": type(model).__name__, "layers": model.num_layers}
        for name, value in small.LOCAL.items():
            setattr(model, name, value)
        model.seq_length = container.dataset.seq_length
        for size in ("tensor", "pipeline", "expert_model", "expert_tensor", "context"):
            field = f"{size}_parallel_size" if "expert" in size else f"{size}_model_parallel_size"
            setattr(model, "context_parallel_size" if size == "context" else field, 1)
        model.sequence_parallel = False
        model.num_layers = layers or model.num_layers
        model.transformer_layer_spec = local_layer_spec
        model.vocab_size = model.vocab_size or container.tokenizer.vocab_size + 1
        settle(container)
        model.finalize()
        with _one_rank(), torch.device("meta"):
            built = model.provide(pre_process=True, post_process=True)
            result["audit"] = json.loads(audit(built).to_json()) if applied_config(built) else None
            result["parameters"] = sum(param.numel() for param in built.parameters())
        return result
    except Exception as error:
        return {"error": (type(error).__name__, str(error))}
