"""`python -m mp_agent.probe.statistics.fused.compile`: compiles the kernels for this node's GPUs.

Started at attach, while the training starts. Makes no CUDA context, so it takes no memory of
a GPU; the ranks load what they find in the cache.
"""

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

import torch

from mp_agent.probe.statistics.fused.build import DISTRIBUTION_KERNELS, GRADIENT_KERNELS, node_cache


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the kernels and return the exit code: 0 also where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--distribution", action="store_true")
    options = parser.parse_args(arguments)
    if options.ready_fd is not None:
        os.close(options.ready_fd)
    if not torch.cuda.is_available():
        return 0
    wanted = (
        [GRADIENT_KERNELS, DISTRIBUTION_KERNELS] if options.distribution else [GRADIENT_KERNELS]
    )
    with node_cache():
        for kernels in wanted:
            import_module(kernels.module).compile_all()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
