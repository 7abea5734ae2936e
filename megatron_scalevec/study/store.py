"""A study's folder: what it is a study of, the results of its runs, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalevec.demo.report import write_report
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.study.options import Options

__all__ = ["DESCRIPTION", "KIND", "Store", "losses_of"]

KIND = "scalevec study"
DESCRIPTION = "study.json"
_LOCK = "lock"


@dataclass(frozen=True)
class Store:
    """The folder ``scalevec study --out`` names.

    ``data`` holds the text, ``logs`` and ``audits`` what runs wrote, ``results`` one file for each run that
    has ended, ``work`` the checkpoints of those that have not.
    """

    folder: Path

    @property
    def description(self) -> Path:
        """What this is a study of."""
        return self.folder / DESCRIPTION

    def work(self, name: str) -> Path:
        """Where a run keeps what nobody needs once it has ended."""
        return self.folder / "work" / name

    def open(self, options: Options, text: dict[str, Any], versions: dict[str, str]) -> None:
        """Create the folder, or check that the study in it is this one.

        Args:
            options: The study's.
            text: The text's description, its ``sha256`` among it.
            versions: The versions that the runs will have.

        Raises:
            ScaleVecError: The folder holds something else, or a study that differs in what must not change.
        """
        known = self.describe()
        if known is None:
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ScaleVecError(
                    f"--out {self.folder} is not empty and holds no study, so it is left alone; name another "
                    "folder."
                )
        else:
            self._require_same(known, options, text, versions)
        try:
            for name in ("data", "logs", "audits", "results", "work"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScaleVecError(f"--out {self.folder} cannot be created: {error}.") from None

    def describe(self) -> dict[str, Any] | None:
        """What the folder is a study of; None if there is none.

        Raises:
            ScaleVecError: ``study.json`` is there and is none of ours.
        """
        try:
            known = json.loads(self.description.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ScaleVecError(f"{self.description} cannot be read: {error}.") from None
        if not isinstance(known, dict) or known.get("kind") != KIND:
            raise ScaleVecError(f"{self.description} is no description of a study; name another folder.")
        return known

    def _require_same(
        self, known: dict[str, Any], options: Options, text: dict[str, Any], versions: dict[str, str]
    ) -> None:
        pairs = [("--" + k.replace("_", "-"), known["options"][k], v) for k, v in options.fixed().items()]
        pairs += [("the text's sha256", known["text"]["sha256"], text["sha256"])]
        pairs += [(name, known["versions"][name], version) for name, version in versions.items()]
        changed = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
        if changed:
            raise ScaleVecError(
                f"--out {self.folder} holds a study with other settings ({'; '.join(changed)}), and runs of "
                "both would not be comparable: give the same, or name another folder. Arms, optimizers, "
                "seeds and learning rates may be added."
            )
        left_out = _left_out(known["options"], options.record())
        if left_out:
            raise ScaleVecError(
                f"--out {self.folder} holds a study that also has {'; '.join(left_out)}, and without them "
                "its report would leave out what was run: name them too, or name another folder. "
                "--report-only reports what is there."
            )

    def save_description(self, options: Options, **more: Any) -> None:
        """Write ``study.json``."""
        write_report({"kind": KIND, "options": options.record(), **more}, self.description)

    def results(self) -> dict[str, dict[str, Any]]:
        """The results of the runs that have ended, by name."""
        found = {}
        for path in sorted((self.folder / "results").glob("*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            found[result["name"]] = result
        return found

    def losses(self) -> dict[str, float]:
        """Final validation losses by name of the run, NaN where it diverged."""
        return losses_of(self.results())

    def add(self, result: dict[str, Any]) -> None:
        """Keep a run's result; its checkpoints go."""
        write_report(result, self.folder / "results" / f"{result['name']}.json")
        shutil.rmtree(self.work(result["name"]), ignore_errors=True)

    @contextlib.contextmanager
    def owned(self) -> Iterator[int]:
        """Be the only one who writes here; gives a file descriptor that runs hold open as well.

        So a study that was killed does not go on while a run of it is still alive.

        Raises:
            ScaleVecError: Another process is at it.
        """
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ScaleVecError(
                    f"--out {self.folder} is in use by another study, or by a run of one that was ended a "
                    "moment ago; wait for it, or name another folder."
                ) from None
            yield descriptor
        finally:
            os.close(descriptor)


def losses_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """:meth:`Store.losses` of results that are read already."""
    return {
        name: math.nan if result["final_validation_loss"] is None else result["final_validation_loss"]
        for name, result in results.items()
    }


def _left_out(known: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """What a study on record has and the one that is given has not, in words."""
    pairs = [("--" + name, known[name], given[name]) for name in ("arms", "optimizers", "seeds")]
    pairs += [
        (f"--rates {name}=", rates, given["rates"][name])
        for name, rates in known["rates"].items()
        if name in given["rates"]
    ]
    found = []
    for name, old, new in pairs:
        if lost := [str(value) for value in old if value not in new]:
            found.append(f"{name}{'' if name.endswith('=') else ' '}{','.join(lost)}")
    return found
