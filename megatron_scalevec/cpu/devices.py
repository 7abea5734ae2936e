"""Make torch serve "cuda" from the CPU.

Megatron names its device in three ways: ``device="cuda"`` (or ``torch.cuda.current_device()``)
given to a tensor factory, a method such as ``.cuda()``, and functions under :mod:`torch.cuda`. Each
is answered here, as attributes of torch that are put back by the :class:`PatchSet`. The device
index stays an integer, as on a GPU, so that code computing with it keeps working.
"""

from __future__ import annotations

import collections
import functools
import os
import platform
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.cpu import streams
from megatron_scalevec.patching import PatchSet

__all__ = ["patch_torch", "set_generator_state", "to_cpu_device"]

_CPU = torch.device("cpu")

# Functions of torch, and methods of a tensor, that take ``device=`` by keyword. A name that a torch
# release does not have is skipped: the list is a superset over releases.
_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted "
    "empty_strided eye full full_like hamming_window hann_window kaiser_window linspace logspace "
    "normal ones ones_like rand rand_like randint randint_like randn randn_like randperm range "
    "scalar_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csr_tensor "
    "tensor tril_indices triu_indices zeros zeros_like"
).split()
_NEW_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()

_TENSOR_TYPES = "Bool Byte Char Double Float Half BFloat16 Int Long Short".split()

# Statistics of a GPU that have one obvious answer where there is none.
_ZEROES = (
    "clock_rate device_memory_used max_memory_allocated max_memory_reserved memory_allocated "
    "memory_reserved memory_usage power_draw temperature utilization"
).split()
_NO_OPERATIONS = (
    "empty_cache init ipc_collect reset_accumulated_memory_stats reset_max_memory_allocated "
    "reset_peak_memory_stats synchronize"
).split()

# What this "device" says it can do. 8.0 is the oldest compute capability on which Megatron takes
# bf16 for granted; nothing newer is claimed, so that no code path asks for FP8.
_CAPABILITY = (8, 0)


def to_cpu_device(device: Any) -> Any:
    """``device`` as torch may be given it in CPU mode.

    "cuda", "cuda:1", ``torch.device("cuda")`` and a device index become the CPU; everything else
    (``None``, "meta", "cpu") is returned as it is.
    """
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str):
        return _CPU if device.split(":", 1)[0] == "cuda" else device
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def patch_torch(patches: PatchSet) -> None:
    """Route everything that names a CUDA device to the CPU."""
    _patch_factories(patches)
    _patch_tensor_methods(patches)
    _patch_device_selection(patches)
    _patch_streams(patches)
    _patch_random_state(patches)
    _patch_statistics(patches)


# ------------------------------------------------------------------------------- tensors


def _patch_factories(patches: PatchSet) -> None:
    # `with torch.device(...)` decides which calls it applies to by comparing functions with a set
    # that is collected once, on first use. Collect it before the functions are wrapped: the
    # wrappers call the originals, which the context then recognises.
    from torch.utils import _device

    _device._device_constructors()

    for name in _FACTORIES:
        if hasattr(torch, name):
            patches.wrap(torch, name, _with_cpu_device)
    for name in _NEW_METHODS:
        patches.wrap(torch.Tensor, name, _with_cpu_device)

    def make_context_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, device: Any) -> None:
            original(self, to_cpu_device(device))

        return init

    patches.wrap(_device.DeviceContext, "__init__", make_context_init)


