"""Which parameters get gradients and are held by no optimizer, are cut off, or are tied no more."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.inputs.files import as_utf8
from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import HostCopy
from mp_agent.probe.instruments.activation_modules import (
    ForwardHook,
    Run,
    is_compiled,
    tensors_in,
)
from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.parameter_names import gradient_of, listed, strip_wrappers
from mp_agent.probe.optimizers.plan import change_count, few_elements, local_of
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.recording.run_facts import ObservedTraits
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.records.columns import CUT_OFF_PARAMETERS, PARTED_PARAMETERS, UNHELD_PARAMETERS
from mp_agent.records.schema import CUT_OFF, PARTED, UNHELD
from mp_agent.ring.interruptions import pass_on

_LOOKS_APART_STEPS = 32
_EARLY_APART_STEPS = 24
"""Between the second look and the third, which a mistake from the start is to be found by."""
_LOOKS_SHARE = 0.001
"""Share of the time that looks of one kind take, at most."""
_LOOKS_SECONDS_PER_STEP = 20e-6
"""What they may take of the shortest steps all the same."""
_SOON_STEPS = 9
"""Odd, so that an element which goes up and down by equal amounts is not where it was."""


class Looks:
    """Says on which steps to look at something next, by what looking has cost.

    due: the next step on which to look: the first, the tenth, 24 steps later, and then one in 32 or
    more. A look that is to be followed up soon and the one that does so cost as much as one.
    """

    def __init__(self) -> None:
        self.due = 1
        self._begun_seconds = 0.0
        self._spent_seconds = 0.0
        """What the looks have taken that were to be followed up."""
        self._cost_seconds = 0.0  # the first look costs more than those that follow
        self._last: tuple[int, float] | None = None
        """Number of the step of the last look, and when that ended."""

    def begin(self) -> None:
        """Note that a look begins."""
        self._begun_seconds = perf_counter()

    def end(self, sequence: int, *, soon: bool = False) -> None:
        """Note that a look of step `sequence` has ended; soon: the next one is to follow it up."""
        now_seconds = perf_counter()
        self._spent_seconds += now_seconds - self._begun_seconds
        apart_steps = _LOOKS_APART_STEPS if sequence > 1 + _SOON_STEPS else _EARLY_APART_STEPS
        if self._last is None or soon:
            apart_steps = _SOON_STEPS
        else:
            before_seconds, self._cost_seconds = self._cost_seconds, self._spent_seconds
            self._spent_seconds = 0.0
            steps, seconds = sequence - self._last[0], self._begun_seconds - self._last[1]
            allowed = max(_LOOKS_SHARE * seconds / max(steps, 1), _LOOKS_SECONDS_PER_STEP)
            # Of two, since a single one may have been interrupted.
            apart_steps = max(apart_steps, ceil(min(self._cost_seconds, before_seconds) / allowed))
        self._last = sequence, now_seconds
        self.due = sequence + apart_steps


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
        self._tied = TiedWeights()
        self._parted_names = NamesOnTheWay(traits, PARTED)
        self._trained_ratio = ""
        traits.trained_ratio = self.trained_ratio

    def trained_ratio(self) -> str:
        """Return which share of the model is trained, as known last: a model may be gone by now."""
        if (share := self._registry.trained_share()) is not None:
            self._trained_ratio = f"{share:.4g}"
        return self._trained_ratio

    def look(self, sequence: int, scalars: dict[str, Scalar], *, soon: bool) -> None:
        """Add to a step's `scalars` how many such parameters there are, and their names to facts.

        They are counted once two looks have found them. soon: whether the next look is to be soon.
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
                unchanged.append(known.is_unchanged() & _is_new(parameter))
        flags_T = torch.stack(accelerator.on_one_device(unchanged)) if names else torch.zeros(0)
        scalars[UNHELD_PARAMETERS] = as_scalar(flags_T.sum()) if names else 0.0
        self._names.send(names, flags_T)
        if (root := self._registry.root) is not None:
            parted = self._tied.parted(root)
            scalars[PARTED_PARAMETERS] = float(len(parted))
            self._parted_names.send(parted, torch.ones(len(parted), device="cpu"))
        soon |= not self._suspects.keys() <= before.keys()
        self.looks.end(sequence, soon=soon)


