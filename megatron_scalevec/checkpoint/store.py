"""torch_dist checkpoints as files: read piece by piece, written as a stream, no model and no process group.

Reading and writing go through ``torch.distributed.checkpoint``'s own storage classes, so the file format is
theirs. Both sides handle one stored chunk at a time. While a checkpoint is rewritten, memory stays below
:data:`PEAK_TENSORS` times its largest chunk (in bytes of its dtype, or of float32 where that is wider) plus
:data:`PEAK_BYTES`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_scalevec.checkpoint.keys import is_raw_master, master_key
from megatron_scalevec.checkpoint.layout import (
    COMMON_FILE,
    CONFIG_FILE,
    TRACKER_FILE,
    find_checkpoint,
    iteration_folder,
)
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.folders import new_folder

__all__ = [
    "COMMON_OBJECT",
    "PEAK_BYTES",
    "PEAK_TENSORS",
    "Box",
    "CheckpointReader",
    "Piece",
    "StoredTensor",
    "write_checkpoint",
]

PEAK_TENSORS = 4
"""See the module's description: a file's worth on the way out, what is read, and what is made of it."""
PEAK_BYTES = 128 << 20
"""What is independent of the tensors' size: small tensors written together, and torch's own needs."""

COMMON_OBJECT = "common_state/shard_0_1"
"""Since megatron-core 0.19 the state that is no tensor is an object of this name."""

_FILE_BYTES = 32 << 20


@dataclass(frozen=True)
class Box:
    """A block of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint says of a tensor. ``shape`` is that of the whole, over all ranks and layers."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Box, ...]


class CheckpointReader:
    """A torch_dist checkpoint, opened by its metadata.

    Args:
        path: A ``--save`` folder, or the folder of one iteration.
        step: Another iteration than the one that the tracker file names.

    Raises:
        ScaleVecError: There is no such checkpoint, it is in another format, or it was cut short.
    """

    def __init__(self, path: str | os.PathLike[str], step: int | None = None) -> None:
        location = find_checkpoint(path, step)
        self.folder = location.folder
        self.iteration = location.iteration
        self._storage = FileSystemReader(self.folder)
        self._metadata = self._storage.read_metadata()
        self._storage.set_up_storage_reader(self._metadata, is_coordinator=True)
        entries = self._metadata.state_dict_metadata.items()
        self.tensors = {
            key: StoredTensor(
                key,
                tuple(entry.size),
                entry.properties.dtype,
                tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
            )
            for key, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }
        self._stored_as = self._raw_masters()
        self.objects = tuple(
            key for key, entry in entries if isinstance(entry, BytesStorageMetadata) and key != COMMON_OBJECT
        )
        self.has_common_file = (self.folder / COMMON_FILE).exists()
        self._common: dict[str, Any] | None = None

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a block of it, in its stored dtype.

        Raises:
            KeyError: There is no such tensor.
        """
        stored = self.tensors[key]
        key = self._stored_as.get(key, key)
        box = box or Box((0,) * len(stored.shape), stored.shape)
        into = torch.empty(box.sizes, dtype=stored.dtype)
        wanted = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        entry = self._metadata.state_dict_metadata[key]
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        self._storage.read_data(LoadPlan(items), _ReadInto(into)).wait()
        return into

    def _raw_masters(self) -> dict[str, str]:
        """Raw masters get the keys of other masters, where guards are. Returns those keys to the stored."""
        stored_as = {master_key(key): key for key in self.tensors if is_raw_master(key)}
        for key, stored in stored_as.items():
            self.tensors[key] = dataclasses.replace(self.tensors.pop(stored), key=key)
        return stored_as

    def read_object(self, name: str) -> bytes:
        """An object as it is stored: what ``torch.save`` has made of a list of shards."""
        index = MetadataIndex(name)
        item = ReadItem(
            LoadItemType.BYTE_IO, index, torch.Size((0,)), index, torch.Size((0,)), torch.Size((0,))
        )
        planner = _ReadInto(None)
        self._storage.read_data(LoadPlan([item]), planner).wait()
        return planner.payload

    @property
    def common(self) -> dict[str, Any]:
        """The state that is the same on all ranks: ``args``, ``iteration``, the scheduler, groups.

        Raises:
            ScaleVecError: It holds objects of types that Megatron does not let a checkpoint hold.
        """
        if self._common is None:
            self._common = self._read_common()
        return self._common

    @property
    def args(self) -> argparse.Namespace:
        """Megatron's arguments of the run that saved.

        Raises:
            ScaleVecError: There are none.
        """
        found = self.common.get("args")
        if found is None:
            raise ScaleVecError(
                f"{self.folder} does not hold the arguments of the run that wrote it, so the model is not "
                "known; save it once with Megatron's training script."
            )
        return found

    def _read_common(self) -> dict[str, Any]:
        from megatron.core import safe_globals

        safe_globals.register_safe_globals()
        try:
            if self.has_common_file:
                return torch.load(self.folder / COMMON_FILE, map_location="cpu", weights_only=True)
            [state] = torch.load(io.BytesIO(self.read_object(COMMON_OBJECT)), weights_only=True)
            return state
        except KeyError:
            raise ScaleVecError(
                f"{self.folder} holds tensors and nothing about the run that wrote it; save it once with "
                "Megatron's training script."
            ) from None
        except Exception as error:
            raise ScaleVecError(
                f"the state beside the tensors in {self.folder} cannot be read: "
                f"{' '.join(str(error).split())[:300]}."
            ) from error


class _ReadInto(DefaultLoadPlanner):
    """Puts what is read where it belongs in one tensor, or keeps the bytes of one object."""

    def __init__(self, into: torch.Tensor | None) -> None:
        super().__init__()
        self.into = into
        self.payload = b""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self.into
        for axis, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            view = view.narrow(axis, start, size)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.payload = value.getvalue()


@dataclass(frozen=True)
class Piece:
    """A block of a tensor to be written. ``make`` is called when its turn has come, and once.

    ``shape`` and ``dtype`` are those of the whole tensor; the pieces of a key tile it. ``make`` returns
    [*box.sizes] of that dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    make: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.box.sizes).numel() * self.dtype.itemsize


