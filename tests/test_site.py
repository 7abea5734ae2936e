"""The documentation site: figures and generated pages say what the code says."""

import re
from pathlib import Path

import numpy
import pytest
from script_modules import load_script

from megatron_scalevec.config import COMPONENTS, SITES, STRATEGIES
from megatron_scalevec.integration.arguments import options
from megatron_scalevec.shapes import SHAPES
from megatron_scalevec.support import REFUSALS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def figures():
    return load_script("site_figures")


@pytest.fixture(scope="module")
def pages():
    return load_script("site_reference").pages()


def test_the_preconditioner_is_what_the_flow_does(figures):
    """The effective weight's velocity, from its path, against -P times the gradient."""
    path = figures.flow(learns_gamma=True)
    for index in (1, 200, 1500):
        (before, *_), (time, gamma, weight), (after, *_) = path[index - 1 : index + 2]
        ends = [path[index + side][1] * path[index + side][2] for side in (-1, 1)]
        velocity = (ends[1] - ends[0]) / (after - before)
        # By the product rule, element for element, not from the matrix.
        slope = numpy.array([3.0, 0.4]) * (gamma * weight - numpy.array([1.6, 1.2]))
        by_hand = -(gamma**2) * slope - weight * (weight[0] * slope[0] + weight[1] * slope[1])
        assert figures.preconditioner(gamma, weight) @ figures.gradient(gamma * weight) == pytest.approx(
            -by_hand
        )
        assert velocity == pytest.approx(by_hand, rel=0.02, abs=2e-3)


def test_the_preconditioner_has_the_eigenvalues_of_the_page(figures):
    weight = numpy.array([0.5, -2.0])
    values = numpy.linalg.eigvalsh(figures.preconditioner(0.7, weight))
    assert values == pytest.approx([0.49, 0.49 + 4.25])


def test_decay_is_what_a_step_does_many_times(figures):
    beta = alpha = 1.0
    for _ in range(300):
        beta *= 1 - 1e-3 * 0.1
        alpha *= 1 - 1e-3 * 0.1
    assert figures.decayed(numpy.array([300]), 2) == pytest.approx(beta * alpha, rel=1e-12)
    assert figures.decayed(numpy.array([300]), 1) == pytest.approx(alpha, rel=1e-12)


@pytest.mark.needs_training  # the figures are drawn with the main environment's matplotlib
def test_the_figures_are_what_the_script_draws(figures, tmp_path):
    assert figures.main([str(tmp_path)]) == 0
    number = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
    for name in figures.FIGURES:
        drawn, kept = ((folder / name).read_text() for folder in (tmp_path, figures.IMAGES))
        assert number.sub("N", drawn) == number.sub("N", kept), f"{name} is old: make figures"
        # Another processor may round another way.
        assert list(map(float, number.findall(drawn))) == pytest.approx(
            list(map(float, number.findall(kept))), abs=0.01
        ), f"{name} is old: make figures"


def test_every_flag_and_value_has_its_place(pages):
    page = pages["reference/flags.md"]
    assert re.findall(r"^## `(--\S+)`$", page, re.MULTILINE) == options()
    for names in (*COMPONENTS.values(), STRATEGIES, SITES):
        for name in names:
            assert f"| `{name}` | " in page, name
    assert "%%" not in page and "Default: as the strategy says." in page


def test_every_command_has_its_help(pages):
    page = pages["reference/commands.md"]
    for name in ("explain", "unfold", "fold", "patch", "demo", "compare", "study", "export", "import"):
        assert f"## scalevec {name}\n" in page
        assert re.search(rf"```text\nusage: scalevec {name}\b", page), name


def test_every_shape_and_refusal_is_listed(pages):
    page = pages["reference/support.md"]
    assert all(f"| {shape.name} | " in page for shape in SHAPES)
    assert all(f"| `{refusal.name}` | " in page for refusal in REFUSALS)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) == len(SHAPES) + len(REFUSALS) + 3 * 2


def test_the_build_counts_warnings():
    """``--quiet`` would have MkDocs pass over them, ``--strict`` or not."""
    [line] = re.findall(
        r"^\t.*mkdocs build.*$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert line.endswith("mkdocs build --strict")
