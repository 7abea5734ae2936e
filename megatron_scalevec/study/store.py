"""A study's folder: what it is a study of, the results of its runs, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
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
from megatron_scalevec.study.records import Description, read_description, read_result

__all__ = ["DESCRIPTION", "Store", "losses_of"]

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

    def check(self, options: Options, text: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Check that the folder is free, or that the study in it is this one; writes nothing.

        Args:
            options: The study's.
            text: The text's description, its ``sha256`` among it.
            versions: The versions that the runs will have.

        Raises:
            ScaleVecError: The folder holds something else, a study that differs in what must not change, or
                results that are none of its own.
        """
        known = self.describe()
        if known is not None:
            self._require_same(known, options, text, versions)
            self.results()
            return
        try:
            names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        except OSError as error:
            raise ScaleVecError(f"--out {self.folder} cannot be read: {error.strerror or error}.") from None
        # A study that was killed before it could say what it is has left its lock, and perhaps a draft.
        if not all(name == _LOCK or DESCRIPTION in name for name in names):
            raise ScaleVecError(
                f"--out {self.folder} is not empty and holds no study, so it is left alone; name another "
                "folder."
            )

    def require_given(self, options: Options) -> None:
        """Check, for a report, that what the command line says of the study is what it is.

        Raises:
            ScaleVecError: It says something else, or there is no study.
        """
        known, asked = self.known().options.record(), options.record()
        wrong = sorted(name for name in known.keys() & options.given if known[name] != asked[name])
        if wrong:
            flags = ", ".join("--" + name.replace("_", "-") for name in wrong)
            raise ScaleVecError(
                f"--report-only reports the study in {self.folder} as it is, and its {flags} differ from "
                "what is given: leave them out."
            )

    def begin(
        self,
        options: Options,
        *,
        text: dict[str, Any],
        versions: dict[str, str],
        machine: dict[str, Any],
    ) -> None:
        """Say in ``study.json`` what this is a study of, and make the folders for what runs write.

        Raises:
            ScaleVecError: That cannot be written.
        """
        try:
            write_report(Description(options, text, versions, machine).record(), self.description)
            for name in ("data", "logs", "audits", "results", "work"):
                (self.folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise ScaleVecError(f"--out {self.folder} cannot be written to: {error}.") from None

    def describe(self) -> Description | None:
        """What the folder is a study of; None if there is none.

        Raises:
            ScaleVecError: ``study.json`` is there and is none of ours, or is damaged.
        """
        return read_description(self.description)

    def _require_same(
        self,
        known: Description,
        options: Options,
        text: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> None:
        before = known.options.fixed()
        pairs = [("--" + k.replace("_", "-"), before[k], v) for k, v in options.fixed().items()]
        pairs += [("the text's sha256", known.text["sha256"], text["sha256"])]
        names = {**known.versions, **versions}
        pairs += [(name, known.versions.get(name), versions.get(name)) for name in names]
        changed = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
        if changed:
            raise ScaleVecError(
                f"--out {self.folder} holds a study with other settings ({'; '.join(changed)}), and runs of "
                "both would not be comparable: give the same, or name another folder. Arms, optimizers, "
                "seeds and learning rates may be added."
            )
        left_out = _left_out(known.options.record(), options.record())
        if left_out:
            raise ScaleVecError(
                f"--out {self.folder} holds a study that also has {'; '.join(left_out)}, and without them "
                "its report would leave out what was run: name them too, or name another folder. "
                "--report-only reports what is there."
            )

    def results(self) -> dict[str, dict[str, Any]]:
        """The results of the runs that have ended, by name.

        Raises:
            ScaleVecError: There is no study, or a file among them is none of its results.
        """
        known = self.known()
        paths = sorted((self.folder / "results").glob("*.json"))
        return {path.stem: read_result(path, known) for path in paths}

    def known(self) -> Description:
        """What the folder is a study of.

        Raises:
            ScaleVecError: As from :meth:`describe`, and where there is none.
        """
        known = self.describe()
        if known is None:
            raise ScaleVecError(f"{self.folder} holds no study: name the --out of one.")
        return known

    def losses(self) -> dict[str, float]:
        """Final validation losses by name of the run, NaN where it diverged."""
        return losses_of(self.results())

    def add(self, result: dict[str, Any]) -> None:
        """Keep a run's result, with a mark of the study that it belongs to; its checkpoints go."""
        path = self.folder / "results" / f"{result['name']}.json"
        write_report({"study": self.known().identity, **result}, path)
        shutil.rmtree(self.work(result["name"]), ignore_errors=True)

    @contextlib.contextmanager
    def owned(self) -> Iterator[int]:
        """Be the only one who writes here; gives a file descriptor that runs hold open as well.

        So a study that was killed does not go on while a run of it is still alive. The folder is made.

        Raises:
            ScaleVecError: Another process is at it, or the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ScaleVecError(f"--out {self.folder} cannot be written to: {error}.") from None
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
