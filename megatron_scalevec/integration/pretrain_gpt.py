"""A GPT pre-training entry made of ``megatron.core`` and ``megatron.training`` alone.

Megatron's own ``pretrain_gpt.py`` is not part of the wheel. This entry serves those without a checkout:
indexed datasets (``--data-path``) or mock data, any dense or MoE GPT that Megatron's layer specs describe.
It holds what such a script must hold (data, batch, loss) and leaves the rest to Megatron.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, inprocess_restart
from megatron.training import pretrain as megatron_pretrain
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from packaging.version import Version

from megatron_scalevec.versions import megatron_version

__all__ = ["main"]

_BATCH_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
    "attention_mask": torch.bool,
}


def get_batch(data_iterator, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """This rank's part of the next microbatch.

    The first rank of each tensor-parallel group reads; the others receive. Pipeline stages in the middle
    need no data. With context parallelism each rank keeps two blocks of the sequence, one from each end,
    so that causal attention costs every rank the same.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_BATCH_DTYPES)
    args = get_args()
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    batch = next(data_iterator) if reads else {}
    with_mask = bool(args.create_attention_mask_in_dataloader)
    shape = (args.micro_batch_size, args.seq_length)
    shapes = dict.fromkeys(_BATCH_DTYPES, shape)
    shapes["attention_mask"] = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
    result: dict[str, torch.Tensor | None] = {}
    for key, dtype in _BATCH_DTYPES.items():
        if key == "attention_mask" and not with_mask:
            result[key] = None
            continue
        if reads:
            tensor = batch[key].to(dtype).cuda(non_blocking=True).contiguous()
        else:
            tensor = torch.empty(shapes[key], dtype=dtype, device=torch.cuda.current_device())
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            torch.distributed.broadcast(
                tensor,
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
        result[key] = _context_parallel_part(tensor, sequence_dim=2 if key == "attention_mask" else 1)
    return result


def _context_parallel_part(tensor: torch.Tensor, sequence_dim: int) -> torch.Tensor:
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor
    rank = parallel_state.get_context_parallel_rank()
    blocks = tensor.chunk(2 * size, dim=sequence_dim)
    return torch.cat([blocks[rank], blocks[2 * size - 1 - rank]], dim=sequence_dim)


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor):
    """Sum of the token losses, number of tokens, and what Megatron reports."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"{what} in the loss of the forward pass",
                tolerance=0.0,
                fatal=True,
            )
    tokens = mask.sum().detach().to(torch.int)
    report = {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}
    return loss, tokens, report


def forward_step(data_iterator, model):
    """One microbatch: output of this stage, and the loss function that Megatron applies to it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def build_tokenizer(args: Any):
    """The tokenizer as every version builds it. It sets ``args.padded_vocab_size``."""
    if getattr(args, "legacy_tokenizer", False):
        from megatron.training import get_tokenizer

        return get_tokenizer()
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build
    except ModuleNotFoundError:  # 0.16
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer as build

    return build(args)


def dataset_config(args: Any) -> GPTDatasetConfig:
    """``GPTDatasetConfig`` from Megatron's arguments; fields that a version lacks are left out."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    values = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": getattr(args, "multiple_validation_sets", None),
        "full_validation": getattr(args, "full_validation", None),
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": build_tokenizer(args),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    known = {field.name for field in dataclasses.fields(GPTDatasetConfig)}
    return GPTDatasetConfig(**{name: value for name, value in values.items() if name in known})


def _reads_data(vp_stage: int | None) -> bool:
    return parallel_state.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)


def datasets(num_samples, vp_stage: int | None = None):
    """Training, validation and test data."""
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(_reads_data, vp_stage), dataset_config(args)
    )
    return builder.build()


# Every rank calls the provider, not only the first of each tensor-parallel group.
datasets.is_distributed = True


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """A ``GPTModel`` for Megatron before 0.19, which has no model builder of its own in the wheel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.yaml_arguments import core_transformer_config_from_yaml

    args = get_args()
    if config is None and args.yaml_cfg is not None:
        config = core_transformer_config_from_yaml(args, "language_model")
    config = config or core_transformer_config_from_args(args)
    use_te = config.transformer_impl == "transformer_engine"
    of_layers = {
        "config": config,
        "use_transformer_engine": use_te,
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
        "vp_stage": vp_stage,
    }
    if args.spec is not None:
        spec = import_module(args.spec)
    else:
        spec = get_gpt_decoder_block_spec(**of_layers)
    mtp_spec = None
    if args.mtp_num_layers is not None:
        mtp_spec = get_gpt_mtp_block_spec(
            config,
            get_gpt_decoder_layer_specs(**of_layers)[-1],
            use_transformer_engine=use_te,
            vp_stage=vp_stage,
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def main() -> None:
    """Parse ``sys.argv`` as Megatron does and pre-train."""
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(megatron_pretrain)
    kind = ModelType.encoder_or_decoder
    version = Version(megatron_version().base_version)
    if version < Version("0.18"):
        run(datasets, model_provider, kind, forward_step, args_defaults=defaults, store=store)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults=defaults)
    if version < Version("0.19"):
        container = pretrain_cfg_container_from_args(args)
        run(container, datasets, model_provider, kind, forward_step, store=store)
        return
    from megatron.training.argument_utils import gpt_config_from_args

    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    run(container, datasets, kind, forward_step, store=store)
