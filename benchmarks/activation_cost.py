"""What measuring outputs of modules, attention, routers or FP8 operands costs the step with it.

A transformer (of 5 M parameters by default) is trained, in turns of one step on which something is
measured and one without, in ABBA order: the outputs of its modules, the calls of attention and of
the loss, routers, or what FP8 would make of the operands of linear layers. Every `layer_interval`
steps there is one such step: the share of the whole training is the excess divided by that.

    python -m benchmarks.activation_cost outputs attention fp8 [--device cuda] [--pairs N]
    python -m benchmarks.activation_cost routers --model mixture
"""

import argparse
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from benchmarks.machine import describe, markdown
from benchmarks.step_overhead import HEADER, Comparison
from benchmarks.training import EXPERTS_CHOSEN, Training, add_arguments, chosen_training
from mp_agent.probe.instruments.activation_modules import OutputModules
from mp_agent.probe.instruments.activations import ActivationSampling
from mp_agent.probe.instruments.attention import AttentionSampling
from mp_agent.probe.instruments.fp8 import Fp8Layers, Fp8Sampling
from mp_agent.probe.instruments.router_gates import Gates
from mp_agent.probe.instruments.routers import RouterSampling
from mp_agent.probe.isolation import Shield
from mp_agent.settings import Settings


def _nothing(*_: Any) -> None:
    pass


class Sampled(Protocol):
    """Something that is measured on a step."""

    what: str

    def begin(self) -> None:
        """Have it measured on the next step."""

    def take(self) -> None:
        """End that; fails if nothing was measured."""


class _Outputs:
    """Outputs of all modules, and in backward their gradients."""

    def __init__(self, training: Training, shield: Shield) -> None:
        self._sampling = ActivationSampling(shield.run, lambda: True, 60_000.0)
        self._modules = OutputModules(training.model)
        self.what = f"{len(self._modules.names)} modules are measured"

    def begin(self) -> None:
        self._sampling.begin(self._modules)

    def take(self) -> None:
        rows_MC = self._sampling.take()
        assert rows_MC is not None
        assert self._sampling.gradients.take(len(rows_MC)) is not None


class _Attention:
    """Attention and output logits."""

    what = "attention is measured"

    def __init__(self, training: Training, shield: Shield) -> None:
        self._sampling = AttentionSampling(shield.run, lambda: True)
        self._model = training.model

    def begin(self) -> None:
        self._sampling.begin(self._model)

    def take(self) -> None:
        rows, _ = self._sampling.take()
        assert rows, "no attention was seen"


class _Routers:
    """Routers of a mixture of experts: `--model mixture`."""

    def __init__(self, training: Training, shield: Shield) -> None:
        self._sampling = RouterSampling(shield.run, lambda: True)
        self._gates = Gates(training.model, {"*.gate": EXPERTS_CHOSEN})
        self.what = f"{len(self._gates.names)} routers are measured"

    def begin(self) -> None:
        self._sampling.begin(self._gates)

    def take(self) -> None:
        assert self._sampling.take() is not None, "no router was seen"


class _Fp8:
    """Operands of linear layers."""

    def __init__(self, training: Training, shield: Shield) -> None:
        self._sampling = Fp8Sampling(shield.run, lambda: True)
        self._layers = Fp8Layers(training.model)
        self.what = f"FP8 operands of {len(self._layers.names)} layers are measured"

    def begin(self) -> None:
        self._sampling.begin(self._layers)

    def take(self) -> None:
        assert self._sampling.take(one_pass=True) is not None


SAMPLED: Mapping[str, Callable[[Training, Shield], Sampled]] = {
    "outputs": _Outputs,
    "attention": _Attention,
    "routers": _Routers,
    "fp8": _Fp8,
}


def compare(
    training: Training, device: torch.device, pairs: int, *, sampled: str = "outputs"
) -> Comparison:
    """Time steps on which something of `SAMPLED` is measured, and steps without."""
    measured = SAMPLED[sampled](training, Shield(on_failure=_nothing))

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(training_step: Callable[[], None]) -> float:
        finish()
        start = perf_counter()
        training_step()
        finish()
        return perf_counter() - start

    def sampled_step() -> None:
        measured.begin()
        training.step(_nothing)
        measured.take()

    without: list[float] = []
    with_hooks: list[float] = []
    for pair in range(pairs + 1):
        for hooked in (False, True) if pair % 2 else (True, False):
            if hooked:
                with_hooks.append(seconds(sampled_step))
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
    parser.add_argument("sampled", nargs="+", choices=SAMPLED, help="what is measured")
    parser.add_argument("--pairs", type=int, default=12)
    arguments = parser.parse_args()
    training = chosen_training(arguments)
    interval = Settings().layer_interval
    rows = []
    for name in arguments.sampled:
        found = compare(training, arguments.device, arguments.pairs, sampled=name)
        ratio = median(b / a for a, b in zip(found.without, found.with_probe, strict=True))
        rows.append((*found.cells(), f"{(ratio - 1.0) / interval:.3%}"))
    header = (*HEADER, f"share of all steps, at one in {interval}")
    print(f"{describe(arguments.device)}\n\n{markdown(header, rows)}")


if __name__ == "__main__":
    main()