@dataclass(frozen=True, slots=True, eq=False)
class _Suspect:
    """A parameter that no optimizer holds, as a look has found it. Does not keep it alive."""

    parameter: TensorRef
    gradient: TensorRef
    gradient_version: int
    elements: torch.Tensor

    @classmethod
    def made_of(cls, parameter: torch.Tensor) -> "_Suspect":
        gradient = gradient_of(parameter)
        assert gradient is not None
        return cls(
            TensorRef(parameter),
            TensorRef(gradient),
            change_count(gradient),
            _kept(parameter),
        )

    def of(self, parameter: torch.Tensor) -> bool:
        """Return whether it is `parameter`, with another gradient than before."""
        gradient = gradient_of(parameter)
        same = gradient is self.gradient() and (
            gradient is None or change_count(gradient) == self.gradient_version
        )
        return self.parameter() is parameter and not same

    def is_unchanged(self) -> torch.Tensor:
        """Return whether its elements are those of the earlier look, on its device."""
        parameter = self.parameter()
        assert parameter is not None
        return (_kept(parameter) == self.elements).all()


def _is_new(parameter: torch.Tensor) -> torch.Tensor:
    """Return whether its gradient is one; in a buffer that others share it may be zeros."""
    gradient = gradient_of(parameter)
    if gradient is parameter.grad or gradient is None:
        return torch.ones((), dtype=torch.bool, device=parameter.device)
    return local_of(gradient).any()


