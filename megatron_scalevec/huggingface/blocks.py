"""Which Hugging Face tensors a Megatron tensor is made of.

One table for both directions. A :class:`Block` is one tensor of Megatron's (of one layer, of one expert) and
the Hugging Face tensors that hold the same numbers; a model is a sequence of blocks, each small enough to be
held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_scalevec.huggingface.description import Description
from megatron_scalevec.huggingface.rows import (
    cut_rows,
    join_halves,
    join_qkv,
    pad_rows,
    split_halves,
    split_qkv,
)

__all__ = ["EXPERT_NAMES", "Block", "ExpertNames", "blocks_of", "optional_names"]

Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]
Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class ExpertNames:
    """What an architecture calls a layer's mixture of experts and the three maps of an expert."""

    block: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True)
class Block:
    """One tensor of Megatron's.

    ``key``: Megatron's name, without ``decoder.layers.`` and the layer for one of a layer. ``names`` and
    ``shapes``: of the Hugging Face tensors, in the order in which ``split`` gives them and ``join`` takes
    them. ``shape``: of Megatron's tensor, without its axes for layers and experts. ``norm``: γ of a norm.
    """

    key: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    layer: int | None = None
    expert: int | None = None
    split: Split = lambda tensor: [tensor]
    join: Join = lambda parts: parts[0]
    norm: bool = False


def blocks_of(model: Description, architecture: str, vocabulary: int) -> Iterator[Block]:
    """All tensors of a model, in the order of its layers.

    Args:
        model: What the model is; its ``vocabulary`` counts Megatron's padded rows.
        architecture: Decides the names of experts.
        vocabulary: Rows of the embedding in the Hugging Face model.
    """

    def table(key: str, name: str) -> Block:
        return Block(
            key,
            (name,),
            (model.vocabulary, model.hidden),
            ((vocabulary, model.hidden),),
            split=partial(cut_rows, rows=vocabulary),
            join=partial(pad_rows, rows=model.vocabulary),
        )

    yield table("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(model.layers):
        yield from _attention(model, layer)
        if model.experts is not None and model.experts.layers[layer]:
            yield from _experts(model, layer, EXPERT_NAMES[architecture])
        else:
            yield from _dense(model, layer)
    yield _norm("decoder.final_layernorm.weight", "model.norm.weight", model.hidden)
    if not model.tied:
        yield table("output_layer.weight", "lm_head.weight")


def optional_names(model: Description) -> set[str]:
    """Tensors that a Hugging Face folder may hold and that say nothing of their own: the output head of a
    model that uses its embedding, and the frequencies of RoPE that old versions saved."""
    names = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(model.layers)}
    return names | {"model.rotary_emb.inv_freq"} | ({"lm_head.weight"} if model.tied else set())


def _norm(key: str, name: str, size: int, layer: int | None = None) -> Block:
    return Block(key, (name,), (size,), ((size,),), layer, norm=True)


def _whole(key: str, name: str, shape: tuple[int, ...], layer: int, expert: int | None = None) -> Block:
    return Block(key, (name,), shape, (shape,), layer, expert)


def _attention(model: Description, layer: int) -> Iterator[Block]:
    ours, theirs = "self_attention", f"model.layers.{layer}.self_attn"
    queries, keys = model.heads * model.head_dim, model.groups * model.head_dim
    rows = (queries, keys, keys)

    def fused(kind: str, *columns: int) -> Block:
        return Block(
            f"{ours}.linear_qkv.{kind}",
            tuple(f"{theirs}.{branch}_proj.{kind}" for branch in "qkv"),
            (sum(rows), *columns),
            tuple((size, *columns) for size in rows),
            layer,
            split=partial(split_qkv, groups=model.groups, head_dim=model.head_dim),
            join=partial(join_qkv, groups=model.groups),
        )

    name = f"model.layers.{layer}.input_layernorm.weight"
    yield _norm(f"{ours}.linear_qkv.layer_norm_weight", name, model.hidden, layer)
    yield fused("weight", model.hidden)
    if model.qkv_bias:
        yield fused("bias")
    for branch in model.head_norms:
        # The norm on v lies in the map that it follows: transformers' attention has no place for one.
        name = f"{theirs}.v_proj.norm.weight" if branch == "v" else f"{theirs}.{branch}_norm.weight"
        yield _norm(f"{ours}.{branch}_layernorm.weight", name, model.head_dim, layer)
    yield _whole(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (model.hidden, queries), layer)
    if model.linear_bias:
        yield _whole(f"{ours}.linear_proj.bias", f"{theirs}.o_proj.bias", (model.hidden,), layer)


def _gate_and_up(
    key: str, names: tuple[str, str], width: int, columns: tuple[int, ...], layer: int, expert: int | None
) -> Block:
    return Block(
        key,
        names,
        (2 * width, *columns),
        ((width, *columns),) * 2,
        layer,
        expert,
        split_halves,
        join_halves,
    )


def _mlp_norm(model: Description, layer: int) -> Block:
    name = f"model.layers.{layer}.post_attention_layernorm.weight"
    return _norm("mlp.linear_fc1.layer_norm_weight", name, model.hidden, layer)


def _dense(model: Description, layer: int) -> Iterator[Block]:
    theirs = f"model.layers.{layer}.mlp"
    yield _mlp_norm(model, layer)
    kinds = {"weight": (model.hidden,), **({"bias": ()} if model.linear_bias else {})}
    for kind, columns in kinds.items():
        names = (f"{theirs}.gate_proj.{kind}", f"{theirs}.up_proj.{kind}")
        yield _gate_and_up(f"mlp.linear_fc1.{kind}", names, model.width, columns, layer, None)
    down = f"{theirs}.down_proj"
    yield _whole("mlp.linear_fc2.weight", f"{down}.weight", (model.hidden, model.width), layer)
    if model.linear_bias:
        yield _whole("mlp.linear_fc2.bias", f"{down}.bias", (model.hidden,), layer)


def _experts(model: Description, layer: int, names: ExpertNames) -> Iterator[Block]:
    experts = model.experts
    theirs = f"model.layers.{layer}.{names.block}"
    yield _mlp_norm(model, layer)
    yield _whole("mlp.router.weight", f"{theirs}.gate.weight", (experts.number, model.hidden), layer)
    for expert in range(experts.number):
        own = f"{theirs}.experts.{expert}"
        gate_and_up = (f"{own}.{names.gate}.weight", f"{own}.{names.up}.weight")
        yield _gate_and_up(
            "mlp.experts.experts.linear_fc1.weight",
            gate_and_up,
            experts.width,
            (model.hidden,),
            layer,
            expert,
        )
        yield _whole(
            "mlp.experts.experts.linear_fc2.weight",
            f"{own}.{names.down}.weight",
            (model.hidden, experts.width),
            layer,
            expert,
        )
