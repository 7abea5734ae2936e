"""From a Hugging Face folder to a stock Megatron checkpoint."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_scalevec.checkpoint.store import Box, Piece, write_checkpoint
from megatron_scalevec.config import ScaleVecConfig, choose
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.folders import new_folder
from megatron_scalevec.huggingface.architectures import description_of
from megatron_scalevec.huggingface.blocks import Block, blocks_of, optional_names
from megatron_scalevec.huggingface.description import Description, megatron_flags, to_arguments
from megatron_scalevec.huggingface.exporting import Progress
from megatron_scalevec.huggingface.safetensors_files import WeightFolder

__all__ = ["ARGUMENTS_FILE", "IMPLEMENTATIONS", "RELEASE", "Import", "import_folder", "import_unfolded"]

IMPLEMENTATIONS = ("transformer_engine", "local")
RELEASE = "release"
"""Megatron's name for a checkpoint that no iteration and no optimizer belongs to."""
ARGUMENTS_FILE = "megatron_arguments.txt"


@dataclass(frozen=True)
class Import:
    """What was written: the folder, the architecture it came from, numbers of tensors and parameters, and
    the flags of the model that ``--use-checkpoint-args`` does not restore."""

    folder: Path
    architecture: str
    tensors: int
    parameters: int
    flags_to_give: tuple[str, ...]


