"""Hugging Face's weight files, written as a stream and read tensor by tensor.

The format (safetensors): the length of a JSON header in eight bytes, little-endian; the header, which gives
dtype, shape and place of every tensor; then the tensors' bytes. The sizes are known before any tensor is
made, so the header can be written first and one tensor after another behind it. ``safetensors``' own writer
takes all tensors of a file at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_scalevec.errors import ScaleVecError

__all__ = ["INDEX_FILE", "SINGLE_FILE", "Entry", "WeightFolder", "plan_files", "write_file", "write_index"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


@dataclass(frozen=True)
class Entry:
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plan_files(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """Which file gets which tensors, in their order.

    Args:
        entries: All tensors.
        limit: Bytes of tensors per file; a larger tensor has a file to itself.

    Returns:
        File name to its tensors; ``model.safetensors`` where one file is enough.
    """
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def write_file(path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write one file; of ``tensors`` only one is asked for at a time.

    Raises:
        ValueError: A tensor is not of the shape and dtype that its entry says.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [place, place + entry.bytes],
        }
        place += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        # Nothing is held between two tensors.
        tensors = iter(tensors)
        for entry in entries:
            _write_tensor(file, entry, next(tensors))


def _write_tensor(file, entry: Entry, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise ValueError(
            f"{entry.name}: {tuple(tensor.shape)} {tensor.dtype}, not {entry.shape} {entry.dtype}"
        )
    file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))


def write_index(folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    """Write the index that says which file holds which tensor; a single file needs none."""
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(entry.bytes for group in files.values() for entry in group)},
        "weight_map": {entry.name: name for name, group in files.items() for entry in group},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class WeightFolder:
    """The weights of a Hugging Face folder, read one tensor at a time.

    Args:
        folder: Holds ``model.safetensors``, or several files and their index.

    Raises:
        ScaleVecError: ``safetensors`` is not installed, or files are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ScaleVecError(
                "reading Hugging Face weights needs safetensors: pip install 'megatron_scalevec[hf]'."
            ) from error
        self._open = safe_open
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        for name in _file_names(folder):
            for entry in self._entries_of(name):
                if entry.name in self._file_of:
                    raise ScaleVecError(f"{entry.name} is in {self._file_of[entry.name]} and in {name}.")
                self._file_of[entry.name] = name
                self._entries[entry.name] = entry

    def _entries_of(self, name: str) -> Iterator[Entry]:
        by_name = {text: dtype for dtype, text in _DTYPES.items()}
        try:
            with self._open(self._folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(key)
                    dtype = by_name.get(part.get_dtype())
                    if dtype is None:
                        raise ScaleVecError(
                            f"{key} in {self._folder / name} is of type {part.get_dtype()}, and this version "
                            "reads F64, F32, F16 and BF16: it does not undo quantization."
                        )
                    yield Entry(key, tuple(part.get_shape()), dtype)
        except ScaleVecError:
            raise
        except Exception as error:
            raise ScaleVecError(f"{self._folder / name} cannot be read: {error}.") from error

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors by name."""
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        """One tensor; KeyError where there is none of that name."""
        with self._open(self._folder / self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ScaleVecError(f"{index} is no index of weight files: {error}.") from error
    elif (folder / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    else:
        raise ScaleVecError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; older formats (pytorch_model.bin) can "
            "be saved anew by transformers with save_pretrained."
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ScaleVecError(f"{folder} lacks {', '.join(missing)}, which its index names.")
    return names
