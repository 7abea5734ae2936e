"""A script with a configuration of its own that hands Megatron a command line it wrote itself."""

import argparse
import os
import sys

from megatron_scalevec.integration.pretrain_gpt import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    own, _ = parser.parse_known_args()
    with open(own.config) as file:
        sys.argv = [sys.argv[0], *file.read().split(), *os.environ.get("MORE", "").split()]
    main()
