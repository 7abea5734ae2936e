"""TransformerEngine on a machine without a GPU: everything but its kernels is its own.

:func:`import_without_gpu` imports it where no CUDA device is. :func:`replace_kernels` puts plain torch in
the place of the compiled functions that its modules call, so that its own modules and autograd functions run
on the CPU, in float64 as well.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from types import SimpleNamespace

import torch

__all__ = ["import_without_gpu", "replace_kernels", "replace_optimizers"]


@contextlib.contextmanager
def _device_answers():
    """Answer what TransformerEngine asks about the device while it is imported or builds a module."""
    real = {}
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="", major=9, minor=0, multi_processor_count=1, total_memory=1
        ),
    }
    for name, answer in answers.items():
        real[name] = getattr(torch.cuda, name)
        setattr(torch.cuda, name, answer)
    try:
        yield
    finally:
        for name, original in real.items():
            setattr(torch.cuda, name, original)


def import_without_gpu() -> None:
    """Import TransformerEngine, and let its modules be built, without a device."""
    with _device_answers():
        import transformer_engine.pytorch  # noqa: F401
    from transformer_engine.pytorch.module import base

    original = base.TransformerEngineBaseModule.__init__

    @functools.wraps(original)
    def init(*args, **kwargs):
        with _device_answers():
            original(*args, **kwargs)

    base.TransformerEngineBaseModule.__init__ = init


def replace_kernels() -> None:
    """Replace products and norms, for good: call it in a process of its own."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module import base, grouped_linear, layernorm_linear, linear
    from transformer_engine.pytorch.ops.basic import layer_norm, rmsnorm

    base.TransformerEngineBaseModule.prepare_forward = _prepare_forward
    layernorm_linear.general_gemm = linear.general_gemm = _gemm
    grouped_linear.general_grouped_gemm = _grouped_gemm
    layernorm_linear.apply_normalization = _apply_normalization
    for owner in (tex, rmsnorm):
        owner.rmsnorm_fwd, owner.rmsnorm_bwd = _rmsnorm_fwd, _rmsnorm_bwd
    tex.rmsnorm_bwd_add = _rmsnorm_bwd_add
    for owner in (tex, layer_norm):
        owner.layernorm_fwd, owner.layernorm_bwd = _layernorm_fwd, _layernorm_bwd
    # Kernels know no float64; the names of dtypes mean nothing to these.
    rmsnorm.TE_DType = layer_norm.TE_DType = collections.defaultdict(lambda: None)


def replace_optimizers() -> None:
    """Give Megatron the optimizers and norms of gradients that it has without TransformerEngine."""
    import megatron.core.optimizer as optimizers
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    optimizers.Adam = distrib_optimizer.Adam = torch.optim.AdamW
    optimizers.USING_PYTORCH_OPTIMIZER = True
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None


def _prepare_forward(self, inp, num_gemms=1, **_):
    """TransformerEngine's, which insists on a CUDA tensor first."""
    self.allow_different_data_and_param_types = False
    self.set_activation_dtype(inp)
    self.init_fp8_metadata(num_gemms=num_gemms)
    return inp.contiguous()


def _gemm(a, b, *, layout="TN", out=None, accumulate=False, bias=None, grad=False, **_):
    """Products in TransformerEngine's reading of BLAS: ``TN`` y = b aᵀ, ``NN`` b a, ``NT`` bᵀ a."""
    bias_gradient = None
    if layout == "TN":
        result = b @ a.T
        if bias is not None:
            result = result + bias
    elif layout == "NN":
        result = b @ a
    else:
        columns, rows = a.flatten(0, -2), b.flatten(0, -2)
        result = rows.T @ columns
        if grad and bias is not None:
            bias_gradient = rows.sum(0)
    if out is not None:
        result = out.add_(result) if accumulate else out.copy_(result)
    return result, bias_gradient, None, None


def _grouped_gemm(a, b, out, *_, layout="TN", bias=None, use_bias=False, grad=False, **more):
    """One product per expert, into one tensor after the other or into as many as there are experts."""
    bias = bias if use_bias else [None] * len(a)
    rows = [_gemm(x, y, layout=layout, bias=z, grad=grad) for x, y, z in zip(a, b, bias)]
    results = [row[0] for row in rows]
    if more.get("single_output"):
        out[0].copy_(torch.cat(results))
    else:
        for target, result in zip(out, results):
            target.copy_(result)
    return out, [row[1] for row in rows], None


def _apply_normalization(x, out, weight, bias, eps, quantizer, dtype, normalization, margin, zero_centered):
    if normalization == "RMSNorm":
        return _rmsnorm_fwd(x, weight, eps, None, None, None, margin, zero_centered)
    return _layernorm_fwd(x, weight, bias, eps, None, None, None, margin, zero_centered)


def _rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, margin, zero_centered):
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * inverse * (weight + int(zero_centered)), None, inverse


def _rmsnorm_bwd(dy, x, inverse, weight, margin, zero_centered):
    normalized = x * inverse
    scaled = dy * (weight + int(zero_centered))
    dx = inverse * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    return dx, (dy * normalized).flatten(0, -2).sum(0)


def _rmsnorm_bwd_add(dy, x, add, inverse, weight, margin, zero_centered):
    dx, dweight = _rmsnorm_bwd(dy, x, inverse, weight, margin, zero_centered)
    return dx + add, dweight


def _layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, margin, zero_centered):
    mean = x.mean(-1, keepdim=True)
    inverse = torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + eps)
    return (x - mean) * inverse * (weight + int(zero_centered)) + bias, mean, inverse


def _layernorm_bwd(dy, x, mean, inverse, weight, margin, zero_centered):
    normalized = (x - mean) * inverse
    scaled = dy * (weight + int(zero_centered))
    centred = scaled - scaled.mean(-1, keepdim=True)
    dx = inverse * (centred - normalized * (scaled * normalized).mean(-1, keepdim=True))
    rows = dy.flatten(0, -2)
    return dx, (rows * normalized.flatten(0, -2)).sum(0), rows.sum(0)
