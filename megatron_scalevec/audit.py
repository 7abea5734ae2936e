"""The audit: what was built, against what was asked for.

One object, made once after model and optimizer exist. It is what the user sees at start, what lies beside
the checkpoints as JSON, and what tests look at. A difference between the two columns stops the run.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert import applied_config, branches_at, parameter_roles
from megatron_scalevec.decay import param_decays
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.layers.linear import FoldedLinear
from megatron_scalevec.pending import pending_config
from megatron_scalevec.reparam import get_reparameterization
from megatron_scalevec.vectors import role_of, vector_info, was_added
from megatron_scalevec.versions import megatron_version

__all__ = [
    "Audit",
    "DecayGroup",
    "Expectation",
    "Share",
    "Vector",
    "audit",
    "audit_of_records",
    "expectation",
    "is_copy",
    "rank_record",
    "unsharded_numel",
]


@dataclass(frozen=True)
class Vector:
    """One scale vector as built."""

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


@dataclass(frozen=True)
class DecayGroup:
    """One parameter group of the optimizer, over the ranks of one pipeline."""

    weight_decay_multiplier: float
    max_learning_rate: float
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
            self._write(path)
        except OSError as error:
            raise ScaleVecError(f"the audit cannot be written to {path}: {error.strerror}.") from error

    def _write(self, path: str) -> None:
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
        groups = "; ".join(
            f"wd x{group.weight_decay_multiplier:g}, lr {group.max_learning_rate:g}: {group.tensors} tensors"
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
            yield kind, [v for v in self.vectors if _without_part(_kind(v)) == kind]


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
    waiting = next(filter(None, map(pending_config, chunks)), None)
    if waiting is not None:
        raise ScaleVecError(
            f"the model's layer spec asks for {waiting.describe()}, and nothing of it is built: that is done "
            f"at the end of GPTModel's construction, and this is a {type(_unwrap(chunks[0])).__name__}."
        )
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
    groups = _groups_of_parameters(chunks, optimizer) if optimizer is not None else None
    records = _gather_over_pipeline(rank_record(chunks, config, groups))
    result = audit_of_records(records, config, _unwrap(chunks[0]).config)
    problems = result.problems()
    if not result.vectors and not result.norm_scales_retired:
        problems.append(
            f"the model has nothing at the sites {', '.join(config.sites)}, so nothing would change"
        )
    if problems:
        raise ScaleVecError(
            f"--scalevec-strategy {config.strategy} was not built everywhere: {'; '.join(problems)}. "
            "Nothing was trained."
        )
    return result


def rank_record(
    chunks: list[torch.nn.Module],
    config: ScaleVecConfig,
    groups: dict[int, tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """What this rank alone holds, for :func:`audit_of_records`; nothing collective.

    Args:
        chunks: The rank's model chunks.
        config: The strategy they were given.
        groups: ``id`` of every trainable parameter to (weight-decay multiplier, learning rate).

    Raises:
        ScaleVecError: A vector's decay is not what its class says.
    """
    vectors, retired, linears, stock, added, retired_numel = [], 0, 0, 0, 0, 0
    for chunk in chunks:
        root = _unwrap(chunk)
        parameter_roles(root)
        linears += sum(isinstance(m, FoldedLinear) for m in root.modules())
        for name, param in root.named_parameters():
            if was_added(param):
                added += param.numel() if param.requires_grad else 0
            elif not is_copy(root, name):
                stock += unsharded_numel(param)
                if param.dim() == 1 and not param.requires_grad and name.endswith(_NORM_SCALES):
                    retired += 1
                    retired_numel += param.numel()
            info = vector_info(param)
            if info is None:
                continue
            wanted = bool(param_decays(param, config.weight_decay))
            if groups is not None:
                _check_decay(name, wanted, groups.get(id(param)))
            vectors.append(
                Vector(
                    name=_global_name(name, info.layer),
                    site=info.site,
                    branch=info.branch,
                    side=info.side,
                    layer=info.layer,
                    holder=info.holder,
                    reparam=info.reparam,
                    part=info.part,
                    added=was_added(param),
                    size=param.numel(),
                    dtype=str(param.dtype).removeprefix("torch."),
                    weight_decay_class=role_of(param),
                    decays=wanted,
                    tensor_parallel="replicated, gradient summed over the group"
                    if info.holder == "linear"
                    else "as Megatron's norms",
                )
            )
    return {
        "vectors": vectors,
        "groups": Counter((groups or {}).values()),
        "retired": retired,
        "linears": linears,
        "stock": stock,
        "added": added - retired_numel,
    }


# Norms that lose their scale; the q/k norms of a model never do, whatever stands behind them.
_NORM_SCALES = (
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "layer_norm_weight",  # fused into the linear behind it (TransformerEngine)
    "final_layernorm.weight",
    "enorm.weight",
    "hnorm.weight",
)


def _global_name(name: str, layer: int | None) -> str:
    """The name with the layer's index in the whole decoder instead of that in its pipeline stage."""
    if layer is None or not name.startswith("decoder."):
        return name
    return re.sub(r"\blayers\.\d+\b", f"layers.{layer - 1}", name, count=1)


