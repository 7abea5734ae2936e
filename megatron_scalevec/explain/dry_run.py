"""Megatron's start without its run: arguments, process groups and models of ranks that do not exist."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from megatron_scalevec.cost import Schedule, microbatches_in_flight
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration.arguments import parse_own
from megatron_scalevec.versions import require_megatron_training, require_supported_megatron

__all__ = ["DryRun", "quietly", "read_arguments"]

_RANK_GROUPS: dict[tuple, list[list[int]]] = {}
_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


@dataclass
class DryRun:
    """A run that could start."""

    args: Any
    session: Any
    rank: int
    world_size: int
    notes: list[str] = field(default_factory=list)

    def enter(self, rank: int) -> None:
        """Become a rank: process groups as Megatron makes them, whose other members do not exist."""
        import torch
        from megatron.core import parallel_state, tensor_parallel
        from megatron.training import initialize
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        os.environ["RANK"] = str(rank)
        self.args.rank = rank
        torch.distributed.init_process_group("fake", rank=rank, world_size=self.world_size, store=FakeStore())
        with _groups_of(rank):
            initialize._initialize_distributed(None, None, None)
        # Mamba's and delta nets' parameters are drawn whatever device they are on.
        tensor_parallel.model_parallel_cuda_manual_seed(self.args.seed)

    def pipeline(self) -> list[int]:
        """The ranks of the pipeline that the present rank is in, first stage first."""
        import torch
        from megatron.core import parallel_state

        return torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())

    def copy_of_the_model(self) -> list[int]:
        """All ranks that hold a part of the model that the present rank holds a part of, experts included."""
        import torch
        from megatron.core import parallel_state

        groups = (
            parallel_state.get_model_parallel_group(),
            parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        )
        return sorted({rank for group in groups for rank in torch.distributed.get_process_group_ranks(group)})

    def schedule(self, *, of_experts: bool = False) -> Schedule:
        """What the cost formulas need to know of the run, as it is for the present rank.

        Args:
            of_experts: For the parameters of routed experts, whose optimizer state fewer ranks share.
        """
        from megatron.core import parallel_state

        args = self.args
        stage = parallel_state.get_pipeline_model_parallel_rank()
        microbatches = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
        stages = args.pipeline_model_parallel_size
        chunks = args.virtual_pipeline_model_parallel_size or 1
        sharded = getattr(args, "use_distributed_optimizer", False)
        half = args.bf16 or args.fp16
        # Of one instance of the distributed optimizer, of which there may be several.
        if of_experts:
            sharing = parallel_state.get_expert_data_parallel_world_size(partial_expert_data_parallel=True)
        else:
            sharing = parallel_state.get_data_parallel_world_size(
                with_context_parallel=True, partial_data_parallel=True
            )
        return Schedule(
            microbatches=microbatches,
            in_flight=microbatches_in_flight(microbatches, stage, stages, chunks),
            state_shards=sharing if sharded else 1,
            gradient_bytes=2 if half and not args.accumulate_allreduce_grads_in_fp32 else 4,
            master_weights=half,
            full_recompute=args.recompute_granularity == "full",
        )

    def build(self) -> list[Any]:
        """The present rank's model chunks, on the meta device."""
        import torch

        chunks = self.args.virtual_pipeline_model_parallel_size
        with torch.device("meta"):
            make = self._builder()
            built = [make(stage) for stage in (range(chunks) if chunks else [None])]
        # As Megatron's Float16Module does before there is an optimizer; norms are built in float32.
        if self.args.bf16 or self.args.fp16:
            built = [chunk.bfloat16() if self.args.bf16 else chunk.half() for chunk in built]
        return built

    def _builder(self) -> Callable[[int | None], Any]:
        from megatron.core import parallel_state

        if getattr(self.args, "hybrid_layer_pattern", None):
            from megatron.core.process_groups_config import ProcessGroupCollection
            from megatron.training.argument_utils import hybrid_config_from_args
            from megatron.training.models.hybrid import HybridModelBuilder

            of_hybrids = HybridModelBuilder(hybrid_config_from_args(self.args))
            all_groups = ProcessGroupCollection.use_mpu_process_groups()
            return lambda stage: of_hybrids.build_model(all_groups, vp_stage=stage)
        if Version(self.session.version.base_version) >= Version("0.19"):
            from megatron.core.process_groups_config import ProcessGroupCollection
            from megatron.training.argument_utils import gpt_config_from_args
            from megatron.training.models.gpt import GPTModelBuilder

            builder = GPTModelBuilder(gpt_config_from_args(self.args))
            groups = ProcessGroupCollection.use_mpu_process_groups()
            return lambda stage: builder.build_model(groups, vp_stage=stage)
        from megatron_scalevec.integration.pretrain_gpt import model_provider

        return lambda stage: model_provider(
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            vp_stage=stage,
        )


