"""Pages of the documentation site that say what the package's own tables and parsers say.

They are written when the site is built, so that they cannot be old.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from unittest import mock

from megatron_scalevec import cli
from megatron_scalevec.config import COMPONENTS, LR_ROLES, SITES, STRATEGIES
from megatron_scalevec.integration.arguments import add_arguments

# Wide enough for the longest usage line, narrow enough for a page.
HELP_COLUMNS = "100"


def pages() -> dict[str, str]:
    """Path under docs/ to Markdown."""
    return {
        "reference/flags.md": flags(),
        "reference/commands.md": commands(),
        "reference/support.md": support(),
    }


def _table(head: tuple[str, ...], rows) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;")


def _listed_values() -> dict[str, dict[str, str]]:
    """Flags whose help is a list of values with their meanings."""
    listed = {name: dict(values) for name, values in COMPONENTS.items()}
    listed["strategy"] = {name: strategy.summary for name, strategy in STRATEGIES.items()}
    listed["sites"] = dict(SITES)
    return listed


def flags() -> str:
    """Every ``--scalevec-*`` flag, from the parser that reads them."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    listed = _listed_values()
    parts = [
        "# Flags\n\nThey stand among Megatron's own, behind `scalevec launch SCRIPT`, `scalevec pretrain`, "
        "in a patched Megatron-LM, or in a `--yaml-cfg` file (`scalevec_strategy: hg`). Flags that say what "
        "is built are part of a run's checkpoints; what the strategies do is in "
        "[Strategies, in formulas](../strategies.md)."
    ]
    for action in parser._actions:
        [flag] = action.option_strings
        value = f"[{action.metavar}]" if action.nargs == "?" else action.metavar
        name = action.dest.removeprefix("scalevec_")
        help_text = (action.help or "") % {"default": action.default, "prog": "scalevec"}
        parts.append(f"## `{flag}`\n\n`{flag} {value}`")
        if name in listed:
            rows = [(f"`{key}`", text) for key, text in listed[name].items()]
            parts.append(_table(("value", "what it does"), rows))
            parts.append("Default: " + help_text.rpartition("Default: ")[2])
        else:
            parts.append(_cell(help_text[:1].upper() + help_text[1:]))
    rows = [
        (f"`{name}`", s.branches or "", s.placement or "", s.reparam or "", s.weight_decay or "")
        for name, s in STRATEGIES.items()
    ]
    parts.append("## What a strategy stands for\n")
    parts.append(_table(("strategy", "branches", "placement", "reparam", "weight decay"), rows))
    parts.append(f"Roles of `--scalevec-lr-mult`: {', '.join(LR_ROLES)}.")
    return "\n\n".join(parts) + "\n"


def help_of(command: str) -> str:
    """What ``scalevec COMMAND --help`` prints."""
    out = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=HELP_COLUMNS), contextlib.redirect_stdout(out):
        with contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def commands() -> str:
    """Every command with its help."""
    parts = ["# Commands\n\n`scalevec COMMAND --help` prints what stands here."]
    for name, text in cli._COMMANDS.items():
        parts.append(f"## scalevec {name}\n\n{text[:1].upper()}{text[1:]}.")
        if name in ("launch", "pretrain"):
            script = " SCRIPT" if name == "launch" else ""
            parts.append(
                f"`scalevec {name}{script} <Megatron's own arguments> [--scalevec-*]`, behind `torchrun ... "
                "-m megatron_scalevec` on several ranks. The flags are in [Flags](flags.md)."
            )
        else:
            parts.append(f"```text\n{help_of(name)}\n```")
    return "\n\n".join(parts) + "\n"


def support() -> str:
    """What ``scalevec explain --support`` prints."""
    from megatron_scalevec.explain.display import support_as_json

    found = json.loads(support_as_json())
    shapes, refused = [], []
    for shape in found["shapes"]:
        told = f"`{shape['flags']}`" if shape["flags"] else ""
        if shape["refused"]:
            refused.append((shape["name"], told, shape["refused"]))
        else:
            branches = ", ".join(f"`{name}`" for name in shape["branches"])
            shapes.append((shape["name"], told, branches, shape["versions"]))
    refusals = [
        (
            f"`{r['name']}`",
            r["reason"] + (f" (megatron-core {r['versions']})" if r["versions"] else ""),
            r["way_out"],
        )
        for r in found["refusals"]
    ]
    return (
        "\n\n".join(
            [
                "# Supported models\n\n`scalevec explain --support` prints these tables; a test compares the "
                "branches with what is built. [Models](../models.md) says more on each.",
                _table(("model", "told by", "branches with scale vectors", "megatron-core"), shapes),
                "## Models that are refused",
                _table(("model", "told by", "why"), refused),
                "## Refused together with a strategy\n\nA run with one of these stops before a process "
                "group exists, with the reason and the way out.",
                _table(("name", "reason", "way out"), refusals),
            ]
        )
        + "\n"
    )
