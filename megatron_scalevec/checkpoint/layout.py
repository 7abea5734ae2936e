"""Where checkpoints lie: Megatron's folder of iterations, its tracker file, and what a whole one is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "COMMON_FILE",
    "CONFIG_FILE",
    "METADATA_FILE",
    "TRACKER_FILE",
    "Location",
    "find_checkpoint",
    "folder_to_load",
    "iteration_folder",
    "missing_parts",
    "not_whole",
    "tracked_iteration",
    "whole_iterations",
]

TRACKER_FILE = "latest_checkpointed_iteration.txt"
METADATA_FILE = ".metadata"
CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"
"""Up to megatron-core 0.18; afterwards the same state is an object inside the checkpoint."""

RELEASE = "release"
_NON_PERSISTENT = "non_persistent"


@dataclass(frozen=True)
class Location:
    """A checkpoint of one iteration. ``iteration`` is ``release`` for Megatron's release checkpoints."""

    folder: Path
    iteration: int | str


def iteration_folder(iteration: int | str) -> str:
    """Name of an iteration's folder, as Megatron's ``get_checkpoint_name`` has it."""
    return RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}"


def find_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Location:
    """The checkpoint that a path stands for.

    Args:
        path: A ``--save`` folder, of which the tracker file names the checkpoint, or one iteration's folder.
        step: Another iteration than the tracker's.

    Raises:
        ScaleVecError: There is none, it is of another format than torch_dist, or it was cut short.
    """
    root = Path(path)
    if not root.is_dir():
        raise ScaleVecError(f"{path} is not a folder; give a checkpoint folder, Megatron's --save.")
    if _iteration_of(root) is not None and not (root / TRACKER_FILE).exists():
        if step is not None:
            raise ScaleVecError(f"{path} is the folder of one iteration, so a step cannot be chosen in it.")
        location = Location(root, _iteration_of(root))
    else:
        iteration = step if step is not None else tracked_iteration(root)
        location = Location(root / iteration_folder(iteration), iteration)
    _require_torch_dist(location.folder)
    problem = missing_parts(location.folder)
    if problem:
        raise ScaleVecError(not_whole(location.folder, problem))
    return location


def folder_to_load(root: str | os.PathLike[str] | None, args: Any) -> Path | None:
    """The iteration's folder that Megatron's ``_load_base_checkpoint`` takes; it may not exist.

    Args:
        root: The folder to load from, Megatron's ``--load``; None where there is none.
        args: Megatron's. A non-persistent checkpoint (``--non-persistent-ckpt-type global``) is taken where
            it is not older than the other one; local ones, which each node keeps for itself, are not looked
            at.

    Returns:
        None where there is nothing to load, as at the first start of a run.

    Raises:
        ScaleVecError: A tracker file does not name an iteration.
    """
    iteration = _tracked(root)
    if iteration != RELEASE:
        iteration = getattr(args, "ckpt_step", None) or iteration
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        beside = None if root is None else Path(root) / _NON_PERSISTENT
        apart = getattr(args, "non_persistent_global_ckpt_dir", None) or beside
        newest = _tracked(apart)
        # Megatron gives a release the number 0, and has no releases among these.
        if isinstance(newest, int) and newest >= (0 if iteration in (None, RELEASE) else iteration):
            return Path(apart) / iteration_folder(newest)
    return None if root is None or iteration is None else Path(root) / iteration_folder(iteration)


def _tracked(root: str | os.PathLike[str] | None) -> int | str | None:
    """None where no tracker file is there."""
    if root is None or not os.path.isfile(os.path.join(root, TRACKER_FILE)):
        return None
    return tracked_iteration(root)


