"""The audit: what was built, against what was asked for.

One object, made once after model and optimizer exist. It is what the user sees at start, what lies beside
the checkpoints as JSON, and what tests look at. A difference between the two columns stops the run.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert import applied_config, parameter_roles
from megatron_scalevec.decay import param_decays
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.layers.linear import ScaleVecColumnParallelLinear
from megatron_scalevec.vectors import role_of, vector_info
from megatron_scalevec.versions import megatron_version

__all__ = ["Audit", "DecayGroup", "Vector", "audit"]


@dataclass(frozen=True)
class Vector:
    """One scale vector as built."""

    name: str
    site: str
    branch: str
    side: str
    layer: int | None
    holder: str
    size: int
    dtype: str
    weight_decay_class: str
    decays: bool
    tensor_parallel: str


@dataclass(frozen=True)
class DecayGroup:
    """One parameter group of the optimizer, over the ranks of one pipeline."""

    weight_decay_multiplier: float
    learning_rate_multiplier: float
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
        """Write the JSON whole or not at all."""
        path = os.fspath(path)
        directory = os.path.dirname(os.path.abspath(path))
        os.makedirs(directory, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=".scalevec-audit-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            # mkstemp makes a private file; the audit is as readable as anything else in the folder.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def table(self) -> str:
        """The short table that is printed at start."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"scale vectors: {self.strategy}", title_justify="left", expand=False)
        for column, justify in (
            ("vector", "left"),
            ("layers", "right"),
            ("size", "right"),
            ("class", "left"),
            ("decay", "left"),
            ("expected", "right"),
            ("built", "right"),
        ):
            table.add_column(column, justify=justify)
        for key, members in self._by_kind():
            first = members[0] if members else None
            sizes = sorted({v.size for v in members})
            table.add_row(
                key,
                _span([v.layer for v in members if v.layer is not None]) or "-",
                "/".join(map(str, sizes)) or "-",
                first.weight_decay_class if first else "-",
                ("yes" if first.decays else "no") if first else "-",
                str(self.expected_vectors.get(key, 0)),
                str(self.built_vectors.get(key, 0)),
            )
        out = io.StringIO()
        Console(file=out, width=100, color_system=None).print(table)
        groups = "; ".join(
            f"wd x{group.weight_decay_multiplier:g}: {group.tensors} tensors" for group in self.decay_groups
        )
        return (
            out.getvalue()
            + f"  linears converted {self.linears_converted} of {self.linears_expected}; norm scales retired "
            f"{self.norm_scales_retired} of {self.norm_scales_expected}\n"
            f"  parameters {self.parameters_stock:,} {self.parameters_added:+,} "
            f"({self.parameters_added_percent:+.4f} %)\n"
            f"  execution {self.execution}: {self.execution_reason}\n"
            f"  weight-decay groups: {groups or 'no optimizer'}\n"
            f"  megatron-core {self.megatron_version}, megatron_scalevec {self.plugin_version}"
        )

    def _by_kind(self) -> Iterator[tuple[str, list[Vector]]]:
        for key in self.expected_vectors | self.built_vectors:
            yield key, [v for v in self.vectors if _kind(v) == key]