def is_copy(chunk: torch.nn.Module, name: str) -> bool:
    """Whether another pipeline stage holds the original of a parameter.

    The last stage has its own copy of tied embeddings, and a stage with multi-token prediction one of the
    embeddings that it looks tokens up in.
    """
    if name == "output_layer.weight":
        return chunk.share_embeddings_and_output_weights
    return name.startswith("embedding.") and not chunk.pre_process


def unsharded_numel(param: torch.nn.Parameter) -> int:
    """Size over all tensor- and expert-parallel ranks. A retired norm scale counts: stock trains it."""
    from megatron.core import parallel_state

    sharded = getattr(param, "tensor_model_parallel", False)
    if getattr(param, "allreduce", True):
        return param.numel() * (parallel_state.get_tensor_model_parallel_world_size() if sharded else 1)
    shards = parallel_state.get_expert_tensor_parallel_world_size() if sharded else 1
    return param.numel() * shards * parallel_state.get_expert_model_parallel_world_size()


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
        groups.update(record["groups"])
    return {
        "vectors": [vector for record in records for vector in record["vectors"]],
        "groups": [DecayGroup(wd, lr, tensors) for (wd, lr), tensors in sorted(groups.items())],
        **{key: sum(record[key] for record in records) for key in ("retired", "linears", "stock", "added")},
    }


def audit_of_records(
    records: Iterable[dict[str, Any]],
    config: ScaleVecConfig,
    model_config: Any,
    share: Share | None = None,
) -> Audit:
    """The audit of what some ranks hold, without judging it.

    Args:
        records: From :func:`rank_record`, one per pipeline stage.
        config: The strategy.
        model_config: Megatron's ``TransformerConfig``.
        share: What these ranks are to hold; by default the whole model.
    """
    from megatron_scalevec import __version__

    merged = _merge(records)
    expected = expectation(config, model_config, share)
    vectors = tuple(merged["vectors"])
    built = Counter(map(_kind, vectors))
    notes = []
    if config.placement == "dual-norm":
        normalized = [branch for branch in ("q", "k", "v") if branch not in config.branches_off]
        notes.append(f"dual-norm: {', '.join(normalized)} are normalized per head; everything else gets dual")
    if config.branches_off:
        notes.append(f"without scale vectors: {', '.join(config.branches_off)}")
    return Audit(
        strategy=config.strategy,
        components={
            "branches": config.branches,
            "placement": config.placement,
            "reparam": config.reparam,
            "weight_decay": config.weight_decay,
            "decay_v_norm": config.decay_v_norm,
            "vector_dtype": config.vector_dtype,
            "lr_mult": config.lr_mult,
            "branches_off": list(config.branches_off),
            "sites": list(config.sites),
        },
        execution="autograd",
        execution_reason=_EXECUTION if expected.linears else "the norms' own scales; nothing is formed",
        megatron_version=str(megatron_version()),
        plugin_version=__version__,
        vectors=tuple(sorted(vectors, key=lambda v: (v.layer is None, v.layer or 0, v.name))),
        expected_vectors=expected.vectors,
        built_vectors={
            key: built[key] for key in [*expected.vectors, *sorted(set(built) - set(expected.vectors))]
        },
        linears_converted=merged["linears"],
        linears_expected=expected.linears,
        norm_scales_retired=merged["retired"],
        norm_scales_expected=expected.norm_scales_retired,
        parameters_stock=merged["stock"],
        parameters_added=merged["added"],
        decay_groups=tuple(merged["groups"]),
        notes=tuple(notes),
    )


_EXECUTION = "W_eff is formed in every forward pass; the only mode of this version"


@dataclass(frozen=True)
class Expectation:
    """What a strategy must come to on a model, from the two configurations alone."""

    vectors: dict[str, int]
    linears: int
    norm_scales_retired: int


@dataclass(frozen=True)
class Share:
    """The part of a model that is looked at."""

    layers: int
    mtp_layers: int
    final_norm: bool

    @classmethod
    def whole(cls, model_config: Any) -> Share:
        """All pipeline stages, by the configuration alone."""
        mtp = int(getattr(model_config, "mtp_num_layers", None) or 0)
        # A repeated MTP layer is one layer, used several times.
        if mtp and getattr(model_config, "mtp_use_repeated_layer", False):
            mtp = 1
        return cls(model_config.num_layers, mtp, True)

    @classmethod
    def held_by(cls, chunks: Iterable[torch.nn.Module]) -> Share:
        """What Megatron has placed on one rank."""
        decoders = [_unwrap(chunk).decoder for chunk in chunks]
        mtp = [getattr(_unwrap(chunk), "mtp", None) for chunk in chunks]
        return cls(
            sum(len(decoder.layers) for decoder in decoders),
            sum(len(block.layers) for block in mtp if block is not None),
            any(getattr(decoder, "final_layernorm", None) is not None for decoder in decoders),
        )


