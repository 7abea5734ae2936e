"""Every place where the flag enters Megatron, in one table.

A hook wraps one function of Megatron. Each names its target, the versions it was written for, other
modules that hold the same function under a name of their own, and when it must have been called. A target
that is missing stops the run at installation, before a process group exists; a hook that was never called
although its time has passed stops the run when the audit is made. Installing imports
``megatron.training``; CPU mode, if wanted, is installed before.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration.arguments import (
    MODEL_FLAGS,
    add_arguments,
    merge_command_line,
    merge_yaml,
    parse_own,
    strategy_comes_later,
)
from megatron_scalevec.patching import PatchSet, resolve
from megatron_scalevec.support import refusals, refuse_unsupported
from megatron_scalevec.versions import require_megatron_training, require_supported_megatron

__all__ = [
    "AUDIT_FILE",
    "HOOKS",
    "Hook",
    "Session",
    "adopt",
    "install",
    "installed",
    "require_applied",
    "session",
    "uninstall",
]

AUDIT_FILE = "scalevec_audit.json"


@dataclass(frozen=True)
class Hook:
    """One wrapped function.

    ``make`` takes the session and the original and returns the wrapper. ``by_name``: modules that
    imported the function by name, per version window; their binding is replaced too. ``required``: with
    an active strategy it must have been called by the time model and optimizer exist; the audit looks at
    what the other hooks have done.
    """

    name: str
    target: str
    versions: str
    make: Callable[[Session, Callable[..., Any]], Callable[..., Any]]
    by_name: tuple[tuple[str, str], ...] = ()
    required: bool = False


class Session:
    """What the hooks of one process know: the arguments given, what they resolved to, who was called."""

    def __init__(self, command_line: Any, version: Version, cpu: bool, asked: ScaleVecConfig) -> None:
        self.command_line = command_line
        self.version = version
        self.cpu = cpu
        # What is built is decided when Megatron validates its arguments.
        self.config = asked
        self.called: set[str] = set()
        self.restoring = False
        # Nothing will run: the arguments are those of another machine, whose files are not looked for.
        self.describing = False
        self.cpu_changes: list[str] = []
        self.audit: Any = None
        # What is known without Megatron's own parsing, which a user's loop may not use.
        self.audit_files = [command_line.scalevec_audit] if command_line.scalevec_audit else []

    def never_called(self) -> list[Hook]:
        """Required hooks that were not called so far."""
        return [hook for hook in HOOKS if hook.required and hook.name not in self.called]


_patches = PatchSet()
_session: Session | None = None


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
    argv = sys.argv[1:] if argv is None else argv
    command_line = parse_own(argv)
    later = strategy_comes_later(argv) and command_line.scalevec_strategy is None
    asked = ScaleVecConfig() if later else ScaleVecConfig.from_namespace(command_line)
    version = require_supported_megatron()
    require_megatron_training(version)
    new = Session(command_line, version, cpu, asked)
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
        _take_over(args, config)
        refuse_unsupported(args, config, current.version)
        current.config = config
        current.audit_files = _audit_files(args)
        _say(f"scale vectors asked for by --spec: {config.describe()}")
    if model_is_built:
        # Its constructor was entered before the hook on it was there; the spec does that hook's work.
        current.called.add("model")
    return current


def uninstall() -> None:
    """Take every hook out again."""
    global _session
    _patches.undo()
    _session = None


def require_applied(current: Session, name: str) -> None:
    """Called when the script ``name`` has ended: a strategy that nobody has proven was not applied.

    Raises:
        ScaleVecError: A strategy was asked for, and no GPTModel was built or none was audited.
    """
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
    if not SpecifierSet(hook.versions).contains(new.version.base_version, prereleases=True):
        raise ScaleVecError(
            f"the hook on {hook.target} was written for megatron-core {hook.versions}, not for "
            f"{new.version}; the run was stopped before it started. Use a version in that window."
        )
    try:
        owner, attribute = resolve(hook.target)
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

    _patches.set(owner, attribute, counted)
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


# --- the wrappers -------------------------------------------------------------------------------------


def _arguments(_: Session, original):
    return lambda parser: add_arguments(original(parser))


def _load_yaml(current: Session, original):
    def load_yaml(yaml_path):
        args = original(yaml_path)
        merge_yaml(args, current.command_line, yaml_path)
        return args

    return load_yaml


def _validate(current: Session, original):
    def validate(args, defaults=None):
        added = merge_command_line(args, current.command_line)
        if added:
            _say(f"the script left out {', '.join(added)}; added to Megatron's arguments")
        _strategy_of_spec(args)
        config = ScaleVecConfig.from_namespace(args)
        if current.describing:
            # As they were given, before CPU mode makes something else of them.
            refuse_unsupported(args, config, current.version)
        if current.cpu:
            _choose_for_cpu(current, args, config)
        if not current.describing:
            _require_data(args)
            _require_audit_file(args, config)
        # Before Megatron's own validation, whose complaints would send the user in another direction;
        # and after it, when derived values are known and YAML sections are flat.
        refuse_unsupported(args, config, current.version)
        result = original(args, {} if defaults is None else defaults)
        args = args if result is None else result
        refuse_unsupported(args, config, current.version)
        current.config = config
        current.audit_files = _audit_files(args)
        if config.active:
            _say(f"scale vectors asked for: {config.describe()}")
        return result

    return validate


def _choose_for_cpu(current: Session, args: Any, config: ScaleVecConfig) -> None:
    """Change what CPU needs changed, and say what that hides: the same command line goes to GPUs."""
    from megatron_scalevec import cpu

    before = refusals(args, config, current.version)
    changes = current.cpu_changes = cpu.choose_arguments(args)
    if changes:
        _say(f"CPU mode changed {len(changes)} arguments: {'; '.join(changes)}")
    after = refusals(args, config, current.version)
    for sentence in before:
        if sentence not in after:
            _say(f"on GPUs this run would be refused: {sentence}")


def _strategy_of_spec(args: Any) -> None:
    """``--spec megatron_scalevec.specs NAME`` means what ``--scalevec-strategy`` means."""
    spec = getattr(args, "spec", None)
    if spec and spec[0] == "megatron_scalevec.specs":
        from megatron_scalevec.specs import strategy_named

        _take_over(args, strategy_named(spec[1] if len(spec) > 1 else ""))


def _take_over(args: Any, config: ScaleVecConfig) -> None:
    """Write a spec's strategy into the arguments, where checkpoints keep it.

    Raises:
        ScaleVecError: The arguments ask for another one.
    """
    if any(getattr(args, f"scalevec_{name}", None) is not None for name in MODEL_FLAGS):
        asked = ScaleVecConfig.from_namespace(args)
        if asked != config:
            raise ScaleVecError(
                f"--spec asks for {config.describe()}, and the --scalevec-* flags (or the checkpoint's "
                f"arguments) ask for {asked.describe()}; drop one of the two."
            )
    for key, value in config.as_arguments().items():
        setattr(args, key, value)


def _require_data(args: Any) -> None:
    """Stop for a dataset that is not there; Megatron would find out on one rank, minutes later."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in _prefixes(getattr(args, name, None)):
            # Remote storage, and formats of other datasets (JSON lines, folders), are not ours to judge.
            if "://" in prefix or os.path.exists(prefix):
                continue
            missing = [end for end in (".bin", ".idx") if not os.path.exists(prefix + end)]
            if missing:
                flag = "--" + name.replace("_", "-")
                raise ScaleVecError(
                    f"{flag} {prefix}: {' and '.join(prefix + end for end in missing)} not found; give the "
                    "path of an indexed dataset without its .bin/.idx ending."
                )


