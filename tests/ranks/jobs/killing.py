"""Processes killed while they write checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["kill_saves", "kill_tools"]


def _killed(work: Callable[[Callable[[], None]], None], after: float | None, *, tells: bool = False) -> bool:
    """Run in a child and kill it some time ``after`` it began, or called its argument where it ``tells``.

    Without a time it is left to end, or to kill itself. Returns whether it had ended by then.
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
    if after is None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    else:
        time.sleep(after)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise ChildProcessError(f"it was not killed, and ended with {code}")
    return code == 0


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


def kill_tools(folder: str, times: int) -> dict[str, Any]:
    """``unfold`` and ``fold`` killed before each of their steps, and then at random moments of their run.

    A step is whatever changes a file, as in :func:`kill_saves`.

    Args:
        folder: For the checkpoints.
        times: How often at random moments.

    Returns:
        By command: the ``steps`` it takes, and what was ``wrong`` after it had been killed.
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

    def killed(work: Callable[[Path], None], out: Path, *, step: int = 0, after: float | None = None) -> bool:
        def run(_: Callable[[], None]) -> None:
            if step:
                _kill_before_step(step, f"{root}/")
            work(out)

        return not _killed(run, after)

    result = {}
    draw, numbers = random.Random(5), itertools.count()
    for work, source in ((unfold, root / "stock"), (fold, root / "scaled")):
        work(root / f"whole-{work.__name__}")
        whole = CheckpointReader(root / f"whole-{work.__name__}").tensors.keys()
        before, wrong = _digest(source), []
        steps, duration, random_kills = 0, 0.0, 0
        while random_kills < times:
            out = root / f"{work.__name__}-{next(numbers)}"
            if not duration:
                started = time.monotonic()
                ended = not killed(work, out, step=steps + 1)
                if ended:  # it has no such step
                    duration = time.monotonic() - started
                else:
                    steps += 1
            else:
                ended = not killed(work, out, after=draw.uniform(0, duration))
                random_kills += 1
            if out.exists() and CheckpointReader(out).tensors.keys() != whole:
                wrong.append(f"{out.name} is there and not whole")
            if ended and not out.exists():
                wrong.append(f"{out.name} is missing after a whole run")
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        wrong += [name for name in left if not name.endswith(".incomplete")]
        if _digest(source) != before:
            wrong.append("the source was changed")
        result[work.__name__] = {"steps": steps, "wrong": wrong}
    return result


def kill_saves(folder: str, times: int, hooked: bool = True, folding: bool = False) -> dict[str, Any]:
    """A save into a folder that holds a checkpoint of the same iteration, killed before each of its steps.

    A step is whatever changes a file: an opening for writing, a renaming, a removal. After that it is killed
    at random moments as well. Another iteration's checkpoint lies beside it. Every tensor of a checkpoint
    holds the number of the save, so that a mixture of two is recognized.

    Args:
        folder: For the checkpoints.
        times: How often at random moments.
        hooked: With the plugin's hook on saving.
        folding: Save a model and its distributed optimizer that folds its weights; plain tensors otherwise.

    Returns:
        ``steps`` that the save takes; how often the checkpoint was ``whole`` and how often ``refused``, how
        often the other one was ``kept`` then, how many ``mixtures`` passed for whole, and ``keys`` of the
        tensors.
    """
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from torch.distributed.checkpoint import FileSystemReader

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.checkpoint.layout import find_checkpoint, whole_iterations
    from megatron_scalevec.checkpoint.store import CheckpointReader

    start = Path(folder) / "start"

    def overwrite(root: Path, last_step: int | None, ready: Callable[[], None]) -> None:
        if last_step is not None:
            _kill_before_step(last_step, f"{root}/iter_")
        with _two_ranks(root):
            state = torch.load(_file_of_state(start.parent), weights_only=False)
            ready()
            _save(root, 1, state, 3.0, hooked)

    def begin(ready: Callable[[], None]) -> None:
        with _two_ranks(start):
            state = _state_of_folding() if folding else _tensors()
            apply_factories(state)
            # For those to come, which spares them the model.
            torch.save(state, _file_of_state(start.parent))
            _save(start, 2, state, 2.0, hooked)
            _save(start, 1, state, 1.0, hooked)

    start.mkdir()
    assert _killed(begin, None)
    found: dict[str, Any] = {"steps": 0, "whole": 0, "refused": 0, "kept": 0, "mixtures": 0}
    found["keys"] = list(FileSystemReader(start / "iter_0000002").read_metadata().state_dict_metadata)
    draw = random.Random(6)
    duration, random_kills = 0.0, 0
    while random_kills < times:
        root = Path(folder) / f"{found['steps']}-{random_kills}"
        shutil.copytree(start, root)
        if not duration:
            started = time.monotonic()
            step = found["steps"] + 1
            ended = _killed(lambda ready, root=root, step=step: overwrite(root, step, ready), None)
            if ended:  # it has no such step
                duration = time.monotonic() - started
            else:
                found["steps"] = step
        else:
            after = draw.uniform(0, duration)
            _killed(lambda ready, root=root: overwrite(root, None, ready), after, tells=True)
            random_kills += 1
        for iteration in whole_iterations(root):
            reader = CheckpointReader(root, iteration)
            values = {float(v) for key in reader.tensors for v in reader.read(key).unique()}
            found["mixtures"] += len(values) > 1
        try:
            find_checkpoint(root)
            found["whole"] += 1
        except ScaleVecError:
            found["refused"] += 1
            found["kept"] += 2 in whole_iterations(root)
        shutil.rmtree(root)
    return found


@contextlib.contextmanager
def _two_ranks(root: Path):
    """This process is the first rank and a child of it the second; the first waits for it in the end."""
    peer = os.fork()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{root}/store-{os.getpid() if peer == 0 else peer}",
        rank=int(peer == 0),
        world_size=2,
    )
    yield
    if peer and os.waitpid(peer, 0)[1] != 0:
        raise ChildProcessError("the second rank failed")


def _file_of_state(folder: Path) -> Path:
    """Of what this rank saves."""
    return folder / f"state-{torch.distributed.get_rank()}"


def _tensors() -> dict[str, Any]:
    """Eight, half of each on either rank."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank = torch.distributed.get_rank()
    return {
        f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", torch.empty(64, 1024), (0, rank, 2))
        for i in range(8)
    }