def _with_cpu_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_cpu_device(kwargs["device"])
        # Page-locked memory needs a CUDA driver, and buys nothing without a GPU to copy to.
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _patch_tensor_methods(patches: PatchSet) -> None:
    def make_to(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args:
                args = (to_cpu_device(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = to_cpu_device(kwargs["device"])
            return original(self, *args, **kwargs)

        return to

    def make_type(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            if dtype is not None:
                if isinstance(dtype, str):
                    dtype = dtype.replace("torch.cuda.", "torch.")
                return original(self, dtype, *args, **kwargs)
            # Megatron's optimizers sort parameters by comparing this name with
            # "torch.cuda.FloatTensor" and its like, and refuse any other.
            name = original(self)
            kind = name.removeprefix("torch.").removesuffix("Tensor")
            return f"torch.cuda.{kind}Tensor" if kind in _TENSOR_TYPES else name

        return type_

    def same_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    patches.wrap(torch.Tensor, "to", make_to)
    patches.wrap(torch.Tensor, "type", make_type)
    patches.set(torch.Tensor, "cuda", same_tensor)
    patches.set(torch.Tensor, "pin_memory", same_tensor)
    patches.set(torch.Tensor, "record_stream", _nothing)
    for kind in _TENSOR_TYPES:
        name = f"{kind}Tensor"
        patches.set(torch.cuda, name, getattr(torch, name), create=True)


# ------------------------------------------------------------------------------- torch.cuda


def _patch_device_selection(patches: PatchSet) -> None:
    selected = [0]

    def current_device() -> int:
        return selected[0]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            selected[0] = index

    def device_count() -> int:
        # As many as there are ranks on this machine: `rank % device_count()` is the local rank.
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    patches.set(torch.cuda, "is_available", lambda: False)
    patches.set(torch.cuda, "current_device", current_device)
    patches.set(torch.cuda, "set_device", set_device)
    patches.set(torch.cuda, "device_count", device_count)
    patches.set(torch.cuda, "device", _DeviceGuard)
    patches.set(torch.cuda, "device_of", _DeviceGuard)
    patches.set(torch.cuda, "get_device_name", lambda device=None: _processor_name())
    patches.set(torch.cuda, "get_device_capability", lambda device=None: _CAPABILITY)
    patches.set(torch.cuda, "get_device_properties", lambda device=None: _device_properties())
    patches.set(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)


class _DeviceGuard:
    """Stands in for ``torch.cuda.device(...)``: there is one device, so nothing is switched."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: Any) -> bool:
        return False


def _patch_streams(patches: PatchSet) -> None:
    patches.set(torch.cuda, "Event", streams.CPUEvent)
    patches.set(torch.cuda, "Stream", streams.CPUStream)
    patches.set(torch.cuda, "ExternalStream", streams.CPUStream)
    patches.set(torch.cuda, "StreamContext", streams.CPUStreamContext)
    patches.set(torch.cuda, "stream", streams.CPUStreamContext)
    patches.set(torch.cuda, "current_stream", streams.current_stream)
    patches.set(torch.cuda, "default_stream", streams.default_stream)
    patches.set(torch.cuda, "set_stream", streams.set_stream)
    patches.set(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("range_push", "range_pop", "mark"):
        patches.set(torch.cuda.nvtx, name, _nothing)


def _patch_random_state(patches: PatchSet) -> None:
    # CPU and "GPU" share torch's default generator. `torch.manual_seed` must not be called from
    # here: it calls `torch.cuda.manual_seed_all` itself.
    generator = torch.default_generator

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        set_generator_state(new_state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def get_rng_state_all() -> list[torch.Tensor]:
        return [generator.get_state()]

    def set_rng_state_all(new_states: Any) -> None:
        for state in new_states:
            set_generator_state(state)

    replacements = {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": get_rng_state_all,
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "initial_seed": lambda: generator.initial_seed(),
    }
    # torch.cuda re-exports torch.cuda.random's functions; Megatron uses both names.
    for owner in (torch.cuda, torch.cuda.random):
        for name, replacement in replacements.items():
            patches.set(owner, name, replacement)
    patches.set(torch.cuda, "default_generators", (generator,))


def set_generator_state(new_state: torch.Tensor) -> None:
    """Set the default generator to ``new_state``, or say why that cannot be done.

    The state of a GPU's generator is 16 bytes, that of the CPU's is 5056. A checkpoint written on
    GPUs is worth looking at on a CPU, and only its random state is lost.
    """
    generator = torch.default_generator
    if new_state.numel() != generator.get_state().numel():
        warnings.warn(
            "A random state saved on a GPU cannot be restored in CPU mode: dropout and "
            "initialization continue from the CPU's own state.",
            stacklevel=2,
        )
        return
    generator.set_state(new_state)


def _patch_statistics(patches: PatchSet) -> None:
    for name in _ZEROES:
        if hasattr(torch.cuda, name):
            patches.set(torch.cuda, name, lambda *args, **kwargs: 0)
    for name in _NO_OPERATIONS:
        if hasattr(torch.cuda, name):
            patches.set(torch.cuda, name, _nothing)
    # Asked for by key, as in memory_stats()["num_alloc_retries"].
    patches.set(torch.cuda, "memory_stats", lambda device=None: collections.defaultdict(int))
    patches.set(torch.cuda, "mem_get_info", lambda device=None: (_memory_bytes(),) * 2)
    patches.set(torch.cuda, "memory_snapshot", lambda *args, **kwargs: [])


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any call."""


def _device_properties() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=_processor_name(),
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_memory_bytes(),
        multi_processor_count=1,
        warp_size=32,
    )


def _processor_name() -> str:
    return platform.processor() or platform.machine() or "cpu"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX, or the names are unknown there
        return 0
