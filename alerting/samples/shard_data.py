"""Give every rank and every step data of its own: a sampler per rank, one pass over the loader."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANKS = 2
dataset = TensorDataset(torch.arange(64))


def batches(rank: int, epoch: int) -> list[list[int]]:
    """Return what a rank trains on; under torch.distributed no numbers need to be given."""
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        dataset, RANKS, rank, shuffle=True
    )
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    sampler.set_epoch(epoch)  # else every epoch has the order of the first
    return [batch.tolist() for (batch,) in loader]  # not next(iter(loader)), which begins an epoch


first, second = batches(0, epoch=0), batches(1, epoch=0)
seen = [sample for batch in (*first, *second) for sample in batch]
assert sorted(seen) == list(range(64))
assert batches(0, epoch=1) != first
