"""A script that pre-trains a hybrid model, as Megatron's own of that name."""

import pretrain_as_users_do as script
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=script.add_own_arguments)
    config = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(config, script.provide_data, ModelType.encoder_or_decoder, script.forward_step)
