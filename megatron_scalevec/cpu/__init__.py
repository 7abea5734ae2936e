"""CPU mode: run Megatron-LM without a GPU.

For trying a strategy, checking a launch script and debugging a layout on any machine; slow, and not
for training. Nothing happens on import. :func:`install` changes torch and, where it can be
imported, Megatron; :func:`uninstall` puts everything back.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from megatron_scalevec.cpu.arguments import choose_arguments
from megatron_scalevec.errors import ScaleVecError

if TYPE_CHECKING:
    from megatron_scalevec.patching import PatchSet

__all__ = ["change", "choose_arguments", "cuda_available", "install", "installed", "uninstall"]

_GPU_ONLY_PACKAGES = ("transformer_engine", "apex")

_undo: ExitStack | None = None
_real_is_available: Callable[[], bool] | None = None


def cuda_available() -> bool:
    """Whether this machine has a usable CUDA device, whatever CPU mode makes torch say."""
    if _real_is_available is not None:
        return _real_is_available()
    import torch

    return torch.cuda.is_available()


def installed() -> bool:
    """Whether CPU mode is on in this process."""
    return _undo is not None


def install() -> None:
    """Turn CPU mode on. A second call changes nothing.

    Megatron may be absent; then only torch is changed. Its modules are imported here, so call this
    before anything that must be in place when they are first imported.

    Raises:
        ScaleVecError: Megatron was imported before, together with GPU-only packages.
    """
    global _undo, _real_is_available
    if _undo is not None:
        return
    import torch

    from megatron_scalevec.cpu import collectives, devices, startup
    from megatron_scalevec.patching import PatchSet

    with_core = _found("megatron.core")
    if with_core:
        _refuse_gpu_optimizers()
    patches = PatchSet()
    real_is_available = torch.cuda.is_available
    with ExitStack() as stack:  # undoes what was done if a later step raises
        startup.run_compiled_eagerly(stack)
        stack.callback(patches.undo)
        devices.patch_torch(patches)
        collectives.patch_collectives(patches)
        if with_core:
            _install_for_megatron(patches, stack)
        _undo = stack.pop_all()
    _real_is_available = real_is_available
    if os.environ.get("RANK", "0") == "0":
        print(
            "[megatron_scalevec] CPU mode is on: everything runs on the CPU with gloo, for trying "
            "and debugging. It is slow; do not train with it.",
            file=sys.stderr,
            flush=True,
        )


def uninstall() -> None:
    """Turn CPU mode off and restore every attribute it changed. Harmless when it is off."""
    global _undo, _real_is_available
    if _undo is not None:
        undo, _undo = _undo, None
        _real_is_available = None
        undo.close()


def change(how: Callable[[PatchSet], None]) -> None:
    """Make a further change that :func:`uninstall` takes back.

    Raises:
        ScaleVecError: CPU mode is off.
    """
    from megatron_scalevec.patching import PatchSet

    if _undo is None:
        raise ScaleVecError(
            "what CPU mode puts in the place of kernels was asked for, and CPU mode is off; add "
            "--scalevec-cpu on, or call megatron_scalevec.cpu.install() first."
        )
    patches = PatchSet()
    _undo.callback(patches.undo)
    how(patches)


def _install_for_megatron(patches: PatchSet, stack: ExitStack) -> None:
    from megatron_scalevec.cpu import attention, moe, norms, offload, optimizers, recompute, startup

    startup.hide_packages(stack, *_GPU_ONLY_PACKAGES)
    startup.patch_core_startup(patches)
    recompute.patch_recompute(patches)
    norms.patch_norms(patches)
    attention.patch_attention(patches)
    moe.patch_moe(patches)
    optimizers.patch_distributed_optimizer(patches)
    offload.patch_offload(patches)
    if _found("megatron.training") and not _missing_dependency("megatron.training.initialize"):
        startup.patch_training_startup(patches)


def _refuse_gpu_optimizers() -> None:
    optimizer = sys.modules.get("megatron.core.optimizer")
    if optimizer is not None and not optimizer.USING_PYTORCH_OPTIMIZER:
        raise ScaleVecError(
            "Megatron was imported before CPU mode was turned on and has taken its optimizer from "
            "TransformerEngine or apex, which run on GPUs only; call megatron_scalevec.cpu."
            "install() before the first import of megatron."
        )


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is not there
        return False


def _missing_dependency(name: str) -> bool:
    """Whether ``name`` cannot be imported because a package outside Megatron is not installed.

    megatron.training comes with recent wheels even where its own requirements do not. Core is then
    usable, and a script that needs the rest will say what is missing.
    """
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "megatron":
            raise
        return True
    return False
