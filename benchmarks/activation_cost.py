"""What measuring the outputs of modules, or attention, costs the step on which it is done.

A transformer (of 5 M parameters by default) is trained, in turns of one step with its modules
hooked, or with --attention the calls of attention and of the loss watched, and one without, in ABBA
order. Every `layer_interval` steps there is one such step, so the
share of the whole training is the excess divided by that interval.

    python -m benchmarks.activation_cost [--device cuda] [--model gpt2-medium] [--pairs N]
    python -m benchmarks.activation_cost --attention
"""

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from benchmarks.machine import describe, markdown
from benchmarks.step_overhead import HEADER, Comparison
from benchmarks.training import Training, add_arguments, chosen_training
from mp_agent.probe.activations.modules import OutputModules
from mp_agent.probe.activations.sampling import ActivationSampling
from mp_agent.probe.attention.sampling import AttentionSampling
from mp_agent.probe.isolation.guard import Guard
from mp_agent.settings import Settings


def _nothing(*_: Any) -> None:
    pass


class _Outputs:
    """Outputs of all modules, and in backward their gradients."""

    def __init__(self, training: Training, guard: Guard) -> None:
        self._sampling = ActivationSampling(guard.run, lambda: True, 60_000.0)
        self._modules = OutputModules(training.model)
        self.what = f"{len(self._modules.names)} modules are measured"

    def begin(self) -> None:
        self._sampling.begin(self._modules)

    def take(self) -> None:
        rows_MC = self._sampling.take()
        assert rows_MC is not None
        assert self._sampling.gradients.take(len(rows_MC), rows_MC.device) is not None


class _Attention:
    """Attention and output logits."""

    what = "attention is measured"

    def __init__(self, training: Training, guard: Guard) -> None:
        self._sampling = AttentionSampling(guard.run, lambda: True)
        self._model = training.model

    def begin(self) -> None:
        self._sampling.begin(self._model)

    def take(self) -> None:
        rows, _ = self._sampling.take()
        assert rows, "no attention was seen"


def compare(
    training: Training, device: torch.device, pairs: int, *, attention: bool = False
) -> Comparison:
    """Time steps on which something is measured in the forward pass, and steps without."""
    guard = Guard(on_failure=_nothing)
    measured: _Outputs | _Attention = (
        _Attention(training, guard) if attention else _Outputs(training, guard)
    )

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(training_step: Callable[[], None]) -> float:
        finish()
        start = perf_counter()
        training_step()
        finish()
        return perf_counter() - start

    def sampled() -> None:
        measured.begin()
        training.step(_nothing)
        measured.take()

    without: list[float] = []
    with_hooks: list[float] = []
    for pair in range(pairs + 1):
        for hooked in (False, True) if pair % 2 else (True, False):
            if hooked:
                with_hooks.append(seconds(sampled))
            else:
                without.append(seconds(lambda: training.step(_nothing)))
    return Comparison(
        f"a step on which {measured.what}: {training.what}", without[1:], with_hooks[1:]
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--attention", action="store_true", help="attention, not modules' outputs")
    arguments = parser.parse_args()
    training = chosen_training(arguments)
    found = compare(training, arguments.device, arguments.pairs, attention=arguments.attention)
    excess = [b / a - 1.0 for a, b in zip(found.without, found.with_probe, strict=True)]
    interval = Settings().layer_interval
    amortised = sorted(excess)[len(excess) // 2] / interval
    print(f"{describe(arguments.device)}\n\n{markdown(HEADER, [found.cells()])}")
    print(f"\nOne step in {interval}: {amortised:.4%} of the training time (median of the pairs).")


if __name__ == "__main__":
    main()
