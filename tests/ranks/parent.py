"""The process that imports once and forks ranks: ``python -m ranks.parent FD MODULE``."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ranks.lifetime import adopt_orphans, die_with_parent, end_children

if __name__ == "__mp_main__":
    # A process that a rank has spawned imports this file under that name.
    die_with_parent()

# What every run imports sooner or later, some of it seconds' worth (tokenizer libraries).
_USED_BY_RUNS = (
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.training.yaml_arguments",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.core.tokenizers.text.models.gpt_tokenizer",
    "megatron.core.tokenizers.text.libraries.huggingface_tokenizer",
    "megatron_scalevec.integration.pretrain_gpt",
    "megatron_scalevec.audit",
    "rich.table",
)

Job = Callable[..., Any]


def main() -> None:
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    adopt_orphans()
    import torch

    # Threads do not survive a fork.
    torch.set_num_threads(1)
    jobs = importlib.import_module(sys.argv[2])
    getattr(jobs, "prepare", lambda: None)()
    from megatron_scalevec import cpu

    cpu.install()
    if importlib.util.find_spec("megatron.training") is not None:
        for name in _USED_BY_RUNS:
            importlib.import_module(name)
    _fork_writers()
    connection = multiprocessing.connection.Connection(int(sys.argv[1]))
    while True:
        try:
            job, world_size, timeout, arguments = connection.recv()
        except EOFError:
            return
        connection.send(run(getattr(jobs, job), world_size, timeout, arguments))


def _fork_writers() -> None:
    """Have Megatron's queue of written files served by a forked process, as its own loop does at times.

    A spawned one imports everything anew, which takes seconds in every rank that saves.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async.mp
    filesystem_async.mp = SimpleNamespace(
        **{**vars(original), "get_context": lambda method: original.get_context("fork")}
    )


def run(job: Job, world_size: int, timeout: float, arguments: dict[str, Any]):
    """Fork, wait, collect. Returns (failures, results by rank)."""
    with _reserved_port() as port, tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        pids = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _rank(folder, job, rank, world_size, port, arguments)  # never returns
            pids[pid] = rank
        failures = _wait(pids, folder, job, world_size, timeout)
        end_children()  # whatever the ranks have started and not waited for
        results = []
        if not failures:
            for rank in range(world_size):
                with open(_file(folder, rank, "result"), "rb") as file:
                    results.append(pickle.load(file))
        return failures, results


def _wait(pids: dict[int, int], folder: str, job: Job, world_size: int, timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    failed: list[int] = []
    left = dict(pids)
    late = False
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            rank = left.pop(pid)
            if status != 0:
                failed.append(rank)
                # Its peers wait for it; give them a moment to say something themselves.
                deadline = min(deadline, time.monotonic() + 2)
        elif time.monotonic() > deadline:
            late = not failed
            for pid in left:
                os.kill(pid, signal.SIGABRT if late else signal.SIGKILL)
            for pid in left:
                os.waitpid(pid, 0)
            if late:
                failed.extend(left.values())
            left.clear()
        else:
            time.sleep(0.01)
    what = f"{job.__name__} on {world_size} ranks" + (f" took more than {timeout:.0f} s" if late else "")
    return [f"{what}, rank {rank}:\n{_report(folder, rank)}" for rank in failed]


def _report(folder: str, rank: int) -> str:
    text = ""
    for kind in ("output", "error"):
        try:
            with open(_file(folder, rank, kind), encoding="utf-8", errors="replace") as file:
                text += file.read()[-6000:]
        except FileNotFoundError:
            pass
    return text


def _rank(folder: str, job: Job, rank: int, world_size: int, port: int, arguments) -> None:
    code = 1
    try:
        output = open(_file(folder, rank, "output"), "w", buffering=1)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.enable(file=output)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )
        result = job(**arguments)
        with open(_file(folder, rank, "result"), "wb") as file:
            pickle.dump(result, file)
        code = 0
    except BaseException:
        with open(_file(folder, rank, "error"), "w") as file:
            traceback.print_exc(file=file)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _file(folder: str, rank: int, kind: str) -> str:
    return os.path.join(folder, f"{rank}.{kind}")


@contextlib.contextmanager
def _reserved_port():
    """A port for the ranks' store that nobody else is given meanwhile, other pools least of all.

    On Linux a socket that asks for reuse may bind where another one is bound, allows it, and does not listen;
    the kernel hands out only ports at which nothing is bound.
    """
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield holder.getsockname()[1]


if __name__ == "__main__":
    main()
