"""Command lines that are refused in sentences, as everything else in this package is."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_scalevec.errors import ScaleVecError

__all__ = ["SentenceParser"]


class SentenceParser(argparse.ArgumentParser):
    """A parser that raises :class:`ScaleVecError` where argparse would leave the process.

    It refuses an option that is given two values as well, of which argparse would take the last without a
    word; the same one may come again, as from the parts that a launch script is made of. Options that may
    have several entries say so: ``action="extend"``.

    Attributes:
        given: Values of the options that were given, by where they are stored; flags without a value and
            positional arguments left out.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        self.given: dict[str, Any] = {}
        super().__init__(*args, **more)
        for name, action in ((None, _One), ("store", _One), ("extend", _Extend)):
            self.register("action", name, action)

    def parse_known_args(self, args=None, namespace=None):
        self.given.clear()
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        raise ScaleVecError(f"{self.prog}: {message}.") from None


class _One(argparse.Action):
    """Store a value, the only one."""

    def __call__(self, parser, namespace, values, option_string=None):
        if self.option_strings:
            # A first value is not compared with itself, which nan is not equal to.
            known, before = self.dest in parser.given, parser.given.setdefault(self.dest, values)
            if known and before != values:
                parser.error(
                    f"{self.option_strings[-1]} is given twice, {_said(before)} and {_said(values)}; give it "
                    "once"
                )
        setattr(namespace, self.dest, values)


def _said(value: Any) -> Any:
    return "its default" if value is None or value == "" else value


class _Extend(argparse.Action):
    """Store values behind those that are there."""

    def __call__(self, parser, namespace, values, option_string=None):
        stored = [*(getattr(namespace, self.dest) or ()), *values]
        parser.given[self.dest] = stored
        setattr(namespace, self.dest, stored)