def write_checkpoint(
    target: str | os.PathLike[str],
    *,
    iteration: int | str,
    pieces: Sequence[Piece],
    objects: Mapping[str, Callable[[], bytes]],
    common: Mapping[str, Any],
    common_file: bool,
    done: Callable[[int], None] = lambda size: None,
    before_commit: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a folder with one checkpoint, as Megatron's ``--load`` takes it; whole or not at all.

    Everything is written into a hidden folder first, see :func:`megatron_scalevec.folders.new_folder`.

    Args:
        target: The folder to make. Its parent exists, it does not.
        iteration: Of the checkpoint; ``release`` for one without.
        pieces: All tensors. They are made one after another, in this order.
        objects: Other entries by name, as :meth:`CheckpointReader.read_object` returns them.
        common: Megatron's common state.
        common_file: Whether to store it as megatron-core does up to 0.18.
        done: Told the number of bytes after every piece.
        before_commit: Called with the ``target``-to-be before it gets its name; what it raises undoes all.

    Raises:
        ScaleVecError: ``target`` exists, its parent does not, or nothing can be written there.
    """
    with new_folder(target) as draft:
        folder = draft / iteration_folder(iteration)
        folder.mkdir()
        _write_tensors(folder, pieces, _with_common(objects, None if common_file else common), done)
        if common_file:
            torch.save(dict(common), folder / COMMON_FILE)
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        (draft / TRACKER_FILE).write_text(str(iteration), encoding="utf-8")
        before_commit(draft)


def _with_common(
    objects: Mapping[str, Callable[[], bytes]], common: Mapping[str, Any] | None
) -> dict[str, Callable[[], bytes]]:
    if common is None:
        return dict(objects)

    def payload() -> bytes:
        stream = io.BytesIO()
        torch.save([dict(common)], stream)
        return stream.getvalue()

    return {**objects, COMMON_OBJECT: payload}


def _write_tensors(
    folder: Path,
    pieces: Sequence[Piece],
    objects: Mapping[str, Callable[[], bytes]],
    done: Callable[[int], None],
) -> None:
    # Serial copies on machines with a GPU too, where torch would prepare several tensors ahead.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    plans = [SavePlan([_item_of(piece) for piece in group]) for group in _files(pieces)]
    plans.append(SavePlan([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]))
    writer.prepare_local_plan(SavePlan([]))
    plans, metadata = create_default_global_save_plan(plans)
    by_place = {(piece.key, piece.box.offsets): piece for piece in pieces}
    if len(by_place) != len(pieces):
        raise ValueError("two pieces of one tensor have the same place")
    planner = _WriteLazily(by_place, objects, done)
    results = []
    for plan in writer.prepare_global_plan(plans):
        if plan.items:
            results.append(writer.write_data(plan, planner).wait())
    writer.finish(metadata, results)


def _files(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that share a file: torch holds on to a file's tensors until the file is complete."""
    limit = max([_FILE_BYTES, *(piece.bytes for piece in pieces)])
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.bytes > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.bytes
    if group:
        yield group


def _item_of(piece: Piece) -> WriteItem:
    offsets, sizes = torch.Size(piece.box.offsets), torch.Size(piece.box.sizes)
    return WriteItem(
        MetadataIndex(piece.key, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=piece.dtype), torch.Size(piece.shape)
        ),
    )


class _WriteLazily(DefaultSavePlanner):
    def __init__(
        self,
        pieces: Mapping[tuple[str, tuple[int, ...]], Piece],
        objects: Mapping[str, Callable[[], bytes]],
        done: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._objects = objects
        self._done = done

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn]())
        piece = self._pieces[write_item.index.fqn, tuple(write_item.index.offset)]
        made = piece.make()
        if tuple(made.shape) != piece.box.sizes or made.dtype != piece.dtype:
            raise ValueError(
                f"{piece.key}: made {tuple(made.shape)} {made.dtype}, not {piece.box.sizes} {piece.dtype}"
            )
        self._done(piece.bytes)
        return made.contiguous()
