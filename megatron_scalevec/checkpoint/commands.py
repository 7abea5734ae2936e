"""``scalevec unfold`` and ``scalevec fold``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_scalevec.command_line import SentenceParser
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.hybrid_layers import HYBRID_PARTS, hybrid_pattern
from megatron_scalevec.lifetime import stopped_by_signals
from megatron_scalevec.support import expert_tensor_parallel

__all__ = ["fold_checkpoint", "main", "refuse_kinds", "unfold_checkpoint"]

_INTERRUPTED = 130


def main(command: str, argv: Sequence[str]) -> int:
    """Run ``unfold`` or ``fold``. Returns the exit code.

    Raises:
        ScaleVecError: It cannot be done; nothing was written.
    """
    parser = _parser(command)
    options = parser.parse_args(argv)
    choices = {
        "step": options.ckpt_step,
        "optimizer": options.optimizer,
        "check": options.check,
        "say": print,
    }
    try:
        with stopped_by_signals():
            if command == "fold":
                fold_checkpoint(options.checkpoint, options.out, **choices)
            else:
                if options.scalevec_strategy is None:
                    raise ScaleVecError("scalevec unfold needs --strategy, for example --strategy hg.")
                config = ScaleVecConfig.from_namespace(options)
                unfold_checkpoint(options.checkpoint, options.out, config, **choices)
    except KeyboardInterrupt:
        print(f"interrupted; {options.out} was not written")
        return _INTERRUPTED
    return 0


def unfold_checkpoint(
    source: str | Path,
    out: str | Path,
    config: ScaleVecConfig,
    *,
    step: int | None = None,
    optimizer: bool = True,
    check: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Make a stock torch_dist checkpoint the start of a run with scale vectors.

    Args:
        source: A ``--save`` folder or the folder of one iteration; it is only read.
        out: The folder to make, for ``--load``.
        config: An active strategy.
        step: The iteration, by default the one that the tracker file names.
        optimizer: Carry the optimizer's state over.
        check: Compare the result with the source, see :mod:`megatron_scalevec.checkpoint.verify`.
        say: Told what was done, in sentences.

    Raises:
        ScaleVecError: The strategy does not fit, the source cannot be read, or the check fails. Nothing was
            written.
    """
    from megatron_scalevec.checkpoint.draft import Draft
    from megatron_scalevec.checkpoint.store import CheckpointReader
    from megatron_scalevec.checkpoint.unfold import Unfolding
    from megatron_scalevec.decay import decays

    if not config.active:
        raise ScaleVecError("unfolding to 'stock' changes nothing; name another strategy.")
    reader = CheckpointReader(source, step)
    was = ScaleVecConfig.from_namespace(reader.args)
    if was.active:
        raise ScaleVecError(
            f"{reader.folder} carries scale vectors already ({was.describe()}); scalevec fold makes it stock "
            "again."
        )
    refuse_kinds(reader.args)
    draft = Draft(reader, optimizer=optimizer)
    if config.lr_mult and len(draft.families) > 1:
        raise ScaleVecError(
            "--lr-mult gives the vectors parameter groups of their own, which a stock optimizer's state does "
            "not have; add --no-optimizer."
        )
    work = Unfolding(draft, config)
    finding = _write(draft, out, check and not work.changes_function)
    say(f"{out}: iteration {reader.iteration} of {reader.folder} as {config.describe()}")
    if work.changes_function:
        say("not the same function: norms on q, k and v were added, so there is nothing to compare")
    _say_check(say, finding, check)
    if len(draft.families) > 1:
        say(
            "optimizer: weights keep their averages; those of scale vectors start at zero"
            + ("" if decays("input", True, config.weight_decay) else ", without weight decay")
        )
    else:
        _say_no_optimizer(say)


