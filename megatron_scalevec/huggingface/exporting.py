"""From a Megatron checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from megatron_scalevec.checkpoint.store import CheckpointReader
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.folders import new_folder
from megatron_scalevec.huggingface.architectures import Architecture, choose_architecture, config_of
from megatron_scalevec.huggingface.blocks import Block, blocks_of
from megatron_scalevec.huggingface.description import Description, from_arguments
from megatron_scalevec.huggingface.folded import FoldedCheckpoint
from megatron_scalevec.huggingface.safetensors_files import Entry, plan_files, write_file, write_index

__all__ = ["FILE_BYTES", "Export", "Progress", "export_checkpoint"]

FILE_BYTES = 5_000_000_000
"""Bytes of tensors per file."""

Progress = Callable[[int, int], None]
"""Told the number of bytes of a tensor that is done, and of all."""

_REMOTE_FILES = ("configuration_scalevec.py", "modeling_scalevec.py")
_MTP = "mtp."


@dataclass(frozen=True)
class Export:
    """What was written: the folder, the architecture, numbers of tensors and parameters, the iteration."""

    folder: Path
    architecture: str
    tensors: int
    parameters: int
    iteration: int | str


@torch.no_grad()
def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    architecture: str = "auto",
    vocabulary: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    drop_mtp: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Progress = lambda done, total: None,
) -> Export:
    """Write a torch_dist checkpoint, stock or with scale vectors, as a Hugging Face folder.

    Scale vectors are folded into the weights. The folder appears whole or not at all; memory holds one
    tensor of one layer, of one expert, and a few copies of it.

    Args:
        checkpoint: A ``--save`` folder of Megatron, or the folder of one iteration.
        target: The folder to make.
        step: Another iteration than the last.
        architecture: A key of ``ARCHITECTURES``, or ``auto``.
        vocabulary: Keep this many rows of the embedding and of the output head; all of them by default.
            The softmax in training ran over all rows, the padding included.
        tokenizer: A folder of tokenizer files to copy.
        drop_mtp: Leave out multi-token-prediction layers instead of refusing the model.
        file_bytes: Bytes of tensors per file.
        progress: Called after each tensor.

    Raises:
        ScaleVecError: The checkpoint is not whole, the architecture cannot hold the model, or the folder
            cannot be written.
    """
    if os.path.lexists(target):
        raise ScaleVecError(f"{target} exists already, and nothing is overwritten: give another name.")
    reader = CheckpointReader(checkpoint, step)
    model = from_arguments(reader.args)
    chosen = choose_architecture(model, architecture)
    rows = _rows(model, vocabulary)
    source = FoldedCheckpoint(reader, model)
    blocks = list(blocks_of(model, chosen.name, rows))
    dtypes, left = source.claim(blocks)
    _refuse_leftovers(left, drop_mtp)
    tokenizer_files = _tokenizer_files(tokenizer)
    entries = [
        Entry(name, shape, dtype)
        for block, dtype in zip(blocks, dtypes)
        for name, shape in zip(block.names, block.shapes)
    ]
    spread = getattr(reader.args, "init_method_std", 0.02)
    stored = replace(model, vocabulary=rows)
    config = config_of(stored, chosen, rows, _main_dtype(entries), spread)
    with new_folder(target) as draft:
        _write_config(draft, config, chosen)
        for file in tokenizer_files:
            shutil.copyfile(file, draft / file.name)
        total = sum(entry.bytes for entry in entries)
        tensors = _told(_tensors(source, blocks), progress, total)
        files = plan_files(entries, file_bytes)
        for name, group in files.items():
            write_file(draft / name, group, tensors)
        write_index(draft, files)
    parameters = sum(torch.Size(entry.shape).numel() for entry in entries)
    return Export(Path(target), chosen.name, len(entries), parameters, reader.iteration)


def _rows(model: Description, vocabulary: int | None) -> int:
    if vocabulary is None:
        return model.vocabulary
    if not 0 < vocabulary <= model.vocabulary:
        raise ScaleVecError(
            f"--vocab-size {vocabulary}: the checkpoint's embedding has {model.vocabulary} rows, padding "
            "included; give a number from 1 to that."
        )
    return vocabulary


def _refuse_leftovers(left: Sequence[str], drop_mtp: bool) -> None:
    """A tensor that nobody asks for would be lost without a word."""
    if any(key.startswith(_MTP) for key in left) and not drop_mtp:
        raise ScaleVecError(
            "the checkpoint has multi-token-prediction layers, which no architecture that this version "
            "writes holds; the model predicts the next token without them: give --drop-mtp to leave them out."
        )
    left = [key for key in left if not key.startswith(_MTP)]
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise ScaleVecError(
            f"the checkpoint holds {shown}, which no tensor of the exported model stands for, so it would be "
            "lost; nothing was written."
        )


def _tokenizer_files(folder: str | os.PathLike[str] | None) -> list[Path]:
    """Everything in the folder but what an export writes itself."""
    if folder is None:
        return []
    root = Path(folder)
    if not root.is_dir():
        raise ScaleVecError(f"--tokenizer {folder} is not a folder.")
    own = {"config.json", *_REMOTE_FILES}
    files = [
        file
        for file in sorted(root.iterdir())
        if file.is_file()
        and file.name not in own
        and file.suffix in (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab")
        and not file.name.endswith(".index.json")
        and file.name != "generation_config.json"
    ]
    if not any(file.name.startswith(("tokenizer", "vocab")) for file in files):
        raise ScaleVecError(
            f"--tokenizer {folder} holds no tokenizer files (tokenizer.json, vocab.json, ...)."
        )
    return files


def _main_dtype(entries: Sequence[Entry]) -> str:
    """The dtype in which most of the model is stored, by its name in torch."""
    sizes: dict[torch.dtype, int] = {}
    for entry in entries:
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.bytes
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.")


def _write_config(folder: Path, config: dict[str, Any], architecture: Architecture) -> None:
    def write(name: str, content: dict[str, Any]) -> None:
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    write("config.json", config)
    # No token is known to end a text: what the tokenizer says goes here or into `generate`'s arguments.
    write("generation_config.json", {"_from_model_config": True, "bos_token_id": None, "eos_token_id": None})
    if architecture.name == "scalevec":
        remote = resources.files("megatron_scalevec.huggingface.remote")
        for name in _REMOTE_FILES:
            (folder / name).write_text((remote / name).read_text(encoding="utf-8"), encoding="utf-8")


def _tensors(source: FoldedCheckpoint, blocks: Sequence[Block]) -> Iterator[torch.Tensor]:
    for block in blocks:
        yield from block.split(source.read(block))


def _told(tensors: Iterator[torch.Tensor], progress: Progress, total: int) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        yield tensor
        progress(size, total)
