"""Whole runs of a training script, sound and sabotaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_scalevec.vectors import VectorInfo, vector_info
from ranks.initial import fill_by_name, name_of_expert
from ranks.jobs.sabotage import SABOTAGE, then

__all__ = ["launch_only", "own_loop", "train", "train_by_door"]


TESTS = Path(__file__).resolve().parents[2]


def train(
    argv: list[str],
    plugin: bool = True,
    by_name: bool = True,
    sabotage: str | None = None,
    script: str | None = None,
) -> dict[str, Any]:
    """Run a training script and record what it did, in full precision.

    Args:
        argv: The command line.
        plugin: Go through the launcher; CPU mode is on with and without.
        by_name: Replace initial values by ones that do not depend on the layout.
        sabotage: Name of a function in :data:`SABOTAGE` that breaks something on purpose.
        script: A file in ``tests/scripts``; the built-in GPT entry by default.

    Returns:
        ``losses`` (empty on ranks without the last pipeline stage), ``grad_norms``, ``vectors``: final
        values of all 1-D parameters by name over the whole pipeline, ``moments``: checksums of this rank's
        optimizer states, in the order of the groups, ``weight_decay``: the values of the groups before each
        step, ``evaluations``: losses of the validations, ``audit`` as a dict or None.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from megatron_scalevec import cpu
    from megatron_scalevec.execution.folds import fold_live_weights
    from megatron_scalevec.integration import hooks, launch, pretrain_gpt
    from megatron_scalevec.patching import PatchSet

    patches = PatchSet()
    if sabotage:
        SABOTAGE[sabotage](patches)
    if not plugin:
        # Only what the CPU needs: the run that a plugin-less user would have.
        from megatron.training import arguments, initialize

        def choose_then(original):
            def validate(args, defaults=None):
                cpu.choose_arguments(args)
                return original(args, defaults or {})

            return validate

        patches.wrap(arguments, "validate_args", choose_then)
        if hasattr(initialize, "validate_args"):  # up to 0.17
            patches.set(initialize, "validate_args", arguments.validate_args)

    record: dict[str, Any] = {"losses": [], "grad_norms": [], "vectors": {}, "audit": None, "start": {}}
    record["weight_decay"], record["evaluations"] = [], []
    chunks: list[torch.nn.Module] = []
    optimizers: list[Any] = []

    def start_by_name(original):
        def setup_model_and_optimizer(*args, **kwargs):
            model, optimizer, scheduler = original(*args, **kwargs)
            chunks.extend(unwrap_model(model))
            optimizers.append(optimizer)
            record["start"] = _start_of(chunks)
            if by_name:
                for chunk in chunks:
                    fill_by_name(
                        chunk,
                        parallel_state.get_tensor_model_parallel_rank(),
                        parallel_state.get_tensor_model_parallel_world_size(),
                    )
                    fold_live_weights(chunk)
                optimizer.reload_model_params()
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def recorded(original):
        def train_step(*args, **kwargs):
            groups = args[3].param_groups
            record["weight_decay"].append(sorted({group["weight_decay"] for group in groups}))
            result = original(*args, **kwargs)
            if "lm loss" in result[0]:
                record["losses"].append(float(result[0]["lm loss"]))
            skipped = result[5] is None
            record["grad_norms"].append(float("nan") if skipped else float(result[5]))
            return result

        return train_step

    def evaluated(original):
        def evaluate(*args, **kwargs):
            result = original(*args, **kwargs)
            if result[0] and "lm loss" in result[0]:
                record["evaluations"].append(float(result[0]["lm loss"]))
            return result

        return evaluate

    def record_run():
        patches.wrap(training, "setup_model_and_optimizer", start_by_name)
        patches.wrap(training, "train_step", recorded)
        patches.wrap(training, "evaluate", evaluated)

    path = str(TESTS / "scripts" / script) if script else None
    with _ended_by_megatron():
        if not plugin:
            record_run()
            sys.argv = ["pretrain", *argv]
            if path:
                sys.path.insert(0, str(Path(path).parent))  # as when Python runs the script
            runpy.run_path(path, run_name="__main__") if path else pretrain_gpt.main()
        else:
            # On top of the plugin's hooks, so that scale vectors get their start values as well.
            patches.wrap(hooks, "install", lambda original: then(original, record_run))
            launch.launch(path, argv) if path else launch.pretrain(argv)

    for chunk in chunks:
        layers = {
            name: module.layer_number
            for name, module in chunk.named_modules()
            if hasattr(module, "layer_number") and name.split(".")[-1].isdigit()
        }
        offsets = {
            f"{name}.experts.": module.local_expert_indices[0]
            for name, module in chunk.named_modules()
            if hasattr(module, "local_expert_indices")
        }
        for name, param in chunk.named_parameters():
            if param.dim() == 1 and (
                vector_info(param) or not getattr(param, "tensor_model_parallel", False)
            ):
                for path, offset in offsets.items():
                    if name.startswith(path):
                        name = name_of_expert(name, offset)
                for path, number in layers.items():
                    if name.startswith(path + "."):
                        name = f"layer{number}{name[len(path) :]}"
                record["vectors"][name] = param.detach().float().numpy().copy()
    record["moments"] = [checksum for optimizer in optimizers for checksum in _moments_of(optimizer)]
    if hooks.installed() and hooks.session().audit is not None:
        record["audit"] = json.loads(hooks.session().audit.to_json())
    return record