def not_whole(
    folder: str | os.PathLike[str], problem: str, root: str | os.PathLike[str] | None = None
) -> str:
    """The sentence about a checkpoint for which :func:`missing_parts` has found something.

    ``root``: the folder that was to be loaded from, where that may be another than the checkpoint's parent.
    """
    parent = Path(folder).parent
    way = _instead(parent)
    if root is not None and Path(root) != parent:  # where Megatron takes the newest whatever --ckpt-step says
        way = f"leave out --non-persistent-ckpt-type for the persistent ones: {_instead(Path(root))}"
    return f"the checkpoint in {folder} is not whole ({problem}), as when a save was cut short; {way}."


def missing_parts(folder: str | os.PathLike[str]) -> str | None:
    """What a torch_dist checkpoint lacks, in words; None where it is whole.

    Megatron writes the data files first, then ``.metadata``, then ``metadata.json``. Data files are compared
    with the sizes that ``.metadata`` names, which also finds a disk that was full, and a file that was being
    overwritten by a second save into the same folder.
    """
    from torch.distributed.checkpoint import FileSystemReader

    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "sharded_backend" not in config:
            return f"{CONFIG_FILE} does not name a format"
    except FileNotFoundError:
        return f"{CONFIG_FILE}, which is written last, is missing"
    except ValueError:
        return f"{CONFIG_FILE} is incomplete"
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except FileNotFoundError:
        return f"{METADATA_FILE} is missing"
    except Exception as error:
        return f"{METADATA_FILE} cannot be read: {type(error).__name__}"
    return _short_file(folder, metadata.storage_data.values())


def _short_file(folder: Path, stored: Iterable[Any]) -> str | None:
    ends: dict[str, int] = {}
    for info in stored:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size < end:
            return f"{name} has {size} of at least {end} bytes"
    return None


def whole_iterations(root: str | os.PathLike[str]) -> list[int]:
    """Iterations under a ``--save`` folder whose checkpoints are whole, in order."""
    found = []
    for folder in Path(root).glob("iter_*"):
        iteration = _iteration_of(folder)
        if isinstance(iteration, int) and missing_parts(folder) is None:
            found.append(iteration)
    return sorted(found)


def _instead(root: Path) -> str:
    whole = whole_iterations(root)
    if not whole:
        return f"there is no whole one in {root}"
    numbers = ", ".join(map(str, whole))
    return f"whole ones there: {numbers} (--ckpt-step, for export --step, or write one into {TRACKER_FILE})"


def _iteration_of(folder: Path) -> int | str | None:
    if folder.name == RELEASE:
        return RELEASE
    digits = folder.name.removeprefix("iter_")
    return int(digits) if digits != folder.name and digits.isdigit() else None


def tracked_iteration(root: str | os.PathLike[str]) -> int | str:
    """The iteration that a ``--save`` folder's tracker file names.

    Raises:
        ScaleVecError: There is no such file, or it says something else, as when writing it was interrupted.
    """
    root = Path(root)
    try:
        text = (root / TRACKER_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ScaleVecError(
            f"{root} has no {TRACKER_FILE}, so it is not a folder of Megatron's checkpoints, or its first "
            "save was cut short; give a --save folder, or the folder of one iteration (iter_...)."
        ) from None
    if text == RELEASE:
        return RELEASE
    if not text.isdigit():
        raise ScaleVecError(
            f"{root / TRACKER_FILE} says {text!r} where an iteration should stand, as when a save was cut "
            f"short; {_instead(root)}."
        )
    return int(text)


def _require_torch_dist(folder: Path) -> None:
    if not folder.is_dir():
        raise ScaleVecError(f"there is no checkpoint {folder}; {_instead(folder.parent)}.")
    if any(entry.name.startswith("mp_rank_") for entry in folder.iterdir()):
        raise ScaleVecError(
            f"{folder} is in Megatron's format 'torch', which holds one file per rank of one layout; run "
            "Megatron once with --load on it and --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        backend = config.get("sharded_backend", "torch_dist")
    except (OSError, ValueError, AttributeError):
        return  # not whole, which is said with more detail
    if backend != "torch_dist":
        raise ScaleVecError(f"{folder} is in the format {backend!r}; convert it to torch_dist with Megatron.")
