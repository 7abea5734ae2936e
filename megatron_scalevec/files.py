"""Files that appear whole or not at all; for folders see :mod:`.folders`."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterable, Mapping

__all__ = ["DRAFT", "write_file", "write_files"]

DRAFT = ".scalevec-draft-"
"""How the name of a file begins that a killed process has left beside its place."""


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """:func:`write_files` for one file."""
    write_files({path: content})


def write_files(
    contents: Mapping[str | os.PathLike[str], str | bytes], gone: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Write files so that a reader finds the old one or the new one, whole.

    Each is written and synced under a hidden name beside its place, and they get their own names once all of
    them are written: what keeps one from being written keeps all. A file that is there keeps its mode, and a
    link stays one.

    Args:
        contents: What goes where; text becomes UTF-8.
        gone: Files that are not to be there afterwards, if they are now.

    Raises:
        OSError: One of them cannot be written, or its place is taken by what is no file. No draft is left.
    """
    drafts: list[tuple[str, str]] = []
    leaving = [path for path in gone if _mode(os.fspath(path)) is not None]
    try:
        for path, content in contents.items():
            place = os.path.realpath(path)
            mode = _mode(place)
            draft = os.path.join(os.path.dirname(place), DRAFT + uuid.uuid4().hex)
            drafts.append((draft, place))
            # The system applies the umask to a file's first mode.
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
            with os.fdopen(descriptor, "wb") as file:
                if mode is not None:
                    os.fchmod(descriptor, mode)
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(descriptor)
        for draft, place in drafts:
            os.replace(draft, place)
        for path in leaving:
            os.unlink(path)
    finally:
        for draft, _ in drafts:
            with contextlib.suppress(FileNotFoundError):  # it has its name, or was never made
                os.unlink(draft)


def _mode(place: str) -> int | None:
    """Mode of the file that is there; None if there is none.

    Raises:
        OSError: It is a folder, a pipe or a device, which no file may replace.
    """
    try:
        found = os.stat(place).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
    if not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "it is no regular file", place)
    return stat.S_IMODE(found)
