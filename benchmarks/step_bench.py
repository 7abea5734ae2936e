"""Step time and memory of every strategy and execution beside stock, interleaved in one process, on the CPU.

    python benchmarks/step_bench.py --hidden 1024 --microbatches 8 --json out.json

Each round takes one step (forward and backward of all microbatches, reduction, optimizer) of stock and of
every variant in turn; what is printed is the median over rounds of variant / stock, in processor time of
the process (which other processes on the machine disturb less) and in wall time. Memory is the bytes of all
tensors that are alive after a step, on one rank; a strategy's own vectors, gradients and moments are
counted apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from typing import Any

VARIANTS = (
    ("unified-foldable", "optimizer"),
    ("unified-foldable", "autograd"),
    ("unified", "optimizer"),
    ("unified", "autograd"),
)
VOCABULARY = 512


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args(argv)
    results = measure(options)
    for name, row in results["variants"].items():
        print(
            f"{name:28} x{row['processor_time_ratio']:.4f} processor time, x{row['wall_time_ratio']:.4f} "
            f"wall time, {row['extra_bytes']:+,} bytes ({row['extra_memory_percent']:+.3f} %) beside "
            f"{row['vector_bytes']:,} of vectors"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
            file.write("\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build stock and all variants, step them in turn."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost")
    os.environ.setdefault("MASTER_PORT", "29577")
    import torch

    torch.set_num_threads(1)
    from megatron_scalevec import cpu

    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    runs, memory, own = {}, {}, {}
    _Run(options, "stock", None).step()  # what is made once per process is made now
    for strategy, execution in (("stock", None), *VARIANTS):
        name = strategy if execution is None else f"{strategy} {execution}"
        gc.collect()
        before = _alive()
        runs[name] = _Run(options, strategy, execution)
        runs[name].step()
        gc.collect()
        memory[name], own[name] = _alive() - before, runs[name].vector_bytes()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.process_time(), time.perf_counter()
            run.step()
            times[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
    stock = times.pop("stock")
    variants = {}
    for name, own_times in times.items():
        extra = memory[name] - memory["stock"] - own[name]
        variants[name] = {
            "processor_time_ratio": statistics.median(a[0] / b[0] for a, b in zip(own_times, stock)),
            "wall_time_ratio": statistics.median(a[1] / b[1] for a, b in zip(own_times, stock)),
            "extra_bytes": extra,
            "extra_memory_percent": 100.0 * extra / memory["stock"],
            "vector_bytes": own[name],
        }
    return {
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "stock_seconds": statistics.median(wall for _, wall in stock),
        "stock_bytes": memory["stock"],
        "variants": variants,
    }


def _alive() -> int:
    """Bytes of the storages of all tensors."""
    import torch

    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Run:
    """A model with its optimizer."""

    def __init__(self, options: argparse.Namespace, strategy: str, execution: str | None) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import (
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
        from megatron_scalevec.decay import with_decaying_vectors
        from megatron_scalevec.execution.optimizer import execute_in_optimizer

        self.options = options
        config = TransformerConfig(
            num_layers=options.layers,
            hidden_size=options.hidden,
            num_attention_heads=options.hidden // 64,
            num_query_groups=max(1, options.hidden // 256),
            ffn_hidden_size=options.hidden * 11 // 4,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            params_dtype=torch.bfloat16,
            bf16=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=options.sequence,
            parallel_output=False,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        ).to(torch.bfloat16)
        strategy_config = ScaleVecConfig(strategy=strategy, execution=execution)
        apply_scale_vectors(model, strategy_config)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            model,
        )
        settings = OptimizerConfig(
            lr=1e-4, weight_decay=0.1, clip_grad=1.0, bf16=True, use_distributed_optimizer=True
        )
        overrides = get_standard_config_overrides(settings)
        if strategy_config.active:
            overrides = with_decaying_vectors(overrides, strategy_config.weight_decay)
        self.optimizer = get_megatron_optimizer(settings, [self.model], config_overrides=overrides)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr
        execute_in_optimizer(self.optimizer, [self.model])

    def step(self) -> None:
        import contextlib

        import torch
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        shape = (1, self.options.sequence)
        tokens = torch.randint(VOCABULARY, shape)
        position = torch.arange(shape[1]).expand(shape)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        last = self.options.microbatches - 1
        for microbatch in range(self.options.microbatches):
            with contextlib.nullcontext() if microbatch == last else self.model.no_sync():
                self.model(tokens, position, None, labels=tokens).mean().backward()
        finalize_model_grads([self.model])
        self.optimizer.step()

    def vector_bytes(self) -> int:
        """What the strategy's own parameters take: bf16, float32 gradient, master and two moments."""
        from megatron_scalevec.vectors import was_added

        return sum(18 * p.numel() for p in self.model.parameters() if was_added(p) and p.requires_grad)


if __name__ == "__main__":
    sys.exit(main())
