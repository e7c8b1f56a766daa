"""Which modules route tokens to experts, and what one call of them decided."""

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.activation_modules import is_compiled
from mp_agent.probe.optimizers.parameter_names import strip_wrappers

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens were distributed over experts, before any was dropped.

    logits_TE: a row per token, or None where the router does not show them. load_E: the tokens that
    each expert was chosen for. choices, dropped: scalars, or None where no capacity is known.
    """

    tokens: int
    load_E: torch.Tensor
    logits_TE: torch.Tensor | None
    choices: torch.Tensor | None = None
    dropped: torch.Tensor | None = None


Read = Callable[[nn.Module, object, object], Routing | None]
"""Reads a call, by the module, its positional inputs and its output; None if that is impossible."""


def read_deepspeed(gate: nn.Module, inputs: object, output: object) -> Routing | None:
    """Read a call of DeepSpeed's `TopKGate`, of release 0.10 or later.

    Its logits are computed once more, in 32 bits and without noise: they are not in the output.
    """
    parts = output if isinstance(output, tuple) else ()
    if len(parts) not in (4, 7) or not isinstance(inputs, tuple) or not inputs:
        return None
    load_E, sent = _usable(parts[-1]), _usable(parts[2 if len(parts) == 4 else 3])
    given = _usable(inputs[0])
    if load_E is None or sent is None or given is None or load_E.dim() != 1:
        return None
    weight = _usable(getattr(getattr(gate, "wg", None), "weight", None))
    logits_TE = None
    if weight is not None and weight.shape == (len(load_E), given.shape[-1]):
        logits_TE = nn.functional.linear(given.reshape(-1, given.shape[-1]).float(), weight.float())
    # Of each token either [experts, slots] that are its own, or an expert per choice, else -1.
    kept = sent.sum() if len(parts) == 4 else (sent >= 0).sum()
    return Routing(
        tokens=given.numel() // max(1, given.shape[-1]),
        load_E=load_E,
        logits_TE=logits_TE,
        choices=load_E.sum(),
        dropped=load_E.sum() - kept,
    )


def read_switch(router: nn.Module, _: object, output: object) -> Routing | None:
    """Read a call of `SwitchTransformersTop1Router`: the mask of what is dispatched, and logits.

    The mask [..., E] lacks tokens beyond the capacity of their expert.
    """
    parts = output if isinstance(output, tuple) else ()
    if len(parts) != 3:
        return None
    sent, largest, logits = (_usable(part) for part in parts)
    if sent is None or largest is None or logits is None or sent.shape != logits.shape:
        return None
    logits_TE = logits.reshape(-1, logits.shape[-1])
    # As the router rounds them: rounding makes ties.
    kind = getattr(router, "dtype", logits.dtype)
    chosen_T = logits_TE.softmax(dim=-1, dtype=kind).to(largest.dtype).argmax(dim=-1)
    load_E = load_of(chosen_T.unsqueeze(1), logits_TE.shape[-1])
    return Routing(
        tokens=len(logits_TE),
        load_E=load_E,
        logits_TE=logits_TE,
        choices=load_E.sum(),
        dropped=load_E.sum() - sent.sum(),
    )


def read_top_k(top_k: int, counts: Sequence[int]) -> Read:
    """Return what reads a router that chooses `top_k` experts for each token.

    counts: how many experts there may be, without any: as many as the logits have columns. The
    output has the chosen experts [..., top_k], logits [..., E], or both; of logits alone the
    largest are chosen.
    """

    def read(_: nn.Module, inputs: object, output: object) -> Routing | None:
        parts = list(_parts(output))
        chosen = [p for p in parts if p.dtype in _INTEGERS and p.shape[-1] == top_k]
        floating = [part for part in parts if part.is_floating_point()]
        logits = [p for p in floating if p.shape[-1] in counts or not counts]
        if logits:
            # Next to chosen experts come their weights; without those, scores may come first.
            shown = logits[0 if chosen else -1]
            logits_TE = shown.reshape(-1, shown.shape[-1])
            if not chosen and top_k <= logits_TE.shape[-1]:
                chosen = [logits_TE.topk(top_k, dim=-1).indices]
        elif all(part.shape[-1] == top_k for part in floating) and counts:
            logits_TE = None
        else:
            return None
        if not chosen:
            return None
        chosen_TK = chosen[0].reshape(-1, top_k)
        experts = counts[0] if logits_TE is None else logits_TE.shape[-1]
        if logits_TE is not None and len(logits_TE) != len(chosen_TK):
            return None
        return Routing(
            tokens=len(chosen_TK), load_E=load_of(chosen_TK, experts), logits_TE=logits_TE
        )

    return read


def load_of(chosen_TK: torch.Tensor, experts: int) -> torch.Tensor:
    """Return int64 [E], the tokens that each expert was chosen for; others than E are left out."""
    known_TK = (chosen_TK >= 0) & (chosen_TK < experts)
    # An index beyond the last column would end the process on a device.
    places_TK = chosen_TK.long().masked_fill(~known_TK, experts)
    mask_TE = torch.zeros(len(chosen_TK), experts + 1, dtype=torch.bool, device=chosen_TK.device)
    return mask_TE.scatter_(1, places_TK, True).sum(dim=0)[:experts]


def _parts(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output that may have a row per token."""
    for part in output if isinstance(output, tuple | list) else (output,):
        tensor = _usable(part)
        if tensor is not None and tensor.dim() >= 2:
            yield tensor


