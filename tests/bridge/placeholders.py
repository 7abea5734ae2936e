"""Modules that Megatron-Bridge imports and a machine without a GPU cannot have.

Only Bridge's own modules get to see TransformerEngine and nvidia-resiliency-ext: megatron-core must go on
finding neither, so that it takes its own way without them. Packages for pictures and sound are optional
everywhere.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

import torch

__all__ = ["install"]

_ONLY_FOR = {
    "megatron.bridge.peft.lora_layers": "transformer_engine",
    "megatron.bridge.training.pretrain": "nvidia_resiliency_ext",
    "megatron.bridge.training.inprocess_restart": "nvidia_resiliency_ext",
}
_OPTIONAL = {
    "av",
    "diffusers",
    "easydict",
    "ftfy",
    "imageio",
    "open_clip",
    "peft",
    "qwen_vl_utils",
    "timm",
    "torchvision",
}


class _Anything(type):
    """A class with every attribute, each of which is such a class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (torch.nn.Module,), {})


class _Placeholder(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (torch.nn.Module,), {})


def install() -> None:
    """Put the placeholders in place, for the rest of the process."""
    modules = {}
    for package, inner in (("transformer_engine", "pytorch"), ("nvidia_resiliency_ext", "inprocess")):
        modules[package] = _Placeholder(package)
        setattr(modules[package], inner, _Placeholder(f"{package}.{inner}"))
    original = builtins.__import__

    def import_(name, globals=None, locals=None, fromlist=(), level=0):
        importer = (globals or {}).get("__name__", "")
        package = name.split(".")[0]
        if level == 0 and _ONLY_FOR.get(importer) == package:
            inner = name.split(".")[1:]
            return getattr(modules[package], inner[0]) if fromlist and inner else modules[package]
        try:
            return original(name, globals, locals, fromlist, level)
        except ImportError:
            if level == 0 and package in _OPTIONAL and importer.startswith("megatron.bridge."):
                return _Placeholder(name)
            raise

    builtins.__import__ = import_
