"""Reparameterizations: composing, decomposing, zero directions."""

import pytest
import torch

from megatron_scalevec.reparam import Part, Plain, get_reparameterization, register, registered

NAMES = ["none", "product", "unit"]


def test_the_configuration_knows_exactly_the_registered_ones():
    from megatron_scalevec.config import REPARAMS

    assert registered() == list(REPARAMS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_ones_are_stored_and_composed_exactly(name):
    kind = get_reparameterization(name)
    parts = kind.decompose(torch.ones(7))
    assert all(torch.equal(part, torch.ones_like(part)) for part in parts.values())
    assert torch.equal(kind.compose(parts), torch.ones(7))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "gamma",
    [
        torch.tensor([1.0, -2.0, 0.5]),
        torch.tensor([0.0, 0.0, 3.0]),
        torch.zeros(3),
        torch.tensor([1e-30, 2e-30, -1e-30]),
        torch.tensor([1e30, -1e30, 1e29]),
    ],
    ids=["ordinary", "with zeros", "zero", "tiny", "huge"],
)
def test_any_vector_can_be_set(name, gamma):
    kind = get_reparameterization(name)
    parts = kind.decompose(gamma)
    assert set(parts) == {part.suffix for part in kind.parts}
    for part in kind.parts:
        assert parts[part.suffix].shape == ((1,) if part.scalar else gamma.shape)
    back = kind.compose(parts)
    if name == "unit":
        torch.testing.assert_close(back, gamma, rtol=1e-6, atol=0)
    else:
        assert torch.equal(back, gamma)


def test_closed_forms_on_powers_of_two():
    product = get_reparameterization("product")
    found = product.compose({"beta": torch.tensor([2.0]), "alpha": torch.tensor([1.0, 0.5, -4.0])})
    assert torch.equal(found, torch.tensor([2.0, 1.0, -8.0]))
    unit = get_reparameterization("unit")
    # rms(2, 2, -2, 2) = 2
    found = unit.compose({"magnitude": torch.tensor([4.0]), "direction": torch.tensor([2.0, 2.0, -2.0, 2.0])})
    assert torch.equal(found, torch.tensor([4.0, 4.0, -4.0, 4.0]))


def test_the_length_of_a_direction_does_not_matter():
    unit = get_reparameterization("unit")
    g, u = torch.tensor([1.5]), torch.tensor([1.0, -3.0, 2.0])
    for factor in (2.0**-60, 2.0**60):
        scaled = unit.compose({"magnitude": g, "direction": factor * u})
        assert torch.equal(scaled, unit.compose({"magnitude": g, "direction": u}))


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    kind = get_reparameterization(name)
    parts = kind.decompose(torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    suffixes = list(parts)
    given = [parts[suffix].requires_grad_() for suffix in suffixes]
    assert torch.autograd.gradcheck(lambda *t: kind.compose(dict(zip(suffixes, t))), given)


@pytest.mark.parametrize("name", ["product", "unit"])
def test_a_zero_vector_has_finite_gradients_and_can_leave_zero(name):
    kind = get_reparameterization(name)
    vector, scalar = kind.parts[1].suffix, kind.parts[0].suffix
    if vector == "beta":
        vector, scalar = scalar, vector
    parts = {scalar: torch.ones(1, requires_grad=True), vector: torch.zeros(4, requires_grad=True)}
    gamma = kind.compose(parts)
    assert torch.equal(gamma, torch.zeros(4))
    gamma.sum().backward()
    for part in parts.values():
        assert torch.isfinite(part.grad).all()
    assert parts[vector].grad.abs().sum() > 0


def test_registering_twice_is_an_error():
    with pytest.raises(ValueError, match="exists already"):
        register(Plain())

    class Twice(Plain):
        name = "twice"
        parts = (Part("a"), Part("a", scalar=True))

    with pytest.raises(ValueError, match="two parts of one suffix"):
        register(Twice())
    assert "twice" not in registered()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_on_the_meta_device(name):
    kind = get_reparameterization(name)
    parts = kind.decompose(torch.ones(4, device="meta"))
    assert kind.compose(parts).shape == (4,) and kind.compose(parts).is_meta
