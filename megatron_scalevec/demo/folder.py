"""The result folder: built beside its place under another name, moved there when it is complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from megatron_scalevec.errors import ScaleVecError

__all__ = ["CONTENTS", "KIND", "REPORT", "ResultFolder", "check_place"]

KIND = "scalevec demo"
REPORT = "report.json"
CONTENTS = frozenset({REPORT, "loss.png", "logs", "audits", "data"})


def check_place(out: Path) -> None:
    """Check that a result could be put at ``out``; creates nothing.

    Raises:
        ScaleVecError: Something of the user's is there, or the place cannot be written to.
    """
    place = Path(os.path.abspath(out))
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise ScaleVecError(f"--out {out} exists and is not a folder; name another place.")
    if place == Path.cwd() or place in Path.cwd().parents:
        raise ScaleVecError(
            f"--out {out} is, or holds, the current folder, which cannot be replaced; name a "
            "folder inside it, for example runs/demo."
        )
    if place.is_dir():
        _require_ours(out, place)
    parent = place.parent
    while not parent.exists() and not parent.is_symlink():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ScaleVecError(f"--out {out}: {parent} is not a folder that can be written to.")


def _require_ours(out: Path, place: Path) -> None:
    try:
        names = {entry.name for entry in place.iterdir()}
    except OSError as error:
        raise ScaleVecError(f"--out {out} cannot be read: {error.strerror or error}.") from None
    if not names:
        return
    try:
        report = json.loads((place / REPORT).read_text(encoding="utf-8"))
        ours = isinstance(report, dict) and report.get("kind") == KIND
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise ScaleVecError(
            f"--out {out} exists and is not the result of an earlier demo, so it is left alone; "
            "name another folder."
        )
    foreign = sorted(names - CONTENTS)
    if foreign:
        raise ScaleVecError(
            f"--out {out} holds {', '.join(foreign[:3])}, which the demo did not write and would "
            "delete; move that away, or name another folder."
        )


class ResultFolder:
    """A context: ``path`` is where to build.

    Nothing is left of it afterwards unless it was installed or kept.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._place = Path(os.path.abspath(out))
        self._made: list[Path] = []
        self.path = self._place

    def __enter__(self) -> ResultFolder:
        parent = self._place.parent
        missing = []
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
        try:
            for folder in reversed(missing):
                folder.mkdir()
                self._made.append(folder)
            prefix = f".{self._place.name}.building-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self._place.parent))
            # mkdtemp makes private folders; a result is as readable as anything else made here.
            mask = os.umask(0)
            os.umask(mask)
            self.path.chmod(0o777 & ~mask)
            for name in ("logs", "audits", "data"):
                (self.path / name).mkdir()
        except OSError as error:
            self.__exit__(None, None, None)
            raise ScaleVecError(f"--out {self.out} cannot be created: {error}.") from None
        return self

    def __exit__(self, *exception: object) -> None:
        if self.path != self._place:
            shutil.rmtree(self.path, ignore_errors=True)
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:  # it holds something by now
                break

    def install(self) -> None:
        """Move what was built into its place; an earlier result there goes only now.

        Raises:
            ScaleVecError: Somebody put something else there meanwhile. What was built is kept.
        """
        try:
            check_place(self.out)
        except ScaleVecError as error:
            kept = self.keep("result")
            raise ScaleVecError(f"{error} This result was kept in {kept}.") from None
        old = None
        if self._place.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{self._place.name}.old-", dir=self._place.parent))
            os.replace(self._place, old)
        try:
            os.replace(self.path, self._place)
        except BaseException:
            if old is not None:
                os.replace(old, self._place)
            raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def keep(self, what: str) -> Path:
        """Keep what was built, beside the place, under a name that says what it is."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for attempt in range(1000):
            suffix = f"-{attempt}" if attempt else ""
            kept = self._place.with_name(f"{self._place.name}.{what}-{stamp}{suffix}")
            if not kept.exists():
                os.replace(self.path, kept)
                return kept
        raise ScaleVecError(f"there is no free name beside {self.out}; its logs were lost.")
