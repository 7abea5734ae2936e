"""The norm of heads on a CPU, against the float64 reference and torch's own."""

import pytest
import torch
from reference import rms_norm as reference_norm

from megatron_scalevec.layers import rms_norm as module
from megatron_scalevec.layers.rms_norm import rms_norm

EPSILON = 1e-5


def _given(shape, dtype):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    scale = 1 + 0.3 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    gradient = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return [tensor.to(dtype) for tensor in (x, scale, gradient)]


def _results(norm, x, scale, gradient):
    x, scale = (tensor.detach().requires_grad_() for tensor in (x, scale))
    out = norm(x, scale, EPSILON)
    return [tensor.detach() for tensor in (out, *torch.autograd.grad(out, (x, scale), gradient))]


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
    ids=str,
)
@pytest.mark.parametrize("rows_at_once", [3, 1000])
def test_values_and_gradients(monkeypatch, dtype, limit, rows_at_once):
    """Rounded once: as near to float64 as the dtype has it, in pieces as in one."""
    monkeypatch.setattr(module, "_ELEMENTS", rows_at_once * 16)
    given = _given((5, 2, 4, 16), dtype)
    kept = [tensor.clone() for tensor in given]
    found = _results(rms_norm, *given)
    expected = _results(reference_norm, *(tensor.double() for tensor in given))
    for own, right in zip(found, expected):
        assert own.dtype == dtype and own.shape == right.shape
        assert (own.double() - right).abs().max() <= limit * right.abs().max()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, kept))


def test_as_torch_has_it():
    """In float32, where torch's kernels on a GPU are used instead."""
    given = _given((64, 1, 4, 32), torch.float32)

    def of_torch(x, scale, eps):
        return torch.nn.functional.rms_norm(x, scale.shape, scale, eps)

    for own, theirs in zip(_results(rms_norm, *given), _results(of_torch, *given)):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


def test_a_wider_scale_is_not_rounded():
    """γ is composed in float32, and its gradient wanted there."""
    x, scale, gradient = _given((64, 4, 32), torch.bfloat16)
    scale = scale.float() * 1.001
    found = _results(rms_norm, x, scale, gradient)
    expected = _results(reference_norm, x.double(), scale.double(), gradient.double())
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert (found[2] - expected[2]).abs().max() <= 1e-6 * expected[2].abs().max()


def test_views_and_rows_of_zeros(monkeypatch):
    """Keys lie between queries and values in a wider tensor; what a row of zeros gets is finite."""
    monkeypatch.setattr(module, "_ELEMENTS", 4 * 16)
    packed, scale, _ = _given((6, 1, 2, 48), torch.float32)
    scale = scale[:16]
    packed[2] = 0
    keys = packed[..., 16:32]
    gradient = torch.ones(1, 1, 1, 16).expand(keys.shape)
    assert not keys.is_contiguous() and not gradient.is_contiguous()
    found = _results(rms_norm, keys, scale, gradient)
    same = _results(rms_norm, keys.contiguous(), scale, gradient.contiguous())
    assert all(torch.equal(one, other) for one, other in zip(found, same))
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    assert torch.equal(found[0][2], torch.zeros(1, 2, 16))


def test_no_rows_and_the_same_backward_pass_twice():
    x, scale, gradient = _given((3, 2, 16), torch.float32)
    none = _results(rms_norm, x[:0], scale, gradient[:0])
    assert none[0].shape == none[1].shape == (0, 2, 16) and not none[2].any()
    scale.requires_grad_()
    out = rms_norm(x, scale, EPSILON)
    first, second = (torch.autograd.grad(out, scale, gradient, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
