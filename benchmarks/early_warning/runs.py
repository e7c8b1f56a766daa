"""Trains a cause and its healthy twin; a separate module, since workers must import it."""

import torch

from benchmarks.early_warning.causes import BY_NAME
from benchmarks.early_warning.judging import judge
from benchmarks.early_warning.leads import Pair, last_loss, left_step
from benchmarks.early_warning.training import Trained, train


def run_pair(cause_name: str, seed: int) -> Pair:
    """Train both, and judge them; on one thread, so that results do not depend on the machine."""
    torch.set_num_threads(1)
    cause = BY_NAME[cause_name]
    faulty: Trained = train(cause.faulty, seed, f"{cause.name}-{seed}")
    healthy: Trained = train(cause.healthy, seed, f"{cause.name}-{seed}-healthy")
    return Pair(
        cause.name,
        seed,
        judge(faulty.rank),
        judge(healthy.rank),
        last_loss(faulty.losses),
        last_loss(healthy.losses),
        left_step(faulty.losses, healthy.losses),
    )
