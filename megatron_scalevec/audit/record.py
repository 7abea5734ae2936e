"""What an audit is: a record of what a run carries, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.files import write_file

__all__ = ["Audit", "DecayGroup", "Vector", "kind_of"]


@dataclass(frozen=True)
class Vector:
    """One scale vector as built; those of a layer's experts are one record."""

    name: str
    site: str
    branch: str
    side: str
    layer: int | None
    holder: str
    reparam: str
    part: str
    added: bool
    size: int
    dtype: str
    weight_decay_class: str
    decays: bool
    tensor_parallel: str
    copies: int = 1  # of the same kind in the layer, one for each expert

    def joined(self, other: Vector) -> Vector:
        """Both as one record: vectors of two experts that differ in nothing else.

        Raises:
            ScaleVecError: They differ.
        """
        if dataclasses.replace(self, copies=other.copies) != other:
            raise ScaleVecError(f"the scale vectors {self.name} are not of one kind: {self} and {other}.")
        return dataclasses.replace(self, copies=self.copies + other.copies)


@dataclass(frozen=True)
class DecayGroup:
    """One parameter group of the optimizer, over the ranks of one pipeline."""

    weight_decay_multiplier: float
    max_learning_rate: float
    optimizer: str
    tensors: int


@dataclass(frozen=True)
class Audit:
    """What a run carries. Counts are for the whole model; tensor-parallel shards count once."""

    strategy: str
    components: dict[str, Any]
    execution: str
    execution_reason: str
    megatron_version: str
    plugin_version: str
    vectors: tuple[Vector, ...]
    expected_vectors: dict[str, int]
    built_vectors: dict[str, int]
    linears_converted: int
    linears_expected: int
    norm_scales_retired: int
    norm_scales_expected: int
    parameters_stock: int
    parameters_added: int
    decay_groups: tuple[DecayGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def parameters_added_percent(self) -> float:
        """Relative to the trainable parameters of the stock model."""
        return 100.0 * self.parameters_added / self.parameters_stock

    def problems(self) -> list[str]:
        """Sentences that say where what was built differs from what was asked for."""
        found = []
        for what, built, expected in (
            ("linears with scale vectors", self.linears_converted, self.linears_expected),
            ("norm scales retired", self.norm_scales_retired, self.norm_scales_expected),
        ):
            if built != expected:
                found.append(f"{what}: {built} built, {expected} expected")
        for key in sorted({*self.expected_vectors, *self.built_vectors}):
            built, expected = self.built_vectors.get(key, 0), self.expected_vectors.get(key, 0)
            if built != expected:
                found.append(f"vectors {key}: {built} built, {expected} expected")
        return found

    def to_json(self) -> str:
        """The audit as JSON, keys in a stable order."""
        record = dataclasses.asdict(self)
        record["parameters_added_percent"] = round(self.parameters_added_percent, 6)
        return json.dumps(record, indent=2, sort_keys=True) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON whole or not at all.

        Raises:
            ScaleVecError: The file cannot be written there.
        """
        path = os.fspath(path)
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            write_file(path, self.to_json())
        except OSError as error:
            raise ScaleVecError(f"the audit cannot be written to {path}: {error.strerror}.") from error

    def table(self) -> str:
        """The short table that is printed at start: one row per kind of vector."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"scale vectors: {self.strategy}", title_justify="left", expand=False)
        for column, justify in (
            ("vector", "left"),
            ("layers", "right"),
            ("size", "right"),
            ("stored as", "left"),
            ("class", "left"),
            ("decay", "left"),
            ("expected", "right"),
            ("built", "right"),
        ):
            table.add_column(column, justify=justify)
        for kind, members in self._by_kind():
            parts = list(dict.fromkeys(v.part for v in members))
            sizes = sorted({v.size for v in members if v.size > 1}) or [v.size for v in members[:1]]
            decaying = [v.part for v in members if v.decays]
            decay = "no" if not decaying else "yes"
            if decaying and set(decaying) != set(parts):
                decay = f"{', '.join(dict.fromkeys(decaying))} only"
            classes = dict.fromkeys(v.weight_decay_class for v in members)
            keys = [key for key in self.expected_vectors | self.built_vectors if _without_part(key) == kind]
            table.add_row(
                kind,
                _span(sorted({v.layer for v in members if v.layer is not None})) or "-",
                "/".join(map(str, sizes)) or "-",
                " · ".join(part or "γ" for part in parts) or "-",
                ", ".join(classes) or "-",
                decay,
                str(sum(self.expected_vectors.get(key, 0) for key in keys)),
                str(sum(self.built_vectors.get(key, 0) for key in keys)),
            )
        out = io.StringIO()
        if table.row_count:
            Console(file=out, width=110, color_system=None).print(table)
        else:
            out.write(f"scale vectors: {self.strategy}\n  no vectors: the Input-Norms have no scale\n")
        several = len({group.optimizer for group in self.decay_groups}) > 1
        groups = "; ".join(
            f"wd x{group.weight_decay_multiplier:g}, lr {group.max_learning_rate:g}"
            f"{f', {group.optimizer}' if several else ''}: {group.tensors} tensors"
            for group in self.decay_groups
        )
        return (
            out.getvalue()
            + f"  linears converted {self.linears_converted} of {self.linears_expected}; norm scales retired "
            f"{self.norm_scales_retired} of {self.norm_scales_expected}\n"
            f"  parameters {self.parameters_stock:,} {self.parameters_added:+,} "
            f"({self.parameters_added_percent:+.4f} %)\n"
            + "".join(f"  {note}\n" for note in self.notes)
            + f"  execution {self.execution}: {self.execution_reason}\n"
            f"  weight-decay groups: {groups or 'no optimizer'}\n"
            f"  megatron-core {self.megatron_version}, megatron_scalevec {self.plugin_version}"
        )

    def _by_kind(self) -> Iterator[tuple[str, list[Vector]]]:
        for kind in dict.fromkeys(map(_without_part, self.expected_vectors | self.built_vectors)):
            yield kind, [v for v in self.vectors if _without_part(kind_of(v)) == kind]


def kind_of(vector: Vector) -> str:
    return f"{vector.site} {vector.branch} {vector.side} {vector.part}".rstrip()


def _without_part(kind: str) -> str:
    return " ".join(kind.split(" ")[:3])


def _span(layers: list[int]) -> str:
    if not layers:
        return ""
    low, high = min(layers), max(layers)
    complete = sorted(layers) == list(range(low, high + 1))
    return (f"{low}" if low == high else f"{low}-{high}") if complete else ",".join(map(str, sorted(layers)))
