"""Trains a cause and its healthy twin; a module of its own, since workers must import it."""

import torch

from benchmarks.early_warning.causes import BY_NAME, Recipe
from benchmarks.early_warning.judging import Verdict, judge
from benchmarks.early_warning.leads import Pair, last_loss
from benchmarks.early_warning.training import train


def run_pair(cause_name: str, seed: int) -> Pair:
    """Train both, and judge them; on one thread, so that results do not depend on the machine."""
    torch.set_num_threads(1)
    cause = BY_NAME[cause_name]
    faulty, faulty_loss = _run(cause.faulty, seed, f"{cause.name}-{seed}")
    healthy, healthy_loss = _run(cause.healthy, seed, f"{cause.name}-{seed}-healthy")
    return Pair(cause.name, seed, faulty, healthy, faulty_loss, healthy_loss)


def _run(recipe: Recipe, seed: int, name: str) -> tuple[Verdict, float]:
    trained = train(recipe, seed, name)
    return judge(trained.rank), last_loss(trained.losses)
