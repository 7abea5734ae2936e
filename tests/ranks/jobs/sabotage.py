"""Things broken on purpose, for tests that must then fail."""

from __future__ import annotations

__all__ = ["SABOTAGE", "then"]


def then(function, more):
    def both(*args, **kwargs):
        result = function(*args, **kwargs)
        more()
        return result

    return both


def _drop_tensor_parallel_sum(patches) -> None:
    from megatron_scalevec.layers import common

    patches.set(common, "sum_gradient_over_tensor_parallel", lambda vectors, group: vectors)


def _wrong_row_map(patches) -> None:
    """Every rank takes itself for the first one."""
    from megatron_scalevec.convert import sites

    patches.wrap(sites, "qkv_row_map", lambda right: lambda **given: right(**{**given, "tp_rank": 0}))


def _mark_as_sharded(patches) -> None:
    """Vectors that every rank holds whole, counted on every rank in the gradient norm."""
    from megatron_scalevec.layers import linear

    def marked(add):
        def add_vector(owner, name, *args, **kwargs):
            add(owner, name, *args, **kwargs)
            for parameter in owner.parameters(recurse=False):
                if hasattr(parameter, "scalevec_info"):
                    parameter.tensor_model_parallel = True

        return add_vector

    patches.wrap(linear, "add_vector", marked)


def _reduce_as(allreduce: bool, kind: str):
    """Vectors of one kind of owner, reduced over another data-parallel group than they belong to."""

    def sabotage(patches) -> None:
        from megatron_scalevec.layers import linear

        def marked(add):
            def add_vector(owner, name, *args, **kwargs):
                add(owner, name, *args, **kwargs)
                if kind in type(owner).__name__:
                    for parameter in owner.parameters(recurse=False):
                        if hasattr(parameter, "scalevec_info"):
                            parameter.allreduce = allreduce

            return add_vector

        patches.wrap(linear, "add_vector", marked)

    return sabotage


def _count_once(patches) -> None:
    """Vectors of experts as unsharded as Megatron takes them to be."""
    from megatron_scalevec.convert import experts

    patches.set(experts, "_count_in_gradient_norm", lambda linears: None)


def _forget_expert(patches) -> None:
    """The last local expert of a layer keeps its stock linear."""
    from megatron_scalevec.convert import experts

    def without(convert):
        def converted(self, **what):
            self.linears = self.linears[:-1]
            convert(self, **what)

        return converted

    patches.wrap(experts.RoutedSite, "convert", without)


def _forget_mtp(patches) -> None:
    """Layers inside the MTP block are passed over."""
    from megatron_scalevec import convert
    from megatron_scalevec.convert import sites

    def without(find):
        def _layer_sites(path, *args):
            return () if path.startswith("mtp.") else find(path, *args)

        return _layer_sites

    patches.wrap(sites, "_layer_sites", without)
    everything = lambda model, found: [(p, "stock") for p in model.parameters() if p.dim() == 1]  # noqa: E731
    patches.set(convert, "plan_roles", everything)


def _leave_rope_key(patches) -> None:
    """The rotary part of the key keeps what Megatron gives it: the gradient of this rank's heads."""
    from megatron_scalevec import convert

    patches.set(convert, "complete_rope_keys", lambda model: None)


def _wrong_latent_row_map(patches) -> None:
    """Every rank takes itself for the first one, in latent attention."""
    from megatron_scalevec.convert import latent

    patches.wrap(
        latent,
        "interleaved_row_map",
        lambda right: (
            lambda groups, blocks, tp_rank, tp_size: right(groups, blocks, tp_rank=0, tp_size=tp_size)
        ),
    )


def _wrong_mamba_row_map(patches) -> None:
    """Every rank takes itself for the first one, in Mamba's in-projection."""
    from megatron_scalevec.convert import mamba

    patches.wrap(
        mamba,
        "interleaved_row_map",
        lambda right: (
            lambda groups, blocks, tp_rank, tp_size: right(groups, blocks, tp_rank=0, tp_size=tp_size)
        ),
    )


def _forget_mamba(patches) -> None:
    """Mamba layers are passed over."""
    from megatron_scalevec import convert
    from megatron_scalevec.convert import sites

    patches.set(sites, "mamba_sites", lambda *args: ())
    everything = lambda model, found: [(p, "stock") for p in model.parameters() if p.dim() == 1]  # noqa: E731
    patches.set(convert, "plan_roles", everything)


def _bypass_model(patches) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_scalevec.integration import hooks

    stock = GPTModel.__init__
    patches.wrap(
        hooks, "install", lambda install: then(install, lambda: setattr(GPTModel, "__init__", stock))
    )


def _bypass_decay(patches) -> None:
    from megatron.training import training

    from megatron_scalevec.integration import hooks

    stock = training.get_standard_config_overrides

    def put_back():
        training.get_standard_config_overrides = stock

    patches.wrap(hooks, "install", lambda install: then(install, put_back))


def _check_before_gathering(patches) -> None:
    from megatron.core.distributed import DistributedDataParallel

    def without_gathering(original):
        return lambda self, param_sync=True: original(self, param_sync=False)

    patches.wrap(DistributedDataParallel, "disable_forward_pre_hook", without_gathering)


def _change_one_copy(patches) -> None:
    """Rank 3 has another value in the first vector of an expert."""
    import torch

    from megatron_scalevec import replicas
    from megatron_scalevec.vectors import vector_info

    def changed(check):
        def check_replicas(chunks, *args):
            chunks = list(chunks)
            named = [item for chunk in chunks for item in chunk.named_parameters()]
            vectors = (param for name, param in named if ".experts." in name and vector_info(param))
            with torch.no_grad():
                next(vectors).add_(float(torch.distributed.get_rank() == 3))
            return check(chunks, *args)

        return check_replicas

    patches.wrap(replicas, "check_replicas", changed)


def _keep_an_expert_idle(patches) -> None:
    """No sabotage of the package: expert 3 of models with a bias for the choice is never chosen."""
    from megatron.core.transformer.moe.router import TopKRouter

    def with_bias(original):
        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.expert_bias[3] = -100.0

        return __init__

    patches.wrap(TopKRouter, "__init__", with_bias)


SABOTAGE = {
    "one copy": _change_one_copy,
    "idle expert": _keep_an_expert_idle,
    "tensor-parallel-sum": _drop_tensor_parallel_sum,
    "row-map": _wrong_row_map,
    "marked-as-sharded": _mark_as_sharded,
    "allreduce": _reduce_as(True, "ParallelLinear"),
    "expert-parallel-sum": _reduce_as(False, "SequentialMLP"),
    "counted-once": _count_once,
    "expert-forgotten": _forget_expert,
    "mtp-forgotten": _forget_mtp,
    "rope-key-gradient": _leave_rope_key,
    "latent-row-map": _wrong_latent_row_map,
    "mamba-row-map": _wrong_mamba_row_map,
    "mamba-forgotten": _forget_mamba,
    "check before gathering": _check_before_gathering,
    "bypass model": _bypass_model,
    "bypass decay overrides": _bypass_decay,
}