def _state_of_folding() -> dict[str, Any]:
    """What a run that folds inside the optimizer saves, after a step."""
    from megatron.core import parallel_state, tensor_parallel

    from ranks.jobs import executing, loading

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    case = {"config": {"strategy": "unified"}, "precision": "bf16", "model": {"num_layers": 1}}
    gpt, wrapped, stepper = loading._ready("optimizer", {}, **case)
    executing._step(wrapped, stepper, 0)
    return loading._state(gpt, stepper, "fully_reshardable", loading=False)


def _save(root: Path, iteration: int, state: dict[str, Any], value: float, hooked: bool) -> None:
    """As Megatron's loop saves: every rank writes a file of its own. All tensors get ``value``."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from megatron_scalevec.integration import checkpoint_hooks

    save = dist_checkpointing.save
    if hooked:
        session = SimpleNamespace(config=SimpleNamespace(active=True))
        save = checkpoint_hooks.save(session, save)
    target = root / f"iter_{iteration:07d}"
    target.mkdir(exist_ok=True)
    with torch.no_grad():
        for entry in nested_values(state):
            if isinstance(getattr(entry, "data", None), torch.Tensor):
                entry.data.fill_(value)
    save({**state, "iteration": iteration}, str(target))
    if torch.distributed.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def _kill_before_step(number: int, beginning: str) -> None:
    """Kill this process's group before the given one of the steps to come that change a file.

    Of files whose path has that ``beginning``.

    Other threads and processes get the time to finish the step they are at, and none to begin another.
    """
    steps = multiprocessing.get_context("fork").Value("i", 0)

    def watch(event: str, arguments: tuple) -> None:
        changes = event in ("os.rename", "os.remove") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not changes or not str(arguments[0]).startswith(beginning):
            return
        with steps.get_lock():
            steps.value += 1
            mine = steps.value
        if mine == number:
            time.sleep(0.05)
            os.killpg(0, signal.SIGKILL)
        elif mine > number:
            time.sleep(60)

    sys.addaudithook(watch)
