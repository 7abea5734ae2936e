"""Hooks put in and taken out; arguments as Megatron parses them."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

__all__ = ["choose_for_cpu", "install_and_uninstall", "install_broken", "parse_arguments", "run_readme_code"]


def _hook_bindings() -> dict[str, Any]:
    """Every attribute that a hook replaces, as it is now."""
    from megatron_scalevec.integration import hooks
    from megatron_scalevec.patching import resolve

    found = {}
    from megatron_scalevec.versions import megatron_version

    for hook in hooks.HOOKS:
        owner, attribute = resolve(hook.target_in(megatron_version()))
        found[hook.target] = getattr(owner, attribute)
        for module, _ in hook.by_name:
            other = sys.modules.get(module)
            if other is not None and hasattr(other, attribute):
                found[f"{module}:{attribute}"] = getattr(other, attribute)
    return found


def install_and_uninstall() -> dict[str, Any]:
    """Install twice, uninstall once."""
    from megatron_scalevec.integration import hooks

    before = _hook_bindings()
    first = hooks.install(["--scalevec-strategy", "hg"])
    once = _hook_bindings()
    second = hooks.install([])
    twice = _hook_bindings()
    hooks.uninstall()
    return {
        "targets": [hook.target for hook in hooks.HOOKS],
        "second_is_first": first is second and once == twice,
        "changed": sum(once[name] is not before[name] for name in before),
        "restored": _hook_bindings() == before and not hooks.installed(),
    }


def install_broken(breakage: str, target: str) -> dict[str, Any]:
    """Install after something has been taken away, and look at what is left changed."""
    import dataclasses

    import megatron.core.optimizer
    import megatron.core.package_info
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import training

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.integration import hooks

    if breakage == "missing" and target == "GPTModel.__init__":
        hooks.HOOKS = tuple(
            dataclasses.replace(h, target=h.target.replace("GPTModel", "GPTModelOfTomorrow"))
            if h.name == "model"
            else h
            for h in hooks.HOOKS
        )
        target = "GPTModelOfTomorrow.__init__"
    elif breakage == "missing":
        delattr(megatron.core.optimizer, target)
    elif breakage == "version":
        hooks.HOOKS = tuple(
            dataclasses.replace(h, versions=">=0.16.1,<0.17") if target in h.target else h
            for h in hooks.HOOKS
        )
    elif breakage == "replaced":
        setattr(training, target, lambda config: {})
    elif breakage == "megatron":
        megatron.core.package_info.__version__ = target
    stock = GPTModel.__init__
    try:
        hooks.install(["--scalevec-strategy", "hg"])
    except ScaleVecError as error:
        message = str(error).replace("GPTModelOfTomorrow", "GPTModel")
        return {
            "error": message,
            "restored": GPTModel.__init__ is stock and len(hooks._patches) == 0,
        }
    return {"error": "", "restored": False}


def parse_arguments(argv: list[str]) -> dict[str, Any]:
    """What Megatron's parser makes of a command line with the hooks in place."""
    from megatron.training import arguments

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.integration import hooks

    sys.argv = ["x", *argv]
    try:
        hooks.install(argv)
        args = arguments.parse_args(ignore_unknown_args=True)
    except ScaleVecError as error:
        return {"error": str(error)}
    return {key: value for key, value in vars(args).items() if isinstance(value, (str, int, type(None)))}


def run_readme_code(code: str) -> str:
    """Execute the README's Python with a model, and return what it prints."""
    import io

    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {"gpt_model": build_gpt("llama")})
    return output.getvalue()


def choose_for_cpu(argv: list[str]) -> str:
    """What is printed while Megatron's arguments are validated in CPU mode."""
    import io

    from megatron.training import arguments

    from megatron_scalevec.integration import hooks

    sys.argv = ["x", *argv]
    hooks.install(argv, cpu=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        arguments.validate_args(arguments.parse_args())
    return output.getvalue()
