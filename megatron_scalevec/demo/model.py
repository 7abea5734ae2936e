"""The demo's model and training recipe, as Megatron's command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_scalevec.demo.options import Options
from megatron_scalevec.demo.text import VOCABULARY

__all__ = ["command", "evaluation_interval"]

_EVALUATIONS = 6
_EVALUATED_TOKENS = 64 * 1024

# A Llama-like decoder out of Megatron's plain torch layers, so that it is the same model with and
# without a GPU; the fused kernels that are turned off come from apex and TransformerEngine.
_FIXED = """
--group-query-attention --swiglu --normalization RMSNorm --position-embedding-type rope
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--transformer-impl local --attention-backend unfused --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
--tokenizer-type NullTokenizer --num-workers 0
--adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
--lr-decay-style WSD --lr-wsd-decay-style linear --log-interval 1
""".split()


def evaluation_interval(steps: int) -> int:
    """Steps between evaluations.

    Megatron evaluates after training in any case, so the interval avoids doing it twice at the last
    step. Each evaluation reads the held-out sequences that come next, the same in all runs of a
    seed: neighbouring points of one curve differ by chance, the curves of two strategies do not.
    """
    interval = steps // _EVALUATIONS + 1
    while interval < steps and steps % interval == 0:
        interval += 1
    return interval


def command(
    options: Options,
    *,
    strategy: str,
    seed: int,
    split: str,
    folder: Path,
    name: str,
    cache: Path,
    more: Mapping[str, object] | None = None,
) -> list[str]:
    """The command line of one run; ``folder`` holds ``data`` and ``audits``.

    ``more`` holds Megatron's options without their dashes: further ones, or other values.
    """
    start = [sys.executable]
    if options.tensor_parallel > 1:
        start += ["-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(options.tensor_parallel)]
    # A short run is not to spend most of its time on evaluation.
    at_most = max(2, options.steps // 14)
    per_evaluation = max(1, min(at_most, _EVALUATED_TOKENS // options.tokens_per_step))
    values = {
        "num-layers": options.layers,
        "hidden-size": options.hidden_size,
        "ffn-hidden-size": options.ffn_hidden_size,
        "num-attention-heads": options.heads,
        "num-query-groups": options.query_groups,
        "seq-length": options.seq_length,
        "max-position-embeddings": options.seq_length,
        "micro-batch-size": options.batch_size,
        "global-batch-size": options.batch_size,
        "tensor-model-parallel-size": options.tensor_parallel,
        "train-iters": options.steps,
        "eval-interval": evaluation_interval(options.steps),
        "eval-iters": per_evaluation,
        "lr": f"{options.learning_rate:g}",
        "min-lr": f"{options.learning_rate / 10:g}",
        "lr-warmup-iters": options.steps // 20,
        "lr-wsd-decay-iters": max(1, options.steps * 3 // 10),
        "weight-decay": f"{options.weight_decay:g}",
        "seed": seed,
        "vocab-size": VOCABULARY,
        # Bytes are not padded to a multiple of 128 ranks' worth of unused tokens.
        "make-vocab-size-divisible-by": 1,
        "data-path": folder / "data" / "text",
        "data-cache-path": cache,
        "split": split,
        "optimizer": "adam",
        "scalevec-strategy": strategy,
    }
    if strategy != "stock":
        values["scalevec-audit"] = folder / "audits" / f"{name}.json"
    values.update(more or {})
    pairs = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    return [*start, "-m", "megatron_scalevec", "pretrain", *_FIXED, *pairs]
