"""`torchrun -m tests.numerics.job DIRECTORY [VARIANT …]`: trains them on four ranks, in turn."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gloo import end_process_group
from tests.numerics.variants import VARIANTS


def main(directory: Path, names: list[str]) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for variant in [VARIANTS[name] for name in names or VARIANTS]:
        begun = time.perf_counter()
        place = directory / variant.name
        reference = variant.train(place, rank)
        if rank == 0:
            torch.save(reference, place / "reference.pt")
        dist.barrier()
        if rank == 0:
            print(f"{variant.name}: {time.perf_counter() - begun:.2f} s", flush=True)
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
