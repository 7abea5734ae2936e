"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_scalevec.errors import ScaleVecError

__all__ = ["new_folder"]


@contextlib.contextmanager
def new_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a hidden folder beside ``target`` to write into, and rename it when all is written.

    Any exception removes it; a killed process leaves it behind under a name that nobody takes for a result.

    Raises:
        ScaleVecError: ``target`` exists, its parent does not, or nothing can be written there.
    """
    target = Path(target)
    parent = target.absolute().parent
    if os.path.lexists(target):
        raise ScaleVecError(f"{target} exists already, and nothing is overwritten: give another name.")
    if not parent.is_dir():
        raise ScaleVecError(f"the folder {parent} is not there, or is no folder; create it first.")
    draft = None
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".incomplete", dir=parent))
        yield draft
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o777 & ~mask)  # mkdtemp makes it private
        os.rename(draft, target)
    except BaseException as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise ScaleVecError(
                f"{target} was not written: {error.strerror or error}. Nothing was left there."
            ) from error
        raise