def _audit_files(args: Any) -> list[str]:
    beside = [os.path.join(args.save, AUDIT_FILE)] if getattr(args, "save", None) else []
    asked = getattr(args, "scalevec_audit", None)
    return [asked, *beside] if asked else beside


def _require_audit_file(args: Any, config: ScaleVecConfig) -> None:
    """Stop for a file that could not be written, before anything has been built."""
    path = getattr(args, "scalevec_audit", None)
    if path is None:
        return
    if not config.active and not getattr(args, "spec", None):  # a spec may bring a strategy
        raise ScaleVecError(
            f"--scalevec-audit {path} has nothing to say about a stock model; add --scalevec-strategy, for "
            "example hg, or drop it."
        )
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        why = "is a folder" if os.path.isdir(path) else f"cannot be created in {folder}"
        raise ScaleVecError(f"--scalevec-audit {path} {why}; give the name of a file to write.")


def _prefixes(value: Any) -> list[str]:
    """Paths in Megatron's blend notation, where weights may stand between them."""
    if value is None:
        return []
    items = value.split() if isinstance(value, str) else [str(item) for item in value]
    return [item for item in items if not _is_number(item)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _gpt_model(current: Session, original):
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if current.config.active:
            from megatron_scalevec.convert import applied_config, apply_scale_vectors

            # A layer spec may have brought the same strategy.
            if applied_config(self) != current.config:
                apply_scale_vectors(self, current.config)

    return init


def _overrides(current: Session, original):
    def get_standard_config_overrides(config):
        from megatron_scalevec.decay import with_decaying_vectors, with_learning_rates

        overrides = original(config)
        if not current.config.active:
            return overrides
        overrides = with_decaying_vectors(overrides, current.config.weight_decay)
        return with_learning_rates(overrides, current.config.lr_multipliers, config)

    return get_standard_config_overrides


def _optimizer(current: Session, original):
    """Where model and optimizer meet, in Megatron's loop and in loops of a user's own."""

    def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
        optimizer = original(config, model_chunks, *args, **kwargs)
        if current.config.active:
            _audit(current, model_chunks, optimizer)
        return optimizer

    return get_megatron_optimizer


def _setup(current: Session, original):
    """For runs without an optimizer: evaluation."""

    def setup_model_and_optimizer(*args, **kwargs):
        model, optimizer, scheduler = original(*args, **kwargs)
        if current.config.active and current.audit is None:
            _audit(current, model, optimizer)
        elif not current.config.active:
            _remove_stale_audit(current)
        return model, optimizer, scheduler

    return setup_model_and_optimizer


def _audit(current: Session, model: Any, optimizer: Any) -> None:
    import torch

    from megatron_scalevec.audit import audit

    missing = current.never_called()
    if missing:
        where = ", ".join(hook.target for hook in missing)
        raise ScaleVecError(
            f"--scalevec-strategy {current.config.strategy}: the hook on {where} did not take part in "
            f"building the model (megatron-core {current.version}), so the strategy cannot be in it; the "
            "run was stopped before training."
        )
    current.audit = audit(model, optimizer, config=current.config)
    if torch.distributed.get_rank() == 0:
        print(current.audit.table(), flush=True)
        for file in current.audit_files:
            current.audit.write(file)


def _remove_stale_audit(current: Session) -> None:
    """A stock run about to save where an earlier run's audit lies, its checkpoints gone or not ours."""
    import torch

    for file in current.audit_files:
        if torch.distributed.get_rank() == 0 and os.path.exists(file):
            os.remove(file)
            _say(f"removed {file}: it spoke of an earlier run, and this one is stock")


def _load_args(current: Session, original):
    def load_args_from_checkpoint(args, *rest, **kwargs):
        current.restoring = True
        try:
            return original(args, *rest, **kwargs)
        finally:
            current.restoring = False

    return load_args_from_checkpoint


def _base_checkpoint(current: Session, original):
    def _load_base_checkpoint(load_dir, args, *rest, **kwargs):
        result = original(load_dir, args, *rest, **kwargs)
        state = result[0] if result else None
        saved = state.get("args") if isinstance(state, dict) else None
        if saved is not None:
            if current.restoring:
                _restore(args, saved)
            else:
                _require_same(current.config, saved, load_dir)
        return result

    return _load_base_checkpoint


def _restore(args: Any, saved: Any) -> None:
    """``--use-checkpoint-args``: what the command line leaves open comes from the checkpoint.

    All or nothing: a component of the checkpoint next to a strategy of the command line would be a
    strategy that neither asked for.
    """
    keys = [f"scalevec_{name}" for name in MODEL_FLAGS]
    if all(getattr(args, key, None) is None for key in keys):
        for key in keys:
            setattr(args, key, getattr(saved, key, None))


def _require_same(config: ScaleVecConfig, saved: Any, load_dir: str) -> None:
    was = ScaleVecConfig.from_namespace(saved)
    if was != config:
        flags = " ".join(_flags_of(saved)) or "no --scalevec-* flag"
        raise ScaleVecError(
            f"the checkpoint in {load_dir} was trained with {was.describe()}, and this run asks for "
            f"{config.describe()}: give the checkpoint's strategy ({flags}, or --use-checkpoint-args), or "
            "start without --load."
        )


def _flags_of(saved: Any) -> list[str]:
    found = []
    for name in MODEL_FLAGS:
        value = getattr(saved, f"scalevec_{name}", None)
        if value is not None:
            found.append(f"--scalevec-{name.replace('_', '-')} {value}")
    return found


def _say(message: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"[scalevec] {message}", flush=True)


_ALL = ">=0.16.1,<0.20"
_TO_0_17 = ">=0.16.1,<0.18"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "arguments",
        "megatron.training.arguments:add_megatron_arguments",
        _ALL,
        _arguments,
    ),
    Hook(
        "yaml arguments",
        "megatron.training.yaml_arguments:load_yaml",
        _ALL,
        _load_yaml,
    ),
    Hook(
        "validation",
        "megatron.training.arguments:validate_args",
        _ALL,
        _validate,
        by_name=(("megatron.training.initialize", _TO_0_17),),
    ),
    Hook(
        "yaml validation",
        "megatron.training.yaml_arguments:validate_yaml",
        _ALL,
        _validate,
        by_name=(("megatron.training.initialize", _TO_0_17),),
    ),
    Hook(
        "checkpoint arguments",
        "megatron.training.checkpointing:load_args_from_checkpoint",
        _ALL,
        _load_args,
        by_name=(("megatron.training.initialize", _TO_0_17),),
    ),
    Hook(
        "checkpoint strategy",
        "megatron.training.checkpointing:_load_base_checkpoint",
        _ALL,
        _base_checkpoint,
    ),
    Hook(
        "model",
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        _ALL,
        _gpt_model,
        required=True,
    ),
    Hook(
        "decay overrides",
        "megatron.core.optimizer:get_standard_config_overrides",
        _ALL,
        _overrides,
        by_name=(("megatron.training.training", _ALL),),
    ),
    Hook(
        "audit",
        "megatron.core.optimizer:get_megatron_optimizer",
        _ALL,
        _optimizer,
        by_name=(("megatron.training.training", _ALL),),
    ),
    Hook(
        "audit without an optimizer",
        "megatron.training.training:setup_model_and_optimizer",
        _ALL,
        _setup,
    ),
)
