"""Send a recipe of nemo-toolkit 2.7 to a Slurm cluster, stock or with scale vectors.

python examples/nemo/slurm.py --account ACCOUNT --partition PARTITION --host LOGIN_NODE --user USER \
    --job-dir FOLDER --image CONTAINER --strategy unified
"""

from __future__ import annotations

import argparse

import nemo_run as run
from nemo.collections import llm

from megatron_scalevec.nemo import layer_spec


def recipe(strategy: str | None, nodes: int, gpus: int) -> run.Partial:
    """Llama 3 8B; ``strategy`` None for stock."""
    result = llm.llama3_8b.pretrain_recipe(name="scale-vectors", num_nodes=nodes, num_gpus_per_node=gpus)
    if strategy is not None:
        result.model.config.transformer_layer_spec = layer_spec(strategy)
    return result


def executor(arguments: argparse.Namespace) -> run.SlurmExecutor:
    """One task per GPU. The package must be installed in the container's image."""
    return run.SlurmExecutor(
        account=arguments.account,
        partition=arguments.partition,
        tunnel=run.SSHTunnel(user=arguments.user, host=arguments.host, job_dir=arguments.job_dir),
        nodes=arguments.nodes,
        ntasks_per_node=arguments.gpus,
        gpus_per_node=arguments.gpus,
        time="24:00:00",
        container_image=arguments.image,
        packager=run.Packager(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-train Llama 3 8B on a Slurm cluster.")
    for name in ("account", "partition", "host", "user", "job-dir", "image"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--strategy", help="a scale-vector strategy; stock without it")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8)
    arguments = parser.parse_args()
    run.run(
        recipe(arguments.strategy, arguments.nodes, arguments.gpus),
        executor=executor(arguments),
        name="scale-vectors",
    )


if __name__ == "__main__":
    main()
