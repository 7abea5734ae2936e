"""Patches without context: only our own lines, and the checksums of the files around them.

The files are unified diffs that ``git apply --unidiff-zero`` and ``patch -p1`` understand. Lines before the
diff say what it is for: ``expects-sha256:`` and ``gives-sha256:`` name the file before and after.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources

__all__ = ["Patch", "patches", "sha256"]

_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+),(\d+) @@")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Patch:
    """Lines added behind one line of one file.

    ``file`` is relative to the tree, ``after`` the number of lines before the added ones.
    """

    name: str
    file: str
    expects: str
    gives: str
    after: int
    added: tuple[bytes, ...]

    def applied(self, stock: bytes) -> bytes:
        """The patched file. Raises RuntimeError unless checksums hold before and after."""
        lines = stock.splitlines(keepends=True)
        return self._proven(
            stock,
            self.expects,
            b"".join([*lines[: self.after], *self.added, *lines[self.after :]]),
            self.gives,
        )

    def reverted(self, patched: bytes) -> bytes:
        """The stock file. Raises RuntimeError unless checksums hold before and after."""
        lines = patched.splitlines(keepends=True)
        behind = self.after + len(self.added)
        stock = b"".join([*lines[: self.after], *lines[behind:]])
        return self._proven(patched, self.gives, stock, self.expects)

    def _proven(self, old: bytes, old_sum: str, new: bytes, new_sum: str) -> bytes:
        if sha256(old) != old_sum or sha256(new) != new_sum:
            raise RuntimeError(f"{self.name} does not lead from {old_sum} to {new_sum} on this {self.file}")
        return new


def read(name: str, text: str) -> Patch:
    """Parse one patch of the only form that this package writes: one hunk of added lines."""
    head, _, body = text.partition("\n--- ")
    fields = dict(re.findall(r"^(expects-sha256|gives-sha256): ([0-9a-f]{64})$", head, re.MULTILINE))
    _, target, hunk, *added = body.splitlines(keepends=True)
    place = _HUNK.fullmatch(hunk.strip())
    if place is None or len(added) != int(place[3]) or any(not line.startswith("+") for line in added):
        raise RuntimeError(f"{name} is not one hunk of added lines")
    return Patch(
        name=name,
        file=target.strip().removeprefix("+++ b/"),
        expects=fields["expects-sha256"],
        gives=fields["gives-sha256"],
        after=int(place[1]),
        added=tuple(line[1:].encode() for line in added),
    )


def patches() -> list[Patch]:
    """All patches that come with the package."""
    folder = resources.files("megatron_scalevec.patches")
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".patch"))
    return [read(name, (folder / name).read_text(encoding="utf-8")) for name in found]
