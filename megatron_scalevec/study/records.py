"""What the files of a study's folder say, checked where they are read: nobody else looks at their form.

A folder may have been copied in part, edited, or written by another version of this package.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalevec import __version__
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.study.options import Options
from megatron_scalevec.study.plan import Cell, Job

__all__ = ["KIND", "Description", "read_description", "read_result"]

KIND = "scalevec study"

# Whole numbers that a float holds.
_LARGEST = 2**53
_WORDS = {str: "a string", int: "a whole number", float: "a finite number", list: "a list", dict: "an object"}
_WORDS[type(None)] = "null"
_TEXT = {"source": (str,), "training_bytes": (int,), "validation_bytes": (int,), "sha256": (str,)}
_DESCRIPTION = {"options": (dict,), "text": (dict,), "versions": (dict,), "machine": (dict,)}
_RESULT = {
    "study": (str,),
    "name": (str,),
    "stage": (str,),
    "optimizer": (str,),
    "arm": (str,),
    "learning_rate": (float,),
    "seed": (int,),
    "steps": (int,),
    "final_validation_loss": (float, type(None)),
    "parameters_logged": (int, type(None)),
    "parameters_added": (int,),
    "training": (list,),
}


class _Malformed(Exception):
    """What is wrong, as the end of a sentence."""


@dataclass(frozen=True)
class Description:
    """What a folder is a study of, as ``study.json`` has it."""

    options: Options
    text: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]

    @property
    def identity(self) -> str:
        """The same for two folders exactly if their results may be compared: settings, text and versions."""
        fixed = {name: value for name, value in self.options.fixed().items() if name != "text"}
        known = [fixed, self.text["sha256"], self.versions]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "kind": KIND,
            "options": self.options.record(),
            "text": self.text,
            "versions": self.versions,
            "machine": self.machine,
        }

    def job(self, result: Mapping[str, Any]) -> Job | None:
        """The run that a result is of; None if the study has no such run."""
        arms = {arm.label: arm for arm in self.options.arms}
        of_stage = {
            "tune": (self.options.tuning_steps, (self.options.tuning_seed,)),
            "final": (self.options.steps, self.options.seeds),
        }
        steps, seeds = of_stage.get(result["stage"], (None, ()))
        known = result["optimizer"] in self.options.optimizers and result["arm"] in arms
        if not known or result["steps"] != steps or result["seed"] not in seeds:
            return None
        cell = Cell(result["optimizer"], arms[result["arm"]])
        return Job(result["stage"], cell, result["learning_rate"], result["seed"], steps)


def read_description(path: Path) -> Description | None:
    """Read ``study.json``; None if there is none.

    Raises:
        ScaleVecError: It is no description of a study, or one that this version cannot use.
    """
    try:
        known = _object(path)
    except FileNotFoundError:
        return None
    except _Malformed as error:
        raise ScaleVecError(f"{path} {error}; name another folder, or put its copy back.") from None
    if known.get("kind") != KIND:
        raise ScaleVecError(f"{path} is no description of a study; name another folder.")
    try:
        _require(known, _DESCRIPTION)
        _require(known["text"], _TEXT)
        _require(known["versions"], dict.fromkeys(known["versions"], (str,)))
        try:
            options = Options.from_record(known["options"], path.parent)
        except ScaleVecError as error:
            raise _Malformed(f"cannot be used: {str(error).rstrip('.')}") from None
    except _Malformed as error:
        versions = known.get("versions")
        writer = versions.get("megatron_scalevec") if isinstance(versions, dict) else None
        of_another = isinstance(writer, str) and writer != __version__
        raise ScaleVecError(
            f"{path} {error}. "
            + (
                f"It was written by megatron_scalevec {writer}, and this is {__version__}: use that version, "
                "or name another folder."
                if of_another
                else "It was changed by hand, or by another version of this package: put its copy back, or "
                "name another folder."
            )
        ) from None
    return Description(options, known["text"], known["versions"], known["machine"])


def read_result(path: Path, of: Description) -> dict[str, Any]:
    """Read the result of a run of this study.

    Raises:
        ScaleVecError: It is none, or is cut short.
    """
    try:
        result = _object(path)
        _require(result, _RESULT)
        job = of.job(result)
        if result["study"] != of.identity or job is None or not job.name == result["name"] == path.stem:
            raise _Malformed(f"is of another study than the one in {of.options.out}")
        _require_losses(result)
    except _Malformed as error:
        raise ScaleVecError(
            f"{path} {error}; move it away, and the command that made the study carries out that run "
            "again if it is wanted."
        ) from None
    except FileNotFoundError:
        raise ScaleVecError(f"{path} is gone since a moment ago; give the command again.") from None
    return result


def _require_losses(result: Mapping[str, Any]) -> None:
    """Steps that rise, with a loss or, where it was no number, null."""
    before = 0
    for point in result["training"]:
        if not isinstance(point, list) or len(point) != 2:
            raise _Malformed("has a training loss that is no pair of a step and a loss")
        _require({"step": point[0], "loss": point[1]}, {"step": (int,), "loss": (float, type(None))})
        if not before < point[0] <= result["steps"]:
            raise _Malformed(f"has the step {point[0]} after step {before}, of {result['steps']}")
        before = point[0]
    if result["final_validation_loss"] is not None and all(loss is None for _, loss in result["training"]):
        raise _Malformed("has a validation loss, and no training loss")


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: There is no file.
        _Malformed: It cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        # JSON's escapes can say halves of characters, which no report could hold.
        json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _Malformed(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"is no whole JSON ({error})") from None
    if not isinstance(value, dict):
        raise _Malformed("holds no JSON object")
    return value


def _require(record: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    """Check that values are there and of these types; further ones are left alone."""
    for name, allowed in types.items():
        if name not in record:
            raise _Malformed(f"has no {name!r}")
        value = record[name]
        # True is an int to Python, and JSON's 1e400 a float.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        ok = type(value) in allowed and not (is_number and not abs(value) <= _LARGEST)
        if not ok or (isinstance(value, float) and not math.isfinite(value)):
            wanted = " or ".join(_WORDS[one] for one in allowed)
            raise _Malformed(f"has {_shortened(value)} as its {name!r}, not {wanted}")


def _shortened(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return "a number beyond all measure"
    said = json.dumps(value)
    return said if len(said) <= 40 else said[:37] + "..."
