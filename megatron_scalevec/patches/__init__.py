"""``scalevec patch``: make a Megatron-LM checkout find plugins by itself.

For those who prefer a patched Megatron to the launcher. The patch adds a few lines at the end of
``megatron/training/__init__.py`` that call every entry point of the group ``megatron.plugins``; this package
has one (:mod:`megatron_scalevec.integration.plugin`), so that ``--scalevec-strategy`` works in an otherwise
plain ``pretrain_gpt.py``.

A patch changes one file, known by its checksum, and replaces it in one step: a tree is stock or patched,
never between the two, and a tree that differs from both is left alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.patches.tree import PATCHED, STOCK, MegatronTree

__all__ = ["GROUP", "apply", "check", "main", "revert"]

GROUP = "megatron.plugins"


def apply(folder: str) -> str:
    """Patch a stock tree. Returns a sentence; a patched tree is left as it is.

    Raises:
        ScaleVecError: There is no Megatron in ``folder``, its version has no patch, the file differs from the
            one that the patch was made for, or it cannot be written. The tree is unchanged.
    """
    tree = MegatronTree.at(folder)
    if tree.state() == PATCHED:
        return f"{tree} is patched already; nothing was changed."
    tree.replace(tree.patch.applied(tree.content()))
    return f"{tree} was patched: {tree.patch.file}. {_plugins()}"


def revert(folder: str) -> str:
    """Take the patch out of a tree again, byte by byte. Returns a sentence; a stock tree is left as it is.

    Raises:
        ScaleVecError: As :func:`apply`.
    """
    tree = MegatronTree.at(folder)
    if tree.state() == STOCK:
        return f"{tree} is not patched; nothing was changed."
    tree.replace(tree.patch.reverted(tree.content()))
    return f"{tree} is stock again: {tree.patch.file}."


def check(folder: str) -> tuple[bool, str]:
    """Whether a tree is patched, and a sentence. Nothing is changed.

    Raises:
        ScaleVecError: There is no Megatron in ``folder``, its version has no patch, or the file is neither
            the stock nor the patched one.
    """
    tree = MegatronTree.at(folder)
    if tree.state() == PATCHED:
        return True, f"{tree} is patched. {_plugins()}"
    return False, f"{tree} is stock; 'scalevec patch apply {folder}' patches it."


def _plugins() -> str:
    """What the patched lines would find in this environment."""
    names = sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})
    if "scalevec" in names:
        return f"Plugins of this environment: {', '.join(names)}."
    return (
        "This environment has no plugin named scalevec, so --scalevec-* flags would be unknown in it: "
        "install megatron_scalevec again."
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ScaleVecError(f"scalevec patch: {message}; 'scalevec patch --help' says more.") from None


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0, or 1 where ``check`` finds a stock tree.

    Raises:
        ScaleVecError: As the three functions.
    """
    parser = _Parser(
        prog="scalevec patch",
        description="Make a Megatron-LM tree look for plugins at start, so that the --scalevec-* flags work "
        "without the launcher. Only a tree whose file has the expected checksum is touched.",
    )
    parser.add_argument("action", choices=("apply", "check", "revert"))
    parser.add_argument(
        "folder",
        metavar="MEGATRON_DIR",
        help="a Megatron-LM checkout, or the site-packages folder of a megatron-core wheel",
    )
    args = parser.parse_args(list(argv))
    if args.action == "check":
        patched, sentence = check(args.folder)
        print(sentence)
        return 0 if patched else 1
    print(apply(args.folder) if args.action == "apply" else revert(args.folder))
    return 0