@torch.no_grad()
def import_folder(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    implementation: str = "transformer_engine",
    vocabulary_multiple: int = 128,
    progress: Progress = lambda done, total: None,
) -> Import:
    """Write a Hugging Face folder as a stock torch_dist checkpoint that Megatron's ``--load`` takes.

    The checkpoint is a ``release``: the model alone, from iteration 0. Its arguments are those of the model,
    for ``--use-checkpoint-args``; all of them lie in ``megatron_arguments.txt`` too, as words of a command
    line. It appears whole or not at all; memory holds a few copies of the largest tensor of a layer.

    Args:
        folder: ``config.json`` and safetensors files.
        target: The folder to make.
        implementation: ``--transformer-impl`` of the runs that will load it: in layers with experts the two
            save the norm under different names.
        vocabulary_multiple: Pad the vocabulary with rows of zeros to a multiple of this.
        progress: Called after each tensor.

    Raises:
        ScaleVecError: The folder is not whole, or is of a model that stock Megatron cannot hold.
    """
    if os.path.lexists(target):
        raise ScaleVecError(f"{target} exists already, and nothing is overwritten: give another name.")
    choose("value for --transformer-impl", implementation, IMPLEMENTATIONS)
    if vocabulary_multiple < 1:
        raise ScaleVecError(f"--make-vocab-size-divisible-by {vocabulary_multiple}: give a positive number.")
    config = _config(Path(folder))
    model, architecture = description_of(config)
    rows = model.vocabulary
    model = replace(model, vocabulary=-(-rows // vocabulary_multiple) * vocabulary_multiple)
    source = WeightFolder(Path(folder))
    blocks = list(blocks_of(model, architecture.name, rows))
    _require_tensors(source, blocks, optional_names(model))
    pieces = [_piece(source, block, model, implementation) for block in blocks]
    total = sum(piece.bytes for piece in pieces)
    arguments = to_arguments(model, implementation)
    arguments.make_vocab_size_divisible_by = vocabulary_multiple
    flags = megatron_flags(model, implementation)

    def leave_arguments(draft: Path) -> None:
        (draft / ARGUMENTS_FILE).write_text(" ".join(flags) + "\n", encoding="utf-8")

    write_checkpoint(
        target,
        iteration=RELEASE,
        pieces=pieces,
        objects=dict.fromkeys(_extra_states(model), _no_extra_state),
        common={"args": arguments, "checkpoint_version": 3.0, "iteration": 0},
        # Read by every version of Megatron; one object inside the checkpoint is read from 0.19 on.
        common_file=True,
        done=lambda size: progress(size, total),
        before_commit=leave_arguments,
    )
    return Import(
        Path(target),
        architecture.name,
        len(pieces),
        sum(torch.Size(block.shape).numel() for block in blocks),
        tuple(megatron_flags(model, implementation, restored=False)),
    )


def import_unfolded(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    strategy: str,
    *,
    say: Callable[[str], None] = lambda text: None,
    **choices: Any,
) -> Import:
    """As :func:`import_folder`, and unfolded to the start of a run with scale vectors.

    Args:
        folder: As for :func:`import_folder`.
        target: The folder to make. The stock checkpoint lies beside it for the time being.
        strategy: A ``--scalevec-strategy``.
        say: Told what unfolding did and checked, in sentences.
        choices: The keyword arguments of :func:`import_folder`.

    Raises:
        ScaleVecError: Of importing or of unfolding; nothing was written.
    """
    from megatron_scalevec.checkpoint.commands import unfold_checkpoint

    config = ScaleVecConfig(strategy=strategy)
    with new_folder(target) as draft:
        made = import_folder(folder, draft / "stock", **choices)
        unfold_checkpoint(draft / "stock", draft / "unfolded", config, optimizer=False, say=say)
        words = (draft / "stock" / ARGUMENTS_FILE).read_text(encoding="utf-8").split()
        shutil.rmtree(draft / "stock")
        for part in list((draft / "unfolded").iterdir()):
            part.rename(draft / part.name)
        (draft / "unfolded").rmdir()
        flags = [*words, "--scalevec-strategy", strategy]
        (draft / ARGUMENTS_FILE).write_text(" ".join(flags) + "\n", encoding="utf-8")
    return replace(made, folder=Path(target))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScaleVecError(
            f"{path} cannot be read ({error.strerror}): give a folder written by save_pretrained."
        ) from error
    except ValueError as error:
        raise ScaleVecError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ScaleVecError(f"{path} is not a config of transformers'.")
    return config


def _require_tensors(source: WeightFolder, blocks: Sequence[Block], optional: Iterable[str]) -> None:
    """Every tensor there, of the right shape, and none besides."""
    wanted = {name: shape for block in blocks for name, shape in zip(block.names, block.shapes)}
    found = source.entries
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ScaleVecError(f"the folder lacks {_some(missing)}, which a model of its config.json has.")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise ScaleVecError(
                f"{name} is {list(found[name].shape)}, and config.json says {list(shape)}; nothing was "
                "written."
            )
    surplus = [name for name in found if name not in wanted and name not in set(optional)]
    if surplus:
        raise ScaleVecError(
            f"the folder holds {_some(surplus)}, which the Megatron model has no place for, so it would be "
            "lost; nothing was written."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _piece(source: WeightFolder, block: Block, model: Description, implementation: str) -> Piece:
    key, stack, place = _place(block, model, implementation)
    dtypes = {source.entries[name].dtype for name in block.names}
    if len(dtypes) != 1:
        raise ScaleVecError(f"{' and '.join(block.names)} are one tensor in Megatron and differ in dtype.")

    def make() -> torch.Tensor:
        joined = block.join([source.read(name) for name in block.names])
        return joined.view(*(1,) * len(stack), *block.shape)

    box = Box(place + (0,) * len(block.shape), (1,) * len(stack) + block.shape)
    return Piece(key, stack + block.shape, dtypes.pop(), box, make)


def _place(
    block: Block, model: Description, implementation: str
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A block's key, the sizes of its axes for layers and experts, and its place on them."""
    key = block.key
    if block.layer is None:
        return key, (), ()
    if (
        key == "mlp.linear_fc1.layer_norm_weight"
        and implementation == "transformer_engine"
        and _has_experts(model, block.layer)
    ):
        key = "pre_mlp_layernorm.weight"
    prefix, stack, place = "decoder.layers.", (model.layers,), (block.layer,)
    if _layers_differ(model):
        prefix, stack, place = f"decoder.layers.{block.layer}.", (), ()
    if block.expert is not None:
        stack, place = (*stack, model.experts.number), (*place, block.expert)
    return prefix + key, stack, place


def _has_experts(model: Description, layer: int) -> bool:
    return model.experts is not None and model.experts.layers[layer]


def _layers_differ(model: Description) -> bool:
    """Then Megatron saves every layer under a key of its own (``TransformerBlock.sharded_state_dict``)."""
    return model.experts is not None and not all(model.experts.layers)


def _no_extra_state() -> bytes:
    """What a module without an extra state saves: local layers save this, TransformerEngine's accept it."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream.getvalue()


def _extra_states(model: Description) -> Iterator[str]:
    """Names of the states that modules of TransformerEngine's, and of local layers in their place, ask for
    besides their parameters: FP8 scales, which a fresh start has none of. A missing one stops Megatron."""
    layers = range(model.layers)
    of_all = ["linear_qkv", "linear_proj", "core_attention"]
    of_all += [f"{branch}_layernorm" for branch in model.head_norms]
    for module in of_all:
        yield from _states(model, layers, f"self_attention.{module}")
    dense = [layer for layer in layers if not _has_experts(model, layer)]
    routed = [layer for layer in layers if _has_experts(model, layer)]
    for module in ("linear_fc1", "linear_fc2"):
        yield from _states(model, dense, f"mlp.{module}")
        if routed:
            yield from _states(model, routed, f"mlp.experts.experts.{module}", model.experts.number)
    yield from _states(model, routed, "pre_mlp_layernorm")
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _states(
    model: Description, layers: Iterable[int], module: str, experts: int | None = None
) -> Iterator[str]:
    """By the naming of ``ShardedObject``: the place and the sizes of the stacked axes."""
    for layer in layers:
        alone = _layers_differ(model)
        prefix = f"decoder.layers.{layer}." if alone else "decoder.layers."
        for expert in [None] if experts is None else range(experts):
            place = [*([] if alone else [(layer, model.layers)])]
            place += [] if expert is None else [(expert, experts)]
            place = place or [(0, 1)]
            at = ".".join(str(index) for index, _ in place)
            of = ".".join(str(size) for _, size in place)
            yield f"{prefix}{module}._extra_state/shard_{at}_{of}"