def _kept(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a few elements; none of tensors of other kinds."""
    partition = getattr(parameter, "ds_tensor", None)  # of ZeRO 3, which gathers the whole one
    found = few_elements((parameter if partition is None else partition).detach())
    return torch.empty(0, device=parameter.device) if found is None else found.clone()


class TiedWeights:
    """Finds weights that were one parameter at an earlier look, or are to be one, and are two.

    Two are they where both get gradients, in memory of their own.
    """

    def __init__(self) -> None:
        self._tied: dict[tuple[str, str], tuple[_Place, _Place]] = {}
        """Places that have had one parameter, by their names."""

    def parted(self, root: nn.Module) -> list[str]:
        """Return the names of all such parameters of a model."""
        first: dict[int, _Place] = {}
        said: list[tuple[int, int]] = []
        for path, module in nn.Module.named_modules(root):
            if (pair := _embeddings_said_to_be_one(module)) is not None:
                said.append(pair)
            for key, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                name = strip_wrappers(f"{path}.{key}" if path else key)
                place = _Place(name, weakref.ref(module), key)
                if (other := first.setdefault(id(parameter), place)) is not place:
                    self._tied[other.name, name] = other, place
        pairs = [(first[one], first[other]) for one, other in said if {one, other} <= first.keys()]
        names = {
            place.name: None
            for pair in (*self._tied.values(), *pairs)
            if _are_two(*(place.parameter() for place in pair))
            for place in pair
        }
        return list(names)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a parameter is in a model. Keeps neither alive."""

    name: str
    module: "weakref.ref[nn.Module]"
    key: str

    def parameter(self) -> nn.Parameter | None:
        """Return the parameter that is there now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.key)


def _are_two(one: nn.Parameter | None, other: nn.Parameter | None) -> bool:
    if one is None or other is None or one is other or one.grad is None or other.grad is None:
        return False
    return one.shape == other.shape and _memory(one) != _memory(other)


def _embeddings_said_to_be_one(module: nn.Module) -> tuple[int, int] | None:
    """Return the weights, by `id`, of embeddings that a Transformers model's configuration ties.

    None of those that stand-ins hold, such as copies that are trained next to adapters.
    """
    if "config" not in vars(module):
        return None
    try:
        model: Any = module
        configs = model.config, getattr(model.config, "text_config", None) or model.config
        if not model._tied_weights_keys or not all(c.tie_word_embeddings is True for c in configs):
            return None
        found = model.get_input_embeddings(), model.get_output_embeddings()
        weights = [vars(each)["_parameters"]["weight"] for each in found]
    except Exception as error:
        pass_on(error)
        return None
    return id(weights[0]), id(weights[1])


class CutLayers:
    """Finds layers whose output feeds those that get gradients, and that get none themselves.

    Where parameters that an optimizer holds have no gradient, hooks are there for one forward pass.
    Cut off are those of modules in training mode that made outputs with gradients before any module
    that gets one was called, where the first of these got a tensor of that shape without. Heads
    that the loss does not use come after such modules, and branches feed none of them.
    """

    def __init__(self, run: Run, registry: OptimizerRegistry, traits: ObservedTraits) -> None:
        self._run = run
        self._registry = registry
        self._names = NamesOnTheWay(traits, CUT_OFF)
        self._missing: frozenset[int] | None = None
        """The parameters without gradient at the last look, by `id`."""
        self._ever_missing: frozenset[int] = frozenset()
        self._lost = False
        """Whether some of them had one at all looks before."""
        self._looks = 0
        """How often a forward pass was looked at for these."""
        self._found: list[frozenset[str]] = []
        """What the last of these looks have found."""
        self.due = False
        """Whether to look at the next forward pass."""
        self.looking = False
        self._owners: list[_Owner] = []
        self._calls: dict[int, _Call] = {}
        self._given: set[int] = set()
        """The memory of what the model got."""
        self._handles: list[RemovableHandle] = []

    def look(self, scalars: dict[str, Scalar]) -> bool:
        """Look at the next forward pass if parameters have no gradient; return whether soon again.

        That is so where some of them had gradients at all looks before.
        """
        slots = [slot for plan in self._registry.plans_of_run() for slot in plan.slots]
        held = [slot.parameter for slot in slots if slot.parameter.requires_grad]
        missing = frozenset(id(each) for each in held if each.grad is None)
        if missing != self._missing:
            self._lost = self._missing is not None and not missing <= self._ever_missing
            self._ever_missing |= missing
            self._missing, self._looks = missing, 0
            if self._found:
                self._found, scalars[CUT_OFF_PARAMETERS] = [], 0.0
        self.due = 0 < len(missing) < len(held) and self._looks < _LOOKS_AT_MOST
        return self.due and self._lost and self._looks < _LOOKS_AGREEING - 1

    def forward_begins(self, root: nn.Module | None) -> None:
        """Put the hooks on the modules for the next forward pass."""
        if root is None:
            return
        self.due = False
        self._looks += 1
        modules = list(nn.Module.named_modules(root))
        if any(is_compiled(module) for _, module in modules):
            return
        self.looking = True
        held = {id(slot.parameter) for plan in self._registry.plans_of_run() for slot in plan.slots}
        for name, module in modules:
            own = {key: each for key, each in module._parameters.items() if id(each) in held}
            if own and not isinstance(module, torch.jit.ScriptModule):
                self._owners.append(_Owner.made_of(name, module, own))
                self._hook(module, len(self._owners) - 1)
        self._hook(root, _ROOT)

    def _hook(self, module: nn.Module, place: int) -> None:
        hook = ForwardHook(self._run, "order of modules", self._add, place)
        self._handles.append(module.register_forward_hook(hook))

    def forward_ended(self, scalars: dict[str, Scalar]) -> None:
        """Remove the hooks; add to a step how many parameters were found cut off, and their names.

        They count once several looks in a row have found them.
        """
        names = _cut_off(self._owners, self._calls, self._given)
        self.close()
        self._found = [*self._found[1 - _LOOKS_AGREEING :], frozenset(names)]
        if len(self._found) == _LOOKS_AGREEING:
            names = [name for name in names if all(name in found for found in self._found)]
            scalars[CUT_OFF_PARAMETERS] = float(len(names))
            self._names.send(names, torch.ones(len(names), device="cpu"))

    def close(self) -> None:
        """Remove the hooks."""
        self.looking = False
        for handle in self._handles:
            handle.remove()
        self._handles, self._owners, self._calls, self._given = [], [], {}, set()

    def _add(self, place: int, inputs: object, output: object) -> None:
        if place == _ROOT:
            self._given.update(map(_memory, tensors_in(inputs)))
        elif place not in self._calls:
            self._calls[place] = _Call(
                len(self._calls), next(tensors_in(inputs), None), next(tensors_in(output), None)
            )


_ROOT = -1
_LOOKS_AGREEING = 3
_LOOKS_AT_MOST = 4


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module with parameters that an optimizer holds, by name. Keeps neither alive."""

    name: str
    training: bool
    parameters: Mapping[str, TensorRef]

    @classmethod
    def made_of(cls, name: str, module: nn.Module, own: Mapping[str, Any]) -> "_Owner":
        return cls(name, module.training, {key: TensorRef(each) for key, each in own.items()})

    def without_gradient(self) -> list[str]:
        """Return the names of the parameters that have none."""
        prefix = f"{self.name}." if self.name else ""
        return [
            strip_wrappers(prefix + key)
            for key, ref in self.parameters.items()
            if (each := ref()) is not None and each.requires_grad and each.grad is None
        ]

    def with_gradient(self) -> list[int]:
        """Return the parameters that have one, by `id`."""
        there = (ref() for ref in self.parameters.values())
        return [id(each) for each in there if each is not None and each.grad is not None]


class _Call:
    """The first call of a module: its place among them, and what it got and returned."""

    def __init__(self, order: int, got: torch.Tensor | None, returned: torch.Tensor | None) -> None:
        self.order = order
        self.made_gradients = returned is not None and returned.requires_grad
        self.returned = () if returned is None else tuple(returned.shape)
        known = got is not None and got.is_floating_point() and not got.requires_grad
        self.got: tuple[int, ...] | None = tuple(got.shape) if got is not None and known else None
        self.memory = None if got is None else _memory(got)

    def may_feed(self, other: "_Call") -> bool:
        """Return whether what `other` got may be what this one returned, without its gradients."""
        got, returned = other.got, self.returned
        if not got or not returned:
            return False
        return prod(got) == prod(returned) or (len(got) > 1 and got[-1:] == returned[-1:])


def _memory(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def _cut_off(
    owners: Sequence[_Owner], calls: Mapping[int, _Call], given: Collection[int]
) -> list[str]:
    """Return the names of the parameters that are cut off; given: what is data, not a feature."""
    missing = {place: names for place in calls if (names := owners[place].without_gradient())}
    within = [f"{owners[place].name}." for place in missing]
    # Tied weights may have their gradient from the last module that has them.
    by_order = sorted(calls, key=lambda place: calls[place].order)
    trained_by = {key: place for place in by_order for key in owners[place].with_gradient()}
    trained = [
        calls[place]
        for place in set(trained_by.values())
        if not any(name.startswith(f"{owners[place].name}.") for name in within)
        and owners[place].name
    ]
    first = min(trained, key=lambda call: call.order, default=None)
    if first is None or first.memory in given:
        return []
    before = {
        place: calls[place]
        for place in missing
        if calls[place].order < first.order
        and calls[place].made_gradients
        and owners[place].training
    }
    last = max(before.values(), key=lambda call: call.order, default=None)
    if last is None or not last.may_feed(first):
        return []
    return [name for place in before for name in missing[place]]


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
