"""Processes killed while they write checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["kill_saves", "kill_tools"]


def _killed(work: Callable[[Callable[[], None]], None], after: float, *, tells: bool = False) -> bool:
    """Run in a child and kill it some time ``after`` it began, or called its argument where it ``tells``.

    Returns whether it had ended by then.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()  # Megatron writes in children of its own, which go down with the node
            work(lambda: os.write(writing, b"."))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    if tells:
        os.read(reading, 1)  # returns when the child has ended, too
    os.close(reading)
    time.sleep(after)
    for kill, number in ((os.killpg, signal.SIGKILL), (os.kill, signal.SIGKILL)):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


def kill_tools(folder: str, times: int) -> dict[str, Any]:
    """``unfold`` and ``fold`` killed at random moments of their run.

    Returns:
        By command: how often it was killed before it had ended, and what was wrong afterwards.
    """
    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.checkpoint.commands import fold_checkpoint, unfold_checkpoint
    from megatron_scalevec.checkpoint.store import CheckpointReader
    from ranks.jobs.storing import _build, save
    from ranks.models import initialize_parallel

    initialize_parallel()
    root = Path(folder)
    for name, config in (("stock", None), ("scaled", {"strategy": "dp"})):
        model, strategy = _build("llama", config, "float32", None)
        save(model, str(root / name), strategy)

    def unfold(out: Path) -> None:
        unfold_checkpoint(root / "stock", out, ScaleVecConfig(strategy="dp"), check=False)

    def fold(out: Path) -> None:
        fold_checkpoint(root / "scaled", out, check=False)

    result = {}
    draw = random.Random(5)
    for work, source in ((unfold, root / "stock"), (fold, root / "scaled")):
        started = time.monotonic()
        work(root / f"whole-{work.__name__}")
        duration = time.monotonic() - started
        whole = CheckpointReader(root / f"whole-{work.__name__}").tensors.keys()
        before, wrong, killed = _digest(source), [], 0
        for number in range(times):
            out = root / f"{work.__name__}-{number}"
            ended = _killed(lambda _, work=work, out=out: work(out), draw.uniform(0, 1.2 * duration))
            killed += not ended
            if out.exists() and CheckpointReader(out).tensors.keys() != whole:
                wrong.append(f"{out.name} is there and not whole")
            if ended and not out.exists():
                wrong.append(f"{out.name} is missing after a whole run")
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        wrong += [name for name in left if not name.endswith(".incomplete")]
        if _digest(source) != before:
            wrong.append("the source was changed")
        result[work.__name__] = {"killed": killed, "wrong": wrong}
    return result


def kill_saves(folder: str, times: int, hooked: bool = True) -> dict[str, Any]:
    """A run that saves without a pause, over and over into the same three folders, killed at random moments.

    Every tensor of a checkpoint holds the number of the save, so that a mixture of two is recognized.

    Returns:
        How often the tracked checkpoint was whole and how often refused, how often there was another whole
        one then, and how many passed for whole and were mixtures.
    """
    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.checkpoint.layout import find_checkpoint, whole_iterations
    from megatron_scalevec.checkpoint.store import CheckpointReader

    found = {"whole": 0, "refused": 0, "other whole": 0, "mixtures": 0}
    draw = random.Random(6)
    first = 0
    for number in range(times):
        root = Path(folder) / str(number % 2)  # the next run goes on in the folder of an earlier one
        root.mkdir(exist_ok=True)
        _killed(
            lambda ready, root=root, first=first: _save_for_ever(root, first, hooked, ready),
            draw.uniform(0, 0.3),
            tells=True,
        )
        first += 1000
        whole = whole_iterations(root)
        for iteration in whole:
            reader = CheckpointReader(root, iteration)
            values = {float(v) for key in reader.tensors for v in reader.read(key).flatten()[:1]}
            found["mixtures"] += len(values) > 1
        with contextlib.suppress(FileNotFoundError):
            try:
                find_checkpoint(root)
                found["whole"] += 1
            except ScaleVecError:
                found["refused"] += 1
                found["other whole"] += bool(whole)
    return found


def _save_for_ever(root: Path, first: int, hooked: bool, ready: Callable[[], None]) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_scalevec.integration import checkpoint_hooks

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root}/store-{os.getpid()}", rank=0, world_size=1
    )
    save = dist_checkpointing.save
    if hooked:
        session = SimpleNamespace(config=SimpleNamespace(active=True))
        save = checkpoint_hooks.save(session, save)
    for number in range(first, first + 1000):
        iteration = 1 + number % 3
        target = root / f"iter_{iteration:07d}"
        target.mkdir(exist_ok=True)
        tensors = {
            f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", torch.full((64, 1024), float(number)))
            for i in range(8)
        }
        save({**tensors, "iteration": iteration}, str(target))
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        if number == first + (0 if first > 1000 else 2):  # at first, one save into each folder
            ready()
