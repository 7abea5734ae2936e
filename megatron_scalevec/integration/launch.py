"""Run an unmodified Megatron training script with the hooks in place."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration import hooks
from megatron_scalevec.integration.arguments import parse_own
from megatron_scalevec.versions import require_megatron_training, require_supported_megatron

__all__ = ["launch", "prepare", "pretrain"]


def launch(script: str, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``python script arguments...`` would, with the flags understood.

    Raises:
        ScaleVecError: Bad flags, an unsupported Megatron, a script that does not exist, or a script that
            ended without building a model although a strategy was asked for.
    """
    if not os.path.isfile(script):
        raise ScaleVecError(
            f"no such script: {script}; give the path of a Megatron training script, for example "
            "pretrain_gpt.py of a Megatron-LM checkout, or use 'scalevec pretrain' for the built-in one."
        )
    path = os.path.abspath(script)
    # As the interpreter does for a script: its folder is where imports are looked up first. Before
    # anything is imported, because the script may bring its own Megatron.
    folder = os.path.dirname(path)
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path[0] = folder
    elif folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    _run(path, arguments, lambda: runpy.run_path(path, run_name="__main__"))


def pretrain(arguments: Sequence[str]) -> None:
    """Pre-train a GPT with Megatron's loop from the wheel alone; see :mod:`.pretrain_gpt`."""

    def run() -> None:
        from megatron_scalevec.integration.pretrain_gpt import main

        main()

    _run("scalevec-pretrain", arguments, run)


def prepare(arguments: Sequence[str], *, cpu: str | None = None) -> hooks.Session:
    """Everything before the script's own first line: checks, CPU mode, hooks.

    Args:
        arguments: The command line.
        cpu: ``--scalevec-cpu`` where the command line does not say; by default ``auto``.

    Raises:
        ScaleVecError: Bad flags, or an unsupported Megatron.
    """
    own = parse_own(arguments)
    hooks.claim()
    version = require_supported_megatron()
    require_megatron_training(version)
    _single_process_defaults()
    return hooks.install(list(arguments), cpu=_start_cpu_mode(own.scalevec_cpu or cpu or "auto"))


def _run(name: str, arguments: Sequence[str], run: Callable[[], None]) -> None:
    session = prepare(arguments)
    sys.argv = [name, *arguments]
    # Scripts call into Megatron in the middle of their own start-up; a ScaleVecError from a hook passes
    # through them to the caller, which prints it.
    try:
        run()
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            hooks.require_applied(session, name)
        raise
    hooks.require_applied(session, name)


def _start_cpu_mode(wanted: str) -> bool:
    from megatron_scalevec import cpu

    if wanted == "off" or (wanted == "auto" and cpu.cuda_available()):
        return False
    cpu.install()
    return True


def _single_process_defaults() -> None:
    """Without torchrun, be a group of one. Under torchrun all of these are set already."""
    if "WORLD_SIZE" in os.environ:
        return
    defaults = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        # The store takes a free port; one that was looked up before may be somebody else's by then.
        "MASTER_PORT": "0",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