def audit(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any = None,
    *,
    config: ScaleVecConfig | None = None,
) -> Audit:
    """Look at a built model, and at the optimizer if there is one.

    With pipeline parallelism this is collective: every rank of the pipeline group calls it, and all get
    the same record of the whole pipeline.

    Args:
        model: The model, or Megatron's list of model chunks; wrapped or not.
        optimizer: Megatron's optimizer over the same model.
        config: What was asked for; by default what the model says it was given.

    Raises:
        ScaleVecError: A chunk carries another strategy than the one asked for, a vector's decay in the
            optimizer is not what its class says, or what was built differs from what was expected.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    config = config or applied_config(chunks[0])
    if config is None or not config.active:
        raise ScaleVecError(
            "there is nothing to audit: the model carries no scale vectors. Apply a strategy before the "
            "audit, or pass the one that was asked for."
        )
    for index, chunk in enumerate(chunks):
        if applied_config(chunk) != config:
            built = applied_config(chunk)
            raise ScaleVecError(
                f"model chunk {index} ({type(_unwrap(chunk)).__name__}) carries "
                f"{built.describe() if built else 'no scale vectors'}, but {config.describe()} was asked "
                "for: the model is of a kind that the flag does not reach."
            )
    local = _local_record(chunks, optimizer, config)
    merged = _merge(_gather_over_pipeline(local))
    result = _assemble(merged, chunks, config)
    problems = result.problems()
    if problems:
        raise ScaleVecError(
            f"--scalevec-strategy {config.strategy} was not built everywhere: {'; '.join(problems)}. "
            "Nothing was trained."
        )
    return result


def _local_record(chunks: list[torch.nn.Module], optimizer: Any, config: ScaleVecConfig) -> dict[str, Any]:
    multipliers = _decay_multipliers(optimizer) if optimizer is not None else None
    vectors, retired, linears, stock = [], 0, 0, 0
    for chunk in chunks:
        root = _unwrap(chunk)
        parameter_roles(root)
        linears += sum(isinstance(m, ScaleVecColumnParallelLinear) for m in root.modules())
        for name, param in root.named_parameters():
            info = vector_info(param)
            # The last pipeline stage holds a copy of tied embeddings.
            copy = name == "output_layer.weight" and root.share_embeddings_and_output_weights
            if (info is None or info.holder == "norm") and not copy:
                stock += _unsharded_numel(param)
            if info is None:
                retired += not param.requires_grad and param.dim() == 1 and _is_norm_scale(name)
                continue
            wanted = param_decays(param, config.weight_decay)
            if multipliers is not None:
                _check_decay(name, param, bool(wanted), multipliers, optimizer)
            vectors.append(
                Vector(
                    name=name,
                    site=info.site,
                    branch=info.branch,
                    side=info.side,
                    layer=info.layer,
                    holder=info.holder,
                    size=param.numel(),
                    dtype=str(param.dtype).removeprefix("torch."),
                    weight_decay_class=role_of(param),
                    decays=bool(wanted),
                    tensor_parallel="replicated, gradient summed over the group"
                    if info.holder == "linear"
                    else "as Megatron's norms",
                )
            )
    groups = [] if optimizer is None else list(_decay_groups(optimizer))
    return {
        "vectors": vectors,
        "retired": retired,
        "linears": linears,
        "stock": stock,
        "groups": groups,
    }


def _is_norm_scale(name: str) -> bool:
    return name.endswith("norm.weight")


def _unsharded_numel(param: torch.nn.Parameter) -> int:
    """Size over all tensor-parallel ranks. A retired norm scale counts: the stock model trains it."""
    from megatron.core import parallel_state

    sharded = getattr(param, "tensor_model_parallel", False)
    return param.numel() * (parallel_state.get_tensor_model_parallel_world_size() if sharded else 1)


def _gather_over_pipeline(record: dict[str, Any]) -> list[dict[str, Any]]:
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return [record]
    group = parallel_state.get_pipeline_model_parallel_group()
    records: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(records, record, group=group)
    return records


def _merge(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    records = list(records)
    groups: Counter = Counter()
    for record in records:
        for wd, lr, tensors in record["groups"]:
            groups[wd, lr] += tensors
    return {
        "vectors": [vector for record in records for vector in record["vectors"]],
        "groups": [DecayGroup(wd, lr, tensors) for (wd, lr), tensors in sorted(groups.items())],
        **{key: sum(record[key] for record in records) for key in ("retired", "linears", "stock")},
    }


def _assemble(merged: dict[str, Any], chunks: list[torch.nn.Module], config: ScaleVecConfig) -> Audit:
    from megatron_scalevec import __version__

    model_config = _unwrap(chunks[0]).config
    layers = model_config.num_layers
    expected = _expected_vectors(config, layers, model_config.gated_linear_unit)
    vectors = tuple(merged["vectors"])
    built = Counter(map(_kind, vectors))
    sites_with_linears = len({"attention", "mlp"} & set(config.sites))
    on_linears = config.placement is not None and (config.branches == "split" or config.has_output_scales)
    retired_heads = "head" in config.sites and config.placement is None
    return Audit(
        strategy=config.strategy,
        components={
            "branches": config.branches,
            "placement": config.placement,
            "reparam": config.reparam,
            "weight_decay": config.weight_decay,
            "sites": list(config.sites),
        },
        execution="autograd",
        execution_reason="W_eff is formed in every forward pass; the only mode of this version",
        megatron_version=str(megatron_version()),
        plugin_version=__version__,
        vectors=tuple(sorted(vectors, key=lambda v: (v.layer is None, v.layer or 0, v.name))),
        expected_vectors=expected,
        built_vectors={key: built[key] for key in [*expected, *sorted(set(built) - set(expected))]},
        linears_converted=merged["linears"],
        linears_expected=layers * sites_with_linears if on_linears else 0,
        norm_scales_retired=merged["retired"],
        norm_scales_expected=layers * sites_with_linears * config.removes_norm_scale + retired_heads,
        parameters_stock=merged["stock"],
        parameters_added=sum(v.size for v in vectors if v.holder == "linear")
        - _retired_numel(merged["retired"], model_config.hidden_size),
        decay_groups=tuple(merged["groups"]),
    )


def _retired_numel(retired: int, hidden_size: int) -> int:
    return retired * hidden_size


def _expected_vectors(config: ScaleVecConfig, layers: int, gated: bool) -> dict[str, int]:
    """Vectors per kind that the model's configuration implies, independent of what was built."""
    expected: dict[str, int] = {}
    if config.placement is None:
        return expected
    branches = {"attention": ("q", "k", "v"), "mlp": ("gate", "up") if gated else ("up",)}
    for site, names in branches.items():
        if site not in config.sites:
            continue
        if config.has_input_scales:
            for name in names if config.branches == "split" else ("shared",):
                expected[f"{site} {name} in"] = layers
        if config.has_output_scales:
            for name in names:
                expected[f"{site} {name} out"] = layers
    if "head" in config.sites:
        expected["head logits in"] = 1
    return expected