def expectation(config: ScaleVecConfig, model_config: Any, share: Share | None = None) -> Expectation:
    """Counts of what a strategy must come to.

    Args:
        config: The strategy.
        model_config: Megatron's ``TransformerConfig``.
        share: The part of the model; by default all of it, MTP layers included.
    """
    share = share or Share.whole(model_config)
    mtp = share.mtp_layers
    layers = share.layers + mtp
    zero_centered = bool(getattr(model_config, "layernorm_zero_centered_gamma", False))
    branches_of = branches_at(config, model_config)
    shared = config.branches == "shared"
    vectors: dict[str, int] = {}

    def count(site: str, branch: str, side: str, number: int) -> None:
        for part in get_reparameterization(config.reparam).parts if number else ():
            vectors[f"{site} {branch} {side} {part.suffix}".rstrip()] = number

    moves = config.removes_norm_scale or zero_centered
    linears = 0
    for site, all_branches in branches_of.items():
        if site == "projections" or config.placement is None:
            continue
        branches = [branch for branch in all_branches if branch not in config.branches_off]
        if config.has_input_scales:
            for branch in ["shared"] if shared else branches:
                count(site, branch, "in", layers)
        if config.has_output_scales:
            for branch in branches:
                count(site, branch, "out", layers)
        behind_norms = config.placement == "dual-norm" and site == "attention"
        out_on_linear = [b for b in branches if not (behind_norms and b in ("q", "k", "v"))]
        in_on_linear = config.has_input_scales and (moves if shared else bool(branches))
        if in_on_linear or (config.has_output_scales and out_on_linear):
            linears += layers
    if config.placement is not None:
        for branch in branches_of.get("projections", ()):
            if branch in config.branches_off:
                continue
            linears += layers
            if config.has_input_scales:
                count("projections", branch, "in", layers)
            if config.has_output_scales:
                count("projections", branch, "out", layers)
    retired = 0
    if config.active:
        sites = len({"attention", "mlp"} & set(config.sites))
        retired += layers * sites * moves
    # The head's norm keeps its scale unless it is removed, or moves into another form.
    leaves = config.placement is None or not config.plain or zero_centered
    for site, branches, number in (
        ("mtp", ("enorm", "hnorm", "final_layernorm"), mtp),
        ("head", ("logits",), int(share.final_norm)),
    ):
        if site in config.sites and number:
            retired += number * len(branches) * leaves
            if config.placement is not None:
                for branch in branches:
                    count(site, branch, "in", number)
    return Expectation(vectors, linears, retired)


def _kind(vector: Vector) -> str:
    return f"{vector.site} {vector.branch} {vector.side} {vector.part}".rstrip()


def _without_part(kind: str) -> str:
    return " ".join(kind.split(" ")[:3])


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


def _groups_of_parameters(chunks: list[torch.nn.Module], optimizer: Any) -> dict[int, tuple[float, float]]:
    """``id`` of every trainable model parameter to (wd_mult, max_lr) of its group, None where it has none.

    Megatron's mixed-precision and distributed optimizers hold copies or shards in the groups, so the way
    from a model parameter to its group differs for each kind. A distributed optimizer knows only the
    parameters that this rank holds a shard of: what the other data-parallel ranks know is added, which
    makes this collective over them.
    """
    params = [p for chunk in chunks for p in _unwrap(chunk).parameters() if p.requires_grad]
    found: dict[int, tuple[float, float]] = {}
    sharded = False
    for member in _members(optimizer):
        groups = member.optimizer.param_groups
        index_map = getattr(member, "model_param_group_index_map", None)
        if index_map is not None:
            sharded = True
            pairs = [(param, groups[index]) for param, (index, _) in index_map.items()]
        elif hasattr(member, "float16_groups"):
            lists = zip(groups, member.float16_groups, member.fp32_from_fp32_groups)
            pairs = [(param, group) for group, half, single in lists for param in [*half, *single]]
        else:
            pairs = [(param, group) for group in groups for param in group["params"]]
        for param, group in pairs:
            found[id(param)] = (float(group["wd_mult"]), float(group.get("max_lr") or 0.0))
    if sharded:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        table = torch.tensor(
            [found.get(id(param), (-1.0, -1.0)) for param in params],
            dtype=torch.float64,
            device=params[0].device,
        )
        torch.distributed.all_reduce(table, op=torch.distributed.ReduceOp.MAX, group=group)
        for param, (wd, lr) in zip(params, table.tolist()):
            if wd >= 0:
                found[id(param)] = (wd, lr)
    return {id(param): found[id(param)] for param in params if id(param) in found}


def _check_decay(name: str, wanted: bool, group: tuple[float, float] | None) -> None:
    if group is None:
        raise ScaleVecError(f"the scale vector {name} is in no parameter group, so it would never train.")
    multiplier, _ = group
    if (multiplier != 0.0) != wanted:
        raise ScaleVecError(
            f"the scale vector {name} {'should' if wanted else 'should not'} decay, but the optimizer's "
            f"group has wd_mult {multiplier:g}: another rule for weight decay is in the way "
            "(config_overrides). Remove it, or use --scalevec-weight-decay stock."
        )
