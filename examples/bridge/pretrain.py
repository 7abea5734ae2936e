"""Pre-train one of Megatron-Bridge's recipes, changed by YAML files and key=value arguments.

torchrun --nproc-per-node 8 examples/bridge/pretrain.py --recipe llama3_8b_pretrain_config \
    --config examples/bridge/llama3_8b.yaml --config examples/bridge/unified.yaml train.train_iters=1000
"""

from __future__ import annotations

import argparse

import megatron.bridge.recipes as recipes
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-train a recipe of Megatron-Bridge.")
    parser.add_argument("--recipe", required=True, help="a function of megatron.bridge.recipes")
    parser.add_argument("--config", action="append", default=[], help="a YAML file; the last one wins")
    arguments, overrides = parser.parse_known_args()

    config = getattr(recipes, arguments.recipe)()
    for file in arguments.config:
        config = process_config_with_overrides(config, config_filepath=file)
    config = process_config_with_overrides(config, cli_overrides=overrides)
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()