@contextlib.contextmanager
def _groups_of(rank: int) -> Iterator[None]:
    """Let Megatron make the groups of one rank only, in the time that these take.

    It goes through the groups of all ranks, of which torch gives a rank nothing but its own; with thousands
    of ranks to become one after the other, that is most of a dry run.
    """
    import torch
    from megatron.core import parallel_state

    from megatron_scalevec.patching import PatchSet

    def own_only(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_group(ranks=None, *args, **kwargs):
            if ranks is not None and rank not in ranks:
                return torch.distributed.GroupMember.NON_GROUP_MEMBER
            return original(ranks, *args, **kwargs)

        return create_group

    changes = PatchSet()
    changes.wrap(parallel_state, "create_group", own_only)
    changes.wrap(parallel_state, "generate_masked_orthogonal_rank_groups", _remembered)
    try:
        yield
    finally:
        changes.undo()


def _remembered(rank_groups: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
    """The division of all ranks into groups, which is the same for every rank: made once for each layout."""

    def of_layout(world_size: int, parallel_size: list[int], mask: list[bool]) -> list[list[int]]:
        key = world_size, tuple(parallel_size), tuple(mask)
        if key not in _RANK_GROUPS:
            _RANK_GROUPS[key] = rank_groups(world_size, parallel_size, mask)
        return [list(group) for group in _RANK_GROUPS[key]]  # Megatron shifts them in place

    return of_layout


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what Megatron prints from the output, and turn its complaints into sentences.

    Raises:
        ScaleVecError: In place of whatever Megatron raises.
    """
    try:
        # A real file: some imports ask for its descriptor.
        with (
            tempfile.TemporaryFile("w") as printed,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            yield
    except ScaleVecError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split()) or frame.line
        raise ScaleVecError(
            f"Megatron refuses this run: {said} ({type(error).__name__}, {os.path.basename(frame.filename)} "
            f"line {frame.lineno})."
        ) from error


def read_arguments(
    words: Sequence[str],
    rank: int,
    world_size: int | None,
    *,
    launched: bool = False,
    with_script: bool = False,
) -> DryRun:
    """Parse and validate a command line as a real run does.

    Args:
        words: Megatron's arguments.
        rank: The rank to be.
        world_size: Number of ranks, None for the fewest possible.
        launched: The number of ranks is the launcher's, not ``--world-size``.
        with_script: Arguments that Megatron does not know may be the script's own.

    Raises:
        ScaleVecError: The run would be refused.
    """
    words = list(words)
    own = parse_own(words)
    require_megatron_training(require_supported_megatron())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron_scalevec import cpu
    from megatron_scalevec.integration import hooks

    hooks.claim()
    cpu.install()
    session = hooks.install(words, cpu=True)
    session.describing = own.scalevec_cpu != "on"
    sys.argv = ["scalevec-explain", *words]
    unknown = _unknown_to_megatron(words)
    if unknown and not with_script:
        raise ScaleVecError(
            f"Megatron {session.version} does not know {', '.join(unknown)}; correct that, or give the "
            "script's name before the arguments if they are its own."
        )
    from megatron.training import arguments, checkpointing, yaml_arguments
    from megatron.training.global_vars import set_args

    args = arguments.parse_args(ignore_unknown_args=True)
    if getattr(args, "use_checkpoint_args", False):
        checkpointing.load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        checkpointing.load_args_from_checkpoint(args)
    args.world_size = _world_size(args, world_size, launched)
    if not 0 <= rank < args.world_size:
        raise ScaleVecError(
            f"--rank {rank} is not one of the {args.world_size} ranks, 0 to {args.world_size - 1}."
        )
    os.environ["WORLD_SIZE"] = str(args.world_size)
    validate = yaml_arguments.validate_yaml if args.yaml_cfg is not None else arguments.validate_args
    args = validate(args, dict(_DEFAULTS)) or args
    # There is nobody to make them with.
    for name in ("use_gloo_process_groups", "enable_gloo_process_groups"):
        if hasattr(args, name):
            setattr(args, name, False)
    set_args(args)
    run = DryRun(args, session, rank, args.world_size)
    if unknown:
        run.notes.append(f"not Megatron's, taken for the script's own: {', '.join(unknown)}")
    if session.describing and session.cpu_changes:
        run.notes.append(f"shown as it would be on the CPU: {'; '.join(session.cpu_changes)}")
    _set_vocabulary(run)
    return run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ScaleVecError(f"Megatron does not take these arguments: {message}.") from None


def _unknown_to_megatron(words: list[str]) -> list[str]:
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(_Parser(add_help=False, allow_abbrev=False))
    _, left = parser.parse_known_args(words)
    return [word for word in left if word.startswith("--")] or left


def _world_size(args: Any, asked: int | None, launched: bool) -> int:
    """The number of ranks: a multiple of what dense layers take, and of what experts take."""
    sizes = getattr(args, "model_parallel", args)  # a section of its own in YAML

    def size(name: str) -> int:
        return int(getattr(sizes, name, None) or 1)

    tp, pp = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    dense = tp * pp * size("context_parallel_size")
    expert_tp = int(getattr(sizes, "expert_tensor_parallel_size", None) or tp)
    fewest = math.lcm(dense, expert_tp * pp * size("expert_model_parallel_size"))
    if asked is None:
        return fewest
    given = f"the launcher's number of ranks, {asked}," if launched else f"--world-size {asked}"
    way_out = "give --world-size, or correct one of them" if launched else f"drop it for {fewest}"
    if asked < 1:
        raise ScaleVecError(f"{given} is no number of ranks, 1 or more; {way_out}.")
    if asked % fewest:
        raise ScaleVecError(
            f"{given} is not a multiple of {fewest}, which the parallel sizes ask for; {way_out}."
        )
    return asked


def _set_vocabulary(run: DryRun) -> None:
    """The padded vocabulary size, from the tokenizer where it is at hand, else from ``--vocab-size``."""
    args = run.args
    if getattr(args, "padded_vocab_size", None) is not None:
        return
    from megatron_scalevec.integration.pretrain_gpt import build_tokenizer

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    why = _why_not_here(args)
    if not why:
        try:
            build_tokenizer(args)
        except Exception as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
    if getattr(args, "padded_vocab_size", None) is not None:
        return
    size = getattr(args, "vocab_size", None)
    if size is None:
        raise ScaleVecError(
            f"the size of the vocabulary is not known here: the tokenizer ({args.tokenizer_type}) cannot be "
            f"loaded ({why}); add --vocab-size or --padded-vocab-size."
        )
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = math.ceil(size / multiple) * multiple
    run.notes.append(
        f"vocabulary: --vocab-size {size} padded to {args.padded_vocab_size}, without the tokenizer"
    )


def _why_not_here(args: Any) -> str:
    """Said before transformers is imported, which takes seconds: a model from the hub that is not on disk."""
    name = str(getattr(args, "tokenizer_model", None) or "")
    if args.tokenizer_type != "HuggingFaceTokenizer" or not name or os.path.exists(name):
        return ""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return ""  # whoever builds the tokenizer says what is missing
    cached = os.path.join(HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    return "" if os.path.isdir(cached) else f"there is no folder {name}, nor a copy from the hub"
