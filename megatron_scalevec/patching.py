"""Replace attributes of other people's modules and classes, and put every one of them back.

Both CPU mode (:mod:`megatron_scalevec.cpu`) and the launcher's hooks
(:mod:`megatron_scalevec.integration.hooks`) change code they do not own. They do it through one
:class:`PatchSet` each, so that "what is changed right now" has one answer and undoing is exact: an
attribute that was inherited before is inherited again afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["PatchSet", "resolve"]

_ABSENT = object()


@dataclass(frozen=True)
class _Applied:
    owner: Any
    attribute: str
    previous: Any  # the owner's own entry, or _ABSENT where the attribute was inherited or missing


class PatchSet:
    """A stack of attribute replacements that is undone in reverse order."""

    def __init__(self) -> None:
        self._applied: list[_Applied] = []

    def __len__(self) -> int:
        return len(self._applied)

    def set(self, owner: Any, attribute: str, value: Any, *, create: bool = False) -> None:
        """Set ``owner.attribute = value`` and remember what stood there.

        Args:
            owner: A module, class or object.
            attribute: Name of the attribute.
            value: Its replacement.
            create: Allow an attribute that does not exist yet.

        Raises:
            AttributeError: The attribute does not exist and ``create`` is false. A misspelt or
                vanished target must never turn into a new attribute that nobody reads.
        """
        if not create and not hasattr(owner, attribute):
            raise AttributeError(f"{_name(owner)} has no attribute {attribute!r} to replace")
        previous = vars(owner).get(attribute, _ABSENT)
        setattr(owner, attribute, value)
        self._applied.append(_Applied(owner, attribute, previous))

    def wrap(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> Any:
        """Replace ``owner.attribute`` by ``make(original)`` and return the original."""
        if not hasattr(owner, attribute):
            raise AttributeError(f"{_name(owner)} has no attribute {attribute!r} to wrap")
        original = getattr(owner, attribute)
        self.set(owner, attribute, make(original))
        return original

    def undo(self) -> None:
        """Restore everything, last change first."""
        while self._applied:
            entry = self._applied.pop()
            if entry.previous is _ABSENT:
                delattr(entry.owner, entry.attribute)
            else:
                setattr(entry.owner, entry.attribute, entry.previous)


def resolve(target: str) -> tuple[Any, str]:
    """Turn ``"package.module:Class.attribute"`` into ``(owner, "attribute")``.

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: A name on the way does not exist.
    """
    module_name, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for name in parents:
        owner = getattr(owner, name)
    if not hasattr(owner, attribute):
        raise AttributeError(f"{_name(owner)} has no attribute {attribute!r}")
    return owner, attribute


def _name(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
    return f"{module}.{name}" if module and module != name else name