def _kind(vector: Vector) -> str:
    return f"{vector.site} {vector.branch} {vector.side}"


def _span(layers: list[int]) -> str:
    if not layers:
        return ""
    low, high = min(layers), max(layers)
    complete = sorted(layers) == list(range(low, high + 1))
    return (f"{low}" if low == high else f"{low}-{high}") if complete else ",".join(map(str, sorted(layers)))


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def _members(optimizer: Any) -> list[Any]:
    """Megatron's single optimizers inside a chain."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _decay_groups(optimizer: Any) -> Iterator[tuple[float, float, int]]:
    for member in _members(optimizer):
        for group in member.optimizer.param_groups:
            if group["params"]:
                yield (
                    float(group["wd_mult"]),
                    float(group.get("lr_mult", 1.0)),
                    len(group["params"]),
                )


def _decay_multipliers(optimizer: Any) -> dict[int, float]:
    """``id`` of model parameters to the wd_mult of the group they are in.

    Megatron's mixed-precision and distributed optimizers hold copies or shards in the groups, so the way
    from a model parameter to its group differs for each kind.
    """
    found: dict[int, float] = {}
    for member in _members(optimizer):
        groups = member.optimizer.param_groups
        index_map = getattr(member, "model_param_group_index_map", None)
        if index_map is not None:
            for param, (index, _) in index_map.items():
                found[id(param)] = float(groups[index]["wd_mult"])
        elif hasattr(member, "float16_groups"):
            for group, half, single in zip(groups, member.float16_groups, member.fp32_from_fp32_groups):
                for param in [*half, *single]:
                    found[id(param)] = float(group["wd_mult"])
        else:
            for group in groups:
                for param in group["params"]:
                    found[id(param)] = float(group["wd_mult"])
    return found


def _check_decay(
    name: str,
    param: torch.nn.Parameter,
    wanted: bool,
    multipliers: dict[int, float],
    optimizer: Any,
) -> None:
    multiplier = multipliers.get(id(param))
    if multiplier is None:
        # A distributed optimizer knows only the parameters that this rank holds a shard of.
        if any(hasattr(member, "model_param_group_index_map") for member in _members(optimizer)):
            return
        raise ScaleVecError(f"the scale vector {name} is in no parameter group, so it would never train.")
    if (multiplier != 0.0) != wanted:
        raise ScaleVecError(
            f"the scale vector {name} {'should' if wanted else 'should not'} decay, but the optimizer's "
            f"group has wd_mult {multiplier:g}: another rule for weight decay is in the way "
            "(config_overrides). Remove it, or use --scalevec-weight-decay stock."
        )
