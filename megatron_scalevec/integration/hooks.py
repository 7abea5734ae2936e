"""Every place where the flag enters Megatron, in one table.

A hook wraps one function of Megatron. Each names its target, the versions it was written for, other
modules that hold the same function under a name of their own, and when it must have been called. A target
that is missing stops the run at installation, before a process group exists; a hook that was never called
although its time has passed stops the run when the audit is made. Installing imports
``megatron.training``; CPU mode, if wanted, is installed before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration import argument_hooks, checkpoint_hooks, model_hooks, step_hooks
from megatron_scalevec.integration.arguments import parse_own, strategy_comes_later
from megatron_scalevec.integration.session import Session, say
from megatron_scalevec.patching import PatchSet, resolve
from megatron_scalevec.support import refuse_unsupported
from megatron_scalevec.versions import require_megatron_training, require_supported_megatron

__all__ = [
    "HOOKS",
    "Hook",
    "Session",
    "adopt",
    "claim",
    "claimed",
    "install",
    "installed",
    "require_applied",
    "session",
    "uninstall",
]


@dataclass(frozen=True)
class Hook:
    """One wrapped function.

    ``make`` takes the session and the original and returns the wrapper. ``by_name``: modules that
    imported the function by name, per version window; their binding is replaced too. ``required``: with
    an active strategy it must have been called by the time model and optimizer exist; the audit looks at
    what the other hooks have done. ``exists_in``: where it is a part of Megatron that later or earlier
    versions do not have, those that have it. ``elsewhere``: targets that stand in for ``target``, per
    version window.
    """

    name: str
    target: str
    versions: str
    make: Callable[[Session, Callable[..., Any]], Callable[..., Any]]
    by_name: tuple[tuple[str, str], ...] = ()
    required: bool = False
    exists_in: str = ""
    elsewhere: tuple[tuple[str, str], ...] = ()

    def target_in(self, version: Version) -> str:
        """The target, or where ``elsewhere`` says it was in a version."""
        for target, versions in self.elsewhere:
            if SpecifierSet(versions).contains(version.base_version, prereleases=True):
                return target
        return self.target


_patches = PatchSet()
_session: Session | None = None
_claimed = False


def claim() -> None:
    """Say that this process puts the hooks in place itself, before the first import of Megatron's loop: a
    patched Megatron would do it in the middle of that import, with the command line as it finds it."""
    global _claimed
    _claimed = True


def claimed() -> bool:
    """Whether the hooks are in place, or somebody has said that they will be."""
    return _claimed or installed()


def installed() -> bool:
    """Whether the hooks are in place."""
    return _session is not None


def session() -> Session:
    """The running session. Raises RuntimeError before :func:`install`."""
    if _session is None:
        raise RuntimeError("the hooks are not installed")
    return _session


def install(argv: list[str] | None = None, *, cpu: bool = False) -> Session:
    """Put every hook in place; a second call changes nothing.

    Args:
        argv: The command line, by default this process's; only ``--scalevec-*`` is read from it.
        cpu: Whether CPU mode is on, so that the arguments CPU needs are chosen.

    Raises:
        ScaleVecError: Megatron is missing or outside the window, ``megatron.training`` is missing, a
            target does not exist in this version, or a flag is wrong. Nothing stays patched.
    """
    global _session
    if _session is not None:
        return _session
    claim()
    argv = sys.argv[1:] if argv is None else argv
    command_line = parse_own(argv)
    later = strategy_comes_later(argv) and command_line.scalevec_strategy is None
    asked = ScaleVecConfig() if later else ScaleVecConfig.from_namespace(command_line)
    version = require_supported_megatron()
    require_megatron_training(version)
    new = Session(command_line, version, cpu, asked)
    new.required = {hook.name: hook.target for hook in HOOKS if hook.required}
    try:
        for hook in HOOKS:
            _land(hook, new)
    except BaseException:
        _patches.undo()
        raise
    _session = new
    return new


def adopt(config: ScaleVecConfig | None, *, name: str | None = None, model_is_built: bool = False) -> Session:
    """Take a strategy that came with ``--spec``, when Megatron has parsed its arguments already.

    Where the launcher has installed the hooks, this only tells them the strategy. In a script that knows
    nothing of this package they are installed now: what lies behind (reading the arguments) is made good
    here, what is to come (models, weight decay, checkpoints, the audit) is hooked.

    Args:
        config: The strategy; None for the one that ``name`` stands for.
        name: A name in :mod:`megatron_scalevec.specs`.
        model_is_built: The model that brings the strategy is being completed right now.

    Raises:
        ScaleVecError: There is no such name, the flags ask for something else, or the arguments are of a
            kind that is refused.
    """
    from megatron.training import get_args

    if _session is None:
        from megatron_scalevec.report import speak_for_this_process

        # First, so that whatever is wrong is said in one sentence.
        speak_for_this_process(lambda: installed() and require_applied(session(), sys.argv[0]))
        install([])
    current = session()
    args = get_args()
    if config is None:
        from megatron_scalevec.specs import strategy_named

        config = strategy_named(name)
    if current.config != config or getattr(args, "scalevec_strategy", None) is None:
        argument_hooks.take_over(args, config)
        refuse_unsupported(args, config, current.version)
        argument_hooks.settle_execution(current, args, config)
        current.audit_files = argument_hooks.audit_files(args)
        say(f"scale vectors asked for by --spec: {config.describe()}")
    if model_is_built:
        # Its constructor was entered before the hook on it was there; the spec does that hook's work.
        current.called.add("model")
    return current


def uninstall() -> None:
    """Take every hook out again."""
    global _claimed, _session
    _patches.undo()
    _session = None
    _claimed = False


def require_applied(current: Session, name: str) -> None:
    """Called when the script ``name`` has ended: a strategy that nobody has proven was not applied.

    Raises:
        ScaleVecError: A strategy was asked for, and no GPTModel was built or none was audited; or replicas
            were to be compared, and no step of Megatron's was taken.
    """
    if current.replicas_every and "debugging of replicas" not in current.called:
        raise ScaleVecError(
            f"{name} ended without a step of Megatron's train_step, so --scalevec-debug-replicas compared "
            "nothing; call megatron_scalevec.replicas.check_replicas in your own loop."
        )
    if (current.log_interval or current.log_file) and "telemetry" not in current.called:
        raise ScaleVecError(
            f"{name} ended without a step of Megatron's train_step, so --scalevec-log-interval logged "
            "nothing; use megatron_scalevec.telemetry.Telemetry in your own loop."
        )
    if not current.config.active or current.audit is not None:
        return
    what = (
        "building a GPTModel" if "model" not in current.called else "a Megatron optimizer over its GPTModel"
    )
    raise ScaleVecError(
        f"{name} ended without {what}, so nothing proves that --scalevec-strategy "
        f"{current.config.strategy} took effect; launch a script that pre-trains a megatron.core GPT model, "
        "or use apply_scale_vectors and audit in your own loop."
    )


def _land(hook: Hook, new: Session) -> None:
    if not SpecifierSet(hook.exists_in).contains(new.version.base_version, prereleases=True):
        return
    if not SpecifierSet(hook.versions).contains(new.version.base_version, prereleases=True):
        raise ScaleVecError(
            f"the hook on {hook.target} was written for megatron-core {hook.versions}, not for "
            f"{new.version}; the run was stopped before it started. Use a version in that window."
        )
    try:
        owner, attribute = resolve(hook.target_in(new.version))
    except (ImportError, AttributeError) as error:
        raise ScaleVecError(
            f"the hook on {hook.target} cannot land in megatron-core {new.version}: {error}. The run was "
            "stopped before it started; without this hook the strategy would silently do nothing."
        ) from error
    original = getattr(owner, attribute)
    wrapper = hook.make(new, original)

    @functools.wraps(original)
    def counted(*args, **kwargs):
        new.called.add(hook.name)
        return wrapper(*args, **kwargs)

    # A class method arrives bound to its class, and is replaced by a function that needs no binding; a
    # static method needs none anyway.
    unbound = isinstance(vars(owner).get(attribute), (classmethod, staticmethod))
    _patches.set(owner, attribute, staticmethod(counted) if unbound else counted)
    for module, versions in hook.by_name:
        if SpecifierSet(versions).contains(new.version.base_version, prereleases=True):
            other, _ = resolve(f"{module}:{attribute}")
            if getattr(other, attribute) is not original:
                raise ScaleVecError(
                    f"the hook on {hook.target} cannot land in megatron-core {new.version}: {module} holds "
                    f"another {attribute} than expected, so somebody else changed it first. The run was "
                    "stopped before it started."
                )
            _patches.set(other, attribute, counted)


_ALL = ">=0.16.1,<0.20"
_TO_0_17 = ">=0.16.1,<0.18"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "arguments",
        "megatron.training.arguments:add_megatron_arguments",
        _ALL,
        argument_hooks.add_our_arguments,
    ),
    Hook(
        "yaml arguments",
        "megatron.training.yaml_arguments:load_yaml",
        _ALL,
        argument_hooks.load_yaml,
    ),
    Hook(
        "validation",
        "megatron.training.arguments:validate_args",
        _ALL,
        argument_hooks.validate,
        by_name=(("megatron.training.initialize", _TO_0_17),),
    ),
    Hook(
        "yaml validation",
        "megatron.training.yaml_arguments:validate_yaml",
        _ALL,
        argument_hooks.validate,
        by_name=(("megatron.training.initialize", _TO_0_17),),
    ),
    Hook(
        "checkpoint arguments",
        "megatron.training.checkpointing:load_args_from_checkpoint",
        _ALL,
        checkpoint_hooks.load_args,
        by_name=(("megatron.training.initialize", _TO_0_17),),
    ),
    Hook(
        "checkpoint strategy",
        "megatron.training.checkpointing:_load_base_checkpoint",
        _ALL,
        checkpoint_hooks.base_checkpoint,
    ),
    Hook(
        "checkpoint load",
        "megatron.training.checkpointing:load_checkpoint",
        _ALL,
        checkpoint_hooks.load,
        by_name=(("megatron.training.training", _ALL),),
    ),
    Hook(
        "checkpoint save",
        "megatron.core.dist_checkpointing:save",
        _ALL,
        checkpoint_hooks.save,
    ),
    Hook(
        "model",
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        _ALL,
        model_hooks.gpt_model,
        required=True,
    ),
    Hook(
        "hybrid model",
        "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
        _ALL,
        model_hooks.hybrid_model,
        elsewhere=(("megatron.core.models.mamba.mamba_model:MambaModel.__init__", _TO_0_17),),
    ),
    Hook(
        "decay overrides",
        "megatron.core.optimizer:get_standard_config_overrides",
        _ALL,
        model_hooks.overrides,
        by_name=(("megatron.training.training", _ALL),),
    ),
    Hook(
        "order of groups",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges",
        _ALL,
        model_hooks.group_ranges,
    ),
    Hook(
        # Before the hook on the function that it calls, whose original it is to keep: that call is about a
        # part of the parameters, the others being frozen for its duration.
        "audit of Muon",
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        _ALL,
        model_hooks.optimizer,
        by_name=(("megatron.training.training", _TO_0_17),),
        exists_in=_TO_0_17,
    ),
    Hook(
        "audit",
        "megatron.core.optimizer:get_megatron_optimizer",
        _ALL,
        model_hooks.optimizer,
        by_name=(("megatron.training.training", _ALL),),
    ),
    Hook(
        "groups of a checkpoint",
        "megatron.core.optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups",
        _ALL,
        checkpoint_hooks.group_order,
    ),
    Hook(
        "groups of a distributed checkpoint",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        _ALL,
        checkpoint_hooks.distributed_state,
    ),
    Hook(
        "audit without an optimizer",
        "megatron.training.training:setup_model_and_optimizer",
        _ALL,
        model_hooks.setup,
    ),
    Hook(
        "debugging of replicas",
        "megatron.training.training:train_step",
        _ALL,
        step_hooks.train_step,
    ),
    Hook(
        "telemetry",
        "megatron.training.training:train_step",
        _ALL,
        step_hooks.telemetry,
    ),
)
