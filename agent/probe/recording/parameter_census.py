"""Which parameters of the run's model get gradients, and are held by no optimizer."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import HostCopy
from mp_agent.probe.optimizers.measurement import few_elements
from mp_agent.probe.optimizers.parameter_names import listed
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.run_facts import ObservedTraits
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.layer_schedule import Looks
from mp_agent.records.columns import UNHELD_PARAMETERS
from mp_agent.records.schema import UNHELD
from mp_agent.records.text import as_utf8


class ParameterCensus:
    """Compares the parameters of the run's model with those that optimizers hold, on some steps.

    Asks parameters whether they require and have gradients. Of those that have one and that no
    optimizer holds it keeps a few elements until the next look: what some other means changes
    meanwhile is trained, and a gradient that no backward has changed is a remainder.
    """

    def __init__(self, registry: OptimizerRegistry, traits: ObservedTraits) -> None:
        self.looks = Looks()
        self._registry = registry
        self._traits = traits
        self._suspects: dict[int, _Suspect] = {}
        self._names = NamesOnTheWay(traits, UNHELD)
        self._trained_ratio = ""
        traits.trained_ratio = self.trained_ratio

    def trained_ratio(self) -> str:
        """Return which share of the model is trained, as known last: a model may be gone by now."""
        if (share := self._registry.trained_share()) is not None:
            self._trained_ratio = f"{share:.4g}"
        return self._trained_ratio

    def look(self, sequence: int, scalars: dict[str, Scalar]) -> None:
        """Add to a step's `scalars` how many such parameters there are, and their names to facts.

        They are counted once two looks have found them.
        """
        self.looks.begin()
        self._names.note()
        strays = len(self._traits.backward_threads) <= 1
        found = self._registry.unheld_gradients(strays=strays)
        before, self._suspects = self._suspects, {}
        names: list[str] = []
        unchanged: list[torch.Tensor] = []
        for name, parameter in found:
            known = before.get(id(parameter))
            self._suspects[id(parameter)] = _Suspect.made_of(parameter)
            if known is not None and known.of(parameter):
                names.append(name)
                unchanged.append(known.is_unchanged())
        flags_T = torch.stack(accelerator.on_one_device(unchanged)) if names else torch.zeros(0)
        scalars[UNHELD_PARAMETERS] = as_scalar(flags_T.sum()) if names else 0.0
        self._names.send(names, flags_T)
        self.looks.end(sequence, soon=not self._suspects.keys() <= before.keys())


@dataclass(frozen=True, slots=True, eq=False)
class _Suspect:
    """A parameter that no optimizer holds, as a look has found it. Does not keep it alive."""

    parameter: "weakref.ref[torch.Tensor]"
    gradient: "weakref.ref[torch.Tensor]"
    gradient_version: int
    elements: torch.Tensor

    @classmethod
    def made_of(cls, parameter: torch.Tensor) -> "_Suspect":
        gradient = parameter.grad
        assert gradient is not None
        return cls(
            weakref.ref(parameter),
            weakref.ref(gradient),
            gradient._version,
            _kept(parameter),
        )

    def of(self, parameter: torch.Tensor) -> bool:
        """Return whether it is `parameter`, with another gradient than before."""
        gradient = parameter.grad
        same = gradient is self.gradient() and (
            gradient is None or gradient._version == self.gradient_version
        )
        return self.parameter() is parameter and not same

    def is_unchanged(self) -> torch.Tensor:
        """Return whether its elements are those of the earlier look, on its device."""
        parameter = self.parameter()
        assert parameter is not None
        return (_kept(parameter) == self.elements).all()


def _kept(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a few elements; none of tensors of other kinds."""
    found = few_elements(parameter.detach())
    return torch.empty(0, device=parameter.device) if found is None else found.clone()


class NamesOnTheWay:
    """Puts the names of parameters for which a flag is set among the facts, once it is known.

    Flags on a device are copied to the host, which goes on.
    """

    def __init__(self, traits: ObservedTraits, fact: str) -> None:
        self._traits = traits
        self._fact = fact
        self._awaited: tuple[Sequence[str], HostCopy] | None = None

    def send(self, names: Sequence[str], flags_T: torch.Tensor) -> None:
        """Note the names for which `flags_T` [T] is set, now or, from a device, with `note`."""
        if accelerator.is_on_host(flags_T.device) or accelerator.cuda_is_used():
            self._awaited = names, HostCopy(flags_T.double())
            self.note()

    def note(self) -> None:
        """Note what has arrived meanwhile."""
        if self._awaited is None or not self._awaited[1].has_arrived:
            return
        names, copy = self._awaited
        self._awaited = None
        found = [name for name, is_set in zip(names, copy.numbers(), strict=True) if is_set]
        facts = dict(self._traits.parameters)
        facts.pop(self._fact, None)
        self._traits.parameters = facts | ({self._fact: as_utf8(listed(found))} if found else {})


def as_scalar(value: torch.Tensor) -> Scalar:
    """Return a number as a step has it; 0 where it cannot be one."""
    found = scalar_of(value)
    return 0.0 if found is None else found
