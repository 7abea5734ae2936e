"""What optimizers are told to leave out of their copies, without a model."""

from types import SimpleNamespace

import pytest
import torch

from megatron_scalevec.execution.members import without_copies_of


def _optimizer():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    masters = [param.detach().float() for param in params]
    groups = {"float16_groups": [params[:2], params[2:]]}
    groups["fp32_from_float16_groups"] = [masters[:2], masters[2:]]
    return params, masters, groups, SimpleNamespace(**groups)


def _are(found, expected):
    return [[id(t) for t in group] for group in found] == [[id(t) for t in group] for group in expected]


def test_weights_and_their_masters_are_left_out_together():
    params, masters, groups, optimizer = _optimizer()
    with without_copies_of({params[0], params[2]}, optimizer) as some_left:
        assert some_left
        assert _are(optimizer.float16_groups, [[params[1]], []])
        assert _are(optimizer.fp32_from_float16_groups, [[masters[1]], []])
    assert optimizer.__dict__ == groups
    assert all(getattr(optimizer, name) is own for name, own in groups.items())
    with without_copies_of(set(params), optimizer) as some_left:
        assert not some_left and optimizer.float16_groups == [[], []]
    with without_copies_of((), optimizer) as some_left:
        assert some_left and _are(optimizer.float16_groups, groups["float16_groups"])


def test_a_copy_that_fails_leaves_the_optimizer_whole():
    params, _, groups, optimizer = _optimizer()
    with pytest.raises(RuntimeError, match="out of memory"), without_copies_of(set(params), optimizer):
        raise RuntimeError("out of memory")
    assert all(getattr(optimizer, name) is own for name, own in groups.items())
