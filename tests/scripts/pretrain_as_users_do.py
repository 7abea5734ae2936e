"""A training script of a user's own: it knows Megatron and nothing of this package.

Like Megatron's scripts it imports the functions it needs by name at the top, before anything runs.
"""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def add_own_arguments(parser):
    parser.add_argument("--my-loss-scale", type=float, default=1.0)
    return parser


def provide_data(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


provide_data.is_distributed = True


def loss_function(mask, output):
    mask = mask.view(-1)
    loss = torch.sum(output.view(-1).float() * mask) * get_args().my_loss_scale
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


def forward_step(data, model):
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_function, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_own_arguments)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, provide_data, ModelType.encoder_or_decoder, forward_step)