def fold_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    optimizer: bool = True,
    check: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Make a torch_dist checkpoint with scale vectors a stock one, for Megatron without this package.

    Args and errors are those of :func:`unfold_checkpoint`; also refused is what stock Megatron cannot
    express.
    """
    from megatron_scalevec.checkpoint.draft import Draft
    from megatron_scalevec.checkpoint.fold import Folding
    from megatron_scalevec.checkpoint.store import CheckpointReader

    reader = CheckpointReader(source, step)
    refuse_kinds(reader.args)
    draft = Draft(reader, optimizer=optimizer)
    work = Folding(draft)
    finding = _write(draft, out, check)
    say(f"{out}: iteration {reader.iteration} of {reader.folder} ({work.config.strategy}) as stock")
    if getattr(draft.args, "qk_layernorm", False):
        say("the norms on q and k stay, as Megatron's own: run it with --qk-layernorm")
    _say_check(say, finding, check)
    if len(draft.families) > 1:
        say("optimizer: averages of folded weights were divided by the scales; those of norms start at zero")
    else:
        _say_no_optimizer(say)


def _say_check(say: Callable[[str], None], finding, check: bool) -> None:
    if finding is not None:
        say(f"checked: {finding.what} differ by {finding.difference:.1e}")
    elif not check:
        say("not checked (--no-check)")


def _say_no_optimizer(say: Callable[[str], None]) -> None:
    say("no optimizer state: start from it with --no-load-optim, or with --finetune")


_KINDS = {
    "experts in one tensor": ("moe_single_grouped_weight",),
    "shared experts in a grouped kernel": ("use_grouped_gemm_for_shared_expert",),
    "experimental attention": ("experimental_attention_variant",),
    "a legacy model": ("use_legacy_models",),
}
"""Kinds of models whose linears :mod:`megatron_scalevec.checkpoint.tables` does not know, and the arguments
that show them."""


def refuse_kinds(args: argparse.Namespace) -> None:
    """Refuse a checkpoint of which only a part would be converted, or that no run could go on from.

    Args:
        args: Megatron's arguments in it.

    Raises:
        ScaleVecError: It holds a model of another kind.
    """
    from megatron_scalevec.checkpoint.tables import rows_that_take_turns

    kinds = [kind for kind, names in _KINDS.items() if any(getattr(args, name, None) for name in names)]
    # Halves of each rank's rows were saved as gate and up, whichever they are.
    if rows_that_take_turns(args) and expert_tensor_parallel(args) > 1:
        kinds.append(
            "gate and up rows that take turns (--moe-mlp-glu-interleave-size), saved by several "
            "expert-tensor-parallel ranks"
        )
    for kind in (*kinds, *_hybrid_kinds(args)):
        raise ScaleVecError(
            f"the checkpoint holds {kind}, which cannot be folded or unfolded yet; train on with the "
            "strategy it has, or start a new run with another one."
        )


def _hybrid_kinds(args: argparse.Namespace) -> Iterator[str]:
    """What a hybrid model has that carries no scale vectors in a run."""
    pattern = hybrid_pattern(args)
    if pattern is None:
        return
    layers, _, predicted = pattern.partition("/")
    unknown = sorted(set(layers) - {*HYBRID_PARTS, "|"})
    if unknown or not layers:
        yield f"hybrid layers of kind {', '.join(unknown) or 'unknown'}"
    if predicted or getattr(args, "mtp_hybrid_override_pattern", None):
        yield "multi-token prediction in a hybrid model"
    if "M" in layers and getattr(args, "apply_layernorm_1p", False):
        yield "Mamba layers in a model that stores γ − 1 (--apply-layernorm-1p)"


def _write(draft, out: str | Path, check: bool):
    """Write a draft. Returns what the check has found, None without one."""
    from megatron_scalevec.checkpoint.store import write_checkpoint

    found = []

    def verify_first(folder: Path) -> None:
        from megatron_scalevec.checkpoint.verify import verify

        found.append(verify(draft.reader.folder, folder))

    pieces = draft.pieces
    with _progress(sum(piece.bytes for piece in pieces)) as done:
        write_checkpoint(
            out,
            iteration=draft.reader.iteration,
            pieces=pieces,
            objects={name: lambda name=name: draft.reader.read_object(name) for name in draft.objects},
            common=draft.common,
            common_file=draft.reader.has_common_file,
            done=done,
            before_commit=verify_first if check else lambda folder: None,
        )
    return found[0] if found else None


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("writing", total=total)
        yield lambda size: progress.advance(task, size)


def _parser(command: str) -> argparse.ArgumentParser:
    from megatron_scalevec.integration.arguments import MODEL_FLAGS, add_arguments

    unfold = command == "unfold"
    parser = SentenceParser(
        prog=f"scalevec {command}",
        description=(
            "Make a stock Megatron checkpoint the start of a run with scale vectors."
            if unfold
            else "Fold the scale vectors of a checkpoint into its weights, for Megatron without this package."
        ),
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a --save folder, or one iteration's folder")
    parser.add_argument("out", metavar="OUT", help="the folder to make; it must not exist")
    if unfold:
        flags = parser.add_argument_group("scale vectors", "a run's --scalevec-* flags, without that")
        for action in add_arguments(argparse.ArgumentParser(add_help=False))._actions:
            if action.dest.removeprefix("scalevec_") in MODEL_FLAGS:
                [name] = action.option_strings
                flags.add_argument(
                    name.replace("--scalevec-", "--"),
                    dest=action.dest,
                    type=action.type,
                    metavar=action.metavar,
                    help=action.help,
                )
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="the iteration; default: the latest")
    parser.add_argument(
        "--no-optimizer", dest="optimizer", action="store_false", help="leave the optimizer's state behind"
    )
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not compare the result with the source"
    )
    return parser
