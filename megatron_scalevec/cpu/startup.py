"""Steps of Megatron's start that assume a GPU, a compiler or a checkout."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["hide_packages", "patch_core_startup", "patch_training_startup", "run_compiled_eagerly"]


def hide_packages(stack: ExitStack, *packages: str) -> None:
    """Make ``import package`` fail as if it were not installed, until ``stack`` is closed.

    Megatron takes its optimizers, norms and multi-tensor kernels from TransformerEngine or apex
    wherever they can be imported; their kernels run on GPUs only. ``None`` in ``sys.modules`` is
    Python's own way to say that a module must not be found.
    """
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if any(name == package or name.startswith(f"{package}.") for package in packages)
    }

    def restore() -> None:
        for package in packages:
            sys.modules.pop(package, None)
        sys.modules.update(hidden)

    stack.callback(restore)
    for name in hidden:
        del sys.modules[name]
    for package in packages:
        sys.modules[package] = None  # type: ignore[assignment]


def run_compiled_eagerly(stack: ExitStack) -> None:
    """Ignore ``torch.compile``, until ``stack`` is closed.

    Megatron compiles its small fused functions. On a CPU that takes a C++ compiler and seconds per
    function to save microseconds; the functions mean the same uncompiled. This imports the
    compiler's own modules, which must happen before torch is changed: they sort torch's functions
    by identity.
    """
    if hasattr(torch.compiler, "set_stance"):  # torch 2.6
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def patch_core_startup(patches: PatchSet) -> None:
    """Skip compiling the dataset helpers where they are there already."""
    from megatron.core.datasets import utils

    if _importable("megatron.core.datasets.helpers_cpp"):
        # A wheel ships the helpers compiled, without the Makefile that upstream runs; a failing
        # make ends the process.
        patches.set(utils, "compile_helpers", lambda: None)


def patch_training_startup(patches: PatchSet) -> None:
    """Let Megatron initialize without CUDA, and spare it warming up fused kernels."""
    initialize = importlib.import_module("megatron.training.initialize")
    _wrap_every_binding(patches, initialize, "initialize_megatron", _allow_no_cuda)
    # The warm-up exists to compile, and would draw from the random generator that CPU and "GPU"
    # share here.
    _wrap_every_binding(patches, initialize, "set_jit_fusion_options", lambda original: _skip)


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        # Bound by name, because its place among the parameters differs between versions.
        bound = signature.bind(*args, **kwargs)
        bound.arguments["allow_no_cuda"] = True
        return original(*bound.args, **bound.kwargs)

    return initialize_megatron


def _skip(*args: Any, **kwargs: Any) -> None:
    """Do nothing, for any arguments."""


def _wrap_every_binding(patches: PatchSet, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` and every copy of it that a loaded Megatron module has imported."""
    original = getattr(owner, name)
    replacement = make(original)
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("megatron.") or module is None:
            continue
        if vars(module).get(name) is original:
            patches.set(module, name, replacement)


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