@contextlib.contextmanager
def _ended_by_megatron():
    """Megatron exits by itself after some options, and argparse where it refuses one, with a code."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"the run ended with exit code {end.code}") from end


def _moments_of(optimizer: Any) -> list[str]:
    """Checksums of every tensor of an optimizer's state, step counts left out."""
    from megatron_scalevec.audit.groups import members_of

    found = []
    for member in members_of(optimizer) if optimizer is not None else ():
        inner = getattr(member, "optimizer", member)
        for group in inner.param_groups:
            for param in group["params"]:
                for key, value in sorted(inner.state.get(param, {}).items()):
                    if isinstance(value, torch.Tensor) and key != "step":
                        found.append(
                            f"{key} {hashlib.sha256(value.detach().float().numpy().tobytes()).hexdigest()}"
                        )
    return found


def _start_of(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """What a model is before training: classes, and parameters with their values and attributes."""
    plain = (str, int, float, bool, tuple, type(None), VectorInfo)
    found: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            found[f"{index} {name}"] = type(module).__qualname__
        for name, param in chunk.named_parameters():
            attributes = {key: repr(value) for key, value in vars(param).items() if isinstance(value, plain)}
            values = param.detach().float().numpy().tobytes()
            found[f"{index} {name} (parameter)"] = (
                tuple(param.shape),
                str(param.dtype),
                param.requires_grad,
                attributes,
                hashlib.sha256(values).hexdigest(),
            )
    return found


def train_by_door(door: str, argv: list[str], strategy: str) -> dict[str, Any]:
    """The same run, with its scale vectors from one of the doors.

    Args:
        door: ``flag``, ``flag+spec``, ``spec`` (through the launcher); ``plain spec`` (a script that knows
            nothing of this package), ``plain own layer``, ``plain own block`` (the same with specs of a
            user's own); ``call``.
        argv: Megatron's own arguments.
        strategy: Its name.
    """
    named = ["--spec", "megatron_scalevec.specs", strategy.replace("-", "_")]
    flag = ["--scalevec-strategy", strategy]
    more = {"flag": flag, "flag+spec": [*flag, *named], "spec": named, "plain spec": named}.get(door, [])
    if door.startswith("plain own"):
        more = ["--spec", "ranks.own_specs", door.split()[-1]]
    if door == "call":
        _call_door(strategy)
    return train([*argv, *more], plugin=not door.startswith("plain") and door != "call", by_name=False)


def _call_door(strategy: str) -> None:
    """What somebody writes who builds the model himself."""
    from megatron.training import training
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.decay import with_decaying_vectors

    strategy_config = ScaleVecConfig(strategy=strategy)
    build, overrides = GPTModelBuilder.build_model, training.get_standard_config_overrides

    def build_model(self, *args, **kwargs):
        model = build(self, *args, **kwargs)
        apply_scale_vectors(model, strategy_config)
        return model

    GPTModelBuilder.build_model = build_model
    training.get_standard_config_overrides = lambda config: with_decaying_vectors(
        overrides(config), strategy_config.weight_decay
    )


def launch_only(argv: list[str], script: str) -> bool:
    """Launch a script without recording anything."""
    from megatron_scalevec.integration import launch

    launch.launch(str(TESTS / "scripts" / script), argv)
    return True


def own_loop(overrides: bool) -> dict[str, Any]:
    """Build model and optimizer by hand under the hooks, with Megatron's rules or with rules of one's own."""
    import io

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, ParamKey
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.integration import hooks
    from ranks.models import build_gpt, initialize_parallel

    hooks.install(["--scalevec-strategy", "hg"])
    import megatron.core.optimizer as optimizer

    initialize_parallel()
    model = build_gpt("llama", torch.float32)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    config = OptimizerConfig(lr=0.1, weight_decay=0.1)
    one_dimensional = ParamPredicate(name="1d", fn=lambda p: p.dim() == 1)
    own = {ParamKey(predicate=one_dimensional): {"wd_mult": 0.0}}
    rules = own if overrides else optimizer.get_standard_config_overrides(config)
    output, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(output):
            optimizer.get_megatron_optimizer(config, [wrapped], config_overrides=rules)
    except ScaleVecError as caught:
        error = str(caught)
    return {
        "error": error,
        "audited": hooks.session().audit is not None,
        "printed": output.getvalue(),
    }