def _usable(value: object) -> torch.Tensor | None:
    """Return a tensor that can be measured, of one split over tokens the local part."""
    if isinstance(value, DTensor):
        last = value.dim() - 1
        if any(each.is_partial() or each.is_shard(last) for each in value.placements):
            return None
        value = value.to_local()
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter):
        return None
    dense = value.layout is torch.strided and not value.is_nested
    return value.detach() if dense and accelerator.is_supported(value.device) else None


COMPILED = "routers of compiled modules"

_NAME_OF_CLASS = re.compile(r"(Router|Gate|Gating)$")
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Attributes with the number of experts."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A router: its unique name without wrapper prefixes, how it is read, and who named it."""

    name: str
    module: "weakref.ref[nn.Module]"
    read: Read
    pattern: str = ""
    """The one of the setting; empty for a class that is known."""


class Gates:
    """The routers of a tree, in the order of the tree. Keeps none alive.

    patterns: of names of other modules, each with the number of experts that it chooses for a
    token. not_covered: what the tree contains besides, and the patterns that fit no module.
    """

    def __init__(self, root: nn.Module, patterns: Mapping[str, int]) -> None:
        self._root = weakref.ref(root)
        self._patterns = patterns
        self._fitting: set[str] = set()
        self._compiled = False
        self.gates = tuple(self._found(root))
        self.names = tuple(gate.name for gate in self.gates)
        missing = [pattern for pattern in patterns if pattern not in self._fitting]
        self.not_covered = (
            *((COMPILED,) if self._compiled else ()),
            *(f"routers={pattern}: there is no such module" for pattern in missing),
        )

    def is_of(self, root: nn.Module) -> bool:
        """Return whether they were found in the tree of `root`."""
        return self._root() is root

    def _found(self, root: nn.Module) -> Iterator[Gate]:
        taken: set[str] = set()
        seen: set[int] = set()
        waiting: list[tuple[str, nn.Module, bool]] = [("", root, False)]
        while waiting:
            path, module, compiled = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            compiled = compiled or is_compiled(module)
            children = [(key, each) for key, each in module._modules.items() if each is not None]
            for key, child in reversed(children):
                waiting.append((f"{path}.{key}" if path else key, child, compiled))
            name = strip_wrappers(path) or type(module).__name__
            found = self._read_of(module, name)
            if found is None:
                continue
            if compiled or isinstance(module, torch.jit.ScriptModule):
                self._compiled = True
                continue
            while name in taken:
                name = f"{name}'"
            taken.add(name)
            yield Gate(name, weakref.ref(module), *found)

    def _read_of(self, module: nn.Module, name: str) -> tuple[Read, str] | None:
        fitting = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        self._fitting.update(fitting)
        known = read_of_class(module)
        if known is not None:
            return known, ""
        if fitting:
            return read_top_k(self._patterns[fitting[0]], ()), fitting[0]
        return None


def read_of_class(module: nn.Module) -> Read | None:
    """Return how a module is read whose class is known to be a router; None for any other."""
    kind = type(module)
    if kind.__name__ == "TopKGate" and kind.__module__.partition(".")[0] == "deepspeed":
        return read_deepspeed
    if kind.__name__ == "SwitchTransformersTop1Router":
        return read_switch
    if not _NAME_OF_CLASS.search(kind.__name__):
        return None
    top_k = getattr(module, "top_k", None)
    found = (getattr(module, name, None) for name in _COUNTS)
    counts = [count for count in found if isinstance(count, int) and count > 0]
    if not isinstance(top_k, int) or top_k < 1 or not counts:
        return None
    return read_top_k(top_k, counts)
