"""What the benchmarks train: a GPT with Megatron's distributed optimizer, stock or with scale vectors."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalevec.cost import H100_BYTES_PER_SECOND, Cost, Holding, Schedule, cost

__all__ = ["Sizes", "Trainer", "alive_bytes", "start_parallel", "synchronize"]


@dataclass(frozen=True)
class Sizes:
    """Of a model with gated MLPs and RMSNorm, and of what one rank trains on in a step."""

    layers: int = 2
    hidden: int = 512
    heads: int | None = None
    groups: int | None = None
    ffn: int | None = None
    vocabulary: int = 512
    sequence: int = 256
    batch: int = 1
    microbatches: int = 8

    @property
    def settings(self) -> dict[str, int]:
        """Megatron's names of them; heads of 64 channels, a group for 256, and an MLP of 11/4 by default."""
        heads = self.heads or self.hidden // 64
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": heads,
            "num_query_groups": self.groups or max(1, heads // 4),
            "ffn_hidden_size": self.ffn or self.hidden * 11 // 4,
        }


def start_parallel(backend: str) -> None:
    """A process group, of one where none was asked for by torchrun's variables, and Megatron's groups."""
    from megatron.core import parallel_state, tensor_parallel

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend)
    else:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        address = f"tcp://localhost:{port}"
        torch.distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def alive_bytes() -> int:
    """Bytes of the storages of all tensors."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Trainer:
    """A model in Megatron's DDP, with its optimizer: Adam over float32 masters of bf16 weights.

    Args:
        sizes: Of the model and the step.
        strategy: Of the scale vectors, ``stock`` for none.
        execution: ``autograd`` or ``optimizer``; None for stock.
        device: ``cpu`` (in CPU mode) or ``cuda``.
        implementation: Of the layers, Megatron's name.
        frozen: Parameters whose names this pattern finds are not trained.
        settings: Further ones of the strategy, by the names of ``ScaleVecConfig``.
    """

    def __init__(
        self,
        sizes: Sizes,
        strategy: str = "stock",
        execution: str | None = None,
        device: str = "cpu",
        implementation: str = "local",
        frozen: str | None = None,
        **settings: Any,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import (
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )

        from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
        from megatron_scalevec.decay import with_decaying_vectors
        from megatron_scalevec.execution.optimizer import execute_in_optimizer

        self.sizes, self.device = sizes, device
        gpt = _gpt(sizes, device, implementation)
        config = ScaleVecConfig(strategy=strategy, execution=execution, **settings)
        apply_scale_vectors(gpt, config)
        for name, parameter in gpt.named_parameters():
            if frozen and re.search(frozen, name):
                parameter.requires_grad_(False)
        self.model = DistributedDataParallel(
            gpt.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            gpt,
        )
        adam = OptimizerConfig(
            lr=1e-4, weight_decay=0.1, clip_grad=1.0, bf16=True, use_distributed_optimizer=True
        )
        overrides = get_standard_config_overrides(adam)
        if config.active:
            overrides = with_decaying_vectors(overrides, config.weight_decay)
        self.optimizer = get_megatron_optimizer(adam, [self.model], config_overrides=overrides)
        for group in self.optimizer.param_groups:
            group["lr"] = adam.lr
        execute_in_optimizer(self.optimizer, [self.model])
        shape = (sizes.batch, sizes.sequence)
        self._tokens = torch.randint(sizes.vocabulary, shape, device=device)
        self._position = torch.arange(sizes.sequence, device=device).expand(shape)

    @property
    def engine(self) -> Any:
        """What folds inside the optimizer; None in other modes."""
        from megatron_scalevec.execution.optimizer import engine_of

        return engine_of(self.optimizer)

    def microbatch(self, last: bool = True) -> None:
        """Forward and backward pass."""
        with contextlib.nullcontext() if last else self.model.no_sync():
            self.model(self._tokens, self._position, None, labels=self._tokens).mean().backward()

    def parts_of_a_step(self) -> Iterator[None]:
        """A step, in as many parts as there are microbatches, and one more."""
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for index in range(self.sizes.microbatches):
            self.microbatch(index == self.sizes.microbatches - 1)
            yield
        finalize_model_grads([self.model])
        success, *_ = self.optimizer.step()
        if not success:
            raise RuntimeError("the optimizer has skipped a step")
        yield

    def step(self) -> None:
        """All of it."""
        for _ in self.parts_of_a_step():
            pass

    def cost(self, execution: str, bytes_per_second: float = H100_BYTES_PER_SECOND) -> Cost:
        """Of this rank by the formulas, from the parameters that it has."""
        from megatron_scalevec.execution.folds import folds_of
        from megatron_scalevec.layers.common import Folded
        from megatron_scalevec.vectors import was_added

        weights = [fold.weight for fold in folds_of(self.model)]
        if execution == "autograd":
            weights = [w for m in self.model.modules() if isinstance(m, Folded) for w in m.scaled_weights()]
        vectors = sum(p.numel() for p in self.model.parameters() if was_added(p))
        retired = sum(p.numel() for p in self.model.parameters() if p.dim() == 1 and not p.requires_grad)
        holding = Holding(
            sum(w.numel() for w in weights), sum(w.shape[0] for w in weights), 2, vectors, 2, retired
        )
        shards = torch.distributed.get_world_size()
        schedule = Schedule(self.sizes.microbatches, 1, state_shards=shards)
        return cost(holding, schedule, execution, bytes_per_second)

    def vector_bytes(self) -> int:
        """What the strategy's own parameters take on this rank: bf16, float32 gradient, and this rank's
        shard of master and two moments."""
        from megatron_scalevec.execution.members import Member, leaves_of
        from megatron_scalevec.vectors import was_added

        added = {p for p in self.model.parameters() if was_added(p) and p.requires_grad}
        own = [s for leaf in leaves_of(self.optimizer) for p, s in Member(leaf).shards.items() if p in added]
        return sum(6 * p.numel() for p in added) + sum(12 * (s.stop - s.start) for s in own)


def _gpt(sizes: Sizes, device: str, implementation: str) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **sizes.settings,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=device == "cpu",
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        # It would need apex in Megatron's own output layer.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    if implementation == "transformer_engine":
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.sequence,
        parallel_output=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(device=device, dtype=torch.bfloat16)
    for module in model.modules():
        # Stock TransformerEngine linears add their gradients to DDP's buffers by themselves.
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    return model
