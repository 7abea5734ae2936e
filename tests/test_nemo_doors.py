"""What the doors for NeMo do without NeMo: settings, fields, windows, imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_scalevec import ScaleVecConfig, ScaleVecError
from megatron_scalevec.bridge import settings
from megatron_scalevec.bridge.container import Fields
from megatron_scalevec.config import STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    "megatron_scalevec.bridge",
    "megatron_scalevec.bridge.container",
    "megatron_scalevec.bridge.export",
    "megatron_scalevec.bridge.hooks",
    "megatron_scalevec.bridge.settings",
    "megatron_scalevec.nemo",
    "megatron_scalevec.nemo.optimizer",
]


@pytest.mark.parametrize(
    "config",
    [
        *(ScaleVecConfig(strategy=name) for name in STRATEGIES),
        ScaleVecConfig(
            strategy="unified", reparam="unit", branches_off=("v", "up"), sites=("mlp", "attention")
        ),
        ScaleVecConfig(strategy="hg", lr_mult="input=2", weight_decay="none"),
    ],
    ids=lambda config: config.strategy,
)
def test_a_setting_is_read_as_it_was_written(config):
    written = settings.write(config)
    assert settings.read(written) == config
    assert written == config.strategy or set(written) > {"strategy"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "give a strategy's name"),
        ({}, "give a strategy's name"),
        ({"placement": "dual"}, "give a strategy's name"),
        ("unifed", "Did you mean 'unified'?"),
        ({"strategy": "hg", "placment": "dual"}, "Did you mean 'placement'?"),
        ({"strategy": "or", "placement": "output"}, "nothing to share"),
        ({"strategy": "hg", "weight_decay": False}, "put a name in quotes"),
        ({"strategy": "hg", "sites": 3}, "--scalevec-sites is 3"),
    ],
)
def test_what_is_no_setting(value, text):
    with pytest.raises(ScaleVecError) as stopped:
        settings.read(value)
    assert text in str(stopped.value)


def test_yaml_lists_and_mappings():
    read = settings.read({"strategy": "hg", "sites": ["mlp", "head"], "lr_mult": {"input": 2}})
    assert read == ScaleVecConfig(strategy="hg", sites=("mlp", "head"), lr_mult="input=2")


def test_fields_of_all_sections_count():
    container = SimpleNamespace(
        model=SimpleNamespace(fp8=None, transformer_impl="local"),
        optimizer=SimpleNamespace(optimizer="adam", use_distributed_optimizer=False),
        ddp=SimpleNamespace(use_megatron_fsdp=False, use_distributed_optimizer=True),
        dist=SimpleNamespace(use_megatron_fsdp=True),
        peft=None,
    )
    fields = Fields(container)
    assert fields.use_megatron_fsdp and fields.use_distributed_optimizer
    assert (fields.optimizer, fields.transformer_impl, fields.fp8) == ("adam", "local", None)
    assert not hasattr(fields, "num_experts")


def test_nemo_toolkit_has_a_window_of_its_own():
    from megatron_scalevec.nemo import NAMES, build_layers

    assert NAMES["unified_foldable"] == "unified-foldable" and "stock" not in NAMES
    with pytest.raises(ScaleVecError) as stopped:
        build_layers(SimpleNamespace(), strategy="hg")
    assert "with nemo-toolkit 2.7: " in str(stopped.value)


@pytest.mark.parametrize(("version", "accepted"), [("0.6.2", True), ("0.6.1", False), ("0.7.0", False)])
def test_the_window_of_bridge(version, accepted):
    from megatron_scalevec.versions import require_bridge

    if accepted:
        require_bridge(version)
    else:
        with pytest.raises(ScaleVecError, match=f"megatron-bridge {version} is outside"):
            require_bridge(version)


def test_imports_without_nemo_from_anywhere(tmp_path):
    """The namespace portion is found, shadows nothing, and nobody imports NeMo without need."""
    code = f"""
import importlib, importlib.util, sys
for name in {MODULES!r}:
    importlib.import_module(name)
loaded = [name for name in sys.modules if name.split(".")[0] in ("nemo", "nemo_run", "lightning")]
loaded += [name for name in sys.modules if name.startswith("megatron.bridge")]
assert not loaded, loaded
portion = importlib.util.find_spec("megatron.scalevec")
assert portion.origin.endswith("scalevec/__init__.py"), portion
core = importlib.util.find_spec("megatron.core")
assert core.origin.endswith("core/__init__.py"), core
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_the_namespace_portion_is_packaged():
    import tomllib
    from setuptools import find_namespace_packages

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    include = tomllib.loads(text)["tool"]["setuptools"]["packages"]["find"]["include"]
    found = set(find_namespace_packages(str(ROOT), include=include))
    assert {"megatron.scalevec", "megatron_scalevec.bridge", "megatron_scalevec.nemo"} <= found
    # With it, this package would hide megatron-core.
    assert not (ROOT / "megatron" / "__init__.py").exists()
