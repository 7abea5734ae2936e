"""A Megatron-LM tree on disk, looked at without importing anything from it."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.files import DRAFT, write_file
from megatron_scalevec.patches.diff import Patch, patches, sha256
from megatron_scalevec.versions import SUPPORTED

__all__ = ["PATCHED", "STOCK", "MegatronTree"]

STOCK, PATCHED = "stock", "patched"


@dataclass(frozen=True)
class MegatronTree:
    """A checkout, or the folder that a wheel was installed to, and the patch that fits it."""

    folder: Path
    version: Version
    patch: Patch

    def __str__(self) -> str:
        return f"Megatron {self.version} in {self.folder}"

    @property
    def file(self) -> Path:
        return self.folder / self.patch.file

    @classmethod
    def at(cls, folder: str) -> MegatronTree:
        """Find out what lies in a folder.

        Raises:
            ScaleVecError: No Megatron, none that has a training loop, a version without a patch, or a file
                that no patch knows.
        """
        root = Path(folder)
        version = _version(root)
        if not SUPPORTED.contains(version.base_version, prereleases=True):
            raise ScaleVecError(
                f"Megatron {version} in {folder} is outside the versions that there is a patch for "
                f"({SUPPORTED}); use one of those, or the launcher of a newer megatron_scalevec."
            )
        known = patches()
        for patch in known:
            target = root / patch.file
            if target.is_symlink():
                raise ScaleVecError(
                    f"{target} is a symbolic link, and what it points to may serve other trees as well; "
                    "patch the tree that it points into."
                )
            if target.is_file() and sha256(target.read_bytes()) in (patch.expects, patch.gives):
                return cls(root, version, patch)
        target = root / known[0].file
        if not target.is_file():
            raise ScaleVecError(
                f"Megatron {version} in {folder} has no {known[0].file} (wheels carry it from 0.17 on); name "
                "a Megatron-LM checkout."
            )
        raise ScaleVecError(
            f"{target} of Megatron {version} is neither the file that a patch was made for nor a patched one "
            f"(its SHA-256 begins with {sha256(target.read_bytes())[:16]}), so it was left alone: restore "
            "the file as released, or use 'scalevec launch', which needs no patch."
        )

    def content(self) -> bytes:
        return self.file.read_bytes()

    def state(self) -> str:
        return STOCK if sha256(self.content()) == self.patch.expects else PATCHED

    def replace(self, content: bytes) -> None:
        """Put a new file in the place of the old one, in one step and with the same mode.

        Raises:
            ScaleVecError: The tree is read-only. It is unchanged.
        """
        target = self.file
        mode = stat.S_IMODE(target.stat().st_mode)
        # Said by the modes as well as by the system, which lets root write everywhere.
        for path, what in ((target, mode), (target.parent, target.parent.stat().st_mode)):
            if not what & stat.S_IWUSR:
                raise ScaleVecError(
                    f"{path} is read-only, so nothing was changed; make it writable for its owner, or use "
                    "'scalevec launch', which needs no patch."
                )
        try:
            self._clear()
            write_file(target, content)
        except OSError as error:
            raise ScaleVecError(
                f"{target} cannot be replaced ({error.strerror or error}), so nothing was changed; make the "
                "tree writable, or use 'scalevec launch', which needs no patch."
            ) from error

    def _clear(self) -> None:
        """Remove what a killed process left beside the file; it never got the file's name."""
        for left in self.file.parent.glob(DRAFT + "*"):
            left.unlink(missing_ok=True)


def _version(root: Path) -> Version:
    path = root / "megatron" / "core" / "package_info.py"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScaleVecError(
            f"there is no Megatron in {root} ({path} cannot be read); name a Megatron-LM checkout, or the "
            "site-packages folder that holds the megatron folder."
        ) from error
    numbers = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if None in numbers:
        raise ScaleVecError(f"{path} does not say MAJOR, MINOR and PATCH, so the version is not known.")
    return Version(".".join(number[1] for number in numbers))
