"""Rules on training loops of several ranks."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace, Value, ValueKind
from mp_agent.lint.rules.events import (
    backwards,
    common_loops,
    has_one_pass,
    is_whole,
    keyword,
    loop_of,
    steps,
    text_of,
)

_DDP = re.compile(r"parallel\.(distributed\.)?DistributedDataParallel$")
_WRAPPER = re.compile(r"\.(DistributedDataParallel|FullyShardedDataParallel|fully_shard)$")
_SAMPLER = re.compile(r"^torch\.utils\.data\.(distributed\.)?DistributedSampler$")
_REDUCES = re.compile(
    r"((?:all_?reduce|reduce_scatter|average|broadcast)\w*)\("
    r"(?!\s*\w*(?:loss|acc|correct|total|count|metric|num))"
)
_OF_MODEL = re.compile(r"param|grad\b|gradient|weight|model|bucket|flat|buffer|state")
_SHARDS_BY_ITSELF = frozenset({"accelerat", "fabric", "lightning", "split_dataset_by_node"})


def _find_bypassed_wrapper(trace: Trace) -> Iterator[Problem]:
    if _reduces_by_itself(trace) or not any(steps(trace)):
        return
    trained = [call for call in trace.of("<model>()") if _is_trained(trace, call)]
    for call in trained:
        key = call.receiver.key
        through = [other for other in trained if other.receiver.key == key and _is_through(other)]
        if not through and (_is_taken_out(call) or _is_wrapped_before(trace, call)):
            yield Problem(
                call.place,
                f"`{text_of(call)}` calls the model past its DistributedDataParallel: the "
                "gradients are not reduced, and the ranks train models of their own",
            )


def _reduces_by_itself(trace: Trace) -> bool:
    """Return whether code may reduce gradients or weights, and not only losses and counts."""
    for module in trace.modules:
        reducing = [
            number
            for number, match in module.source.find(_REDUCES)
            if match[1] not in module.functions_by_name
        ]
        if not reducing:
            continue
        around = [(one.node.lineno, one.node.end_lineno or 0) for one in module.functions]
        training = [
            (loop.place.node.lineno, loop.place.node.end_lineno or 0)
            for loop in _outer_loops(trace)
            if loop.place.module is module
        ]
        for number in reducing:
            first, last = max(
                (one for one in around if one[0] <= number <= one[1]), default=(number, number)
            )
            inside = [one for one in training if first <= one[0] <= last]
            if inside and not any(one[0] <= number <= one[1] for one in inside):
                continue  # before the training, or after it
            if first == number or module.source.matches(_OF_MODEL, first, last):
                return True
    return False


def _outer_loops(trace: Trace) -> list[Operation]:
    """Return the outermost loops around backward passes."""
    outer = {backward.loops[0] for backward in backwards(trace) if backward.loops}
    return [loop for loop in trace.of("<loop>") if loop.loops[-1] in outer]


def _is_through(call: Operation) -> bool:
    return bool(call.receiver.wrapper) and not call.receiver.is_past_wrapper


def _is_taken_out(call: Operation) -> bool:
    model = call.receiver
    return model.is_past_wrapper and _DDP.search(model.wrapper.removesuffix(".module")) is not None


def _is_wrapped_before(trace: Trace, call: Operation) -> bool:
    """Return whether a model is wrapped before it is called as it is."""
    return any(
        _DDP.search(wrap.target)
        and wrap.index < call.index
        and wrap.compatible(call)
        and wrap.result.key == call.receiver.key
        for wrap in trace.operations
    )


def _is_trained(trace: Trace, call: Operation) -> bool:
    return not call.no_grad and any(
        backward.index > call.index
        and backward.compatible(call)
        and common_loops(backward, call) == call.loops
        for backward in backwards(trace)
    )


BYPASSED_WRAPPER = Rule(
    code="MP209",
    name="bypassed-wrapper",
    severity=FindingSeverity.ERROR,
    summary="A model is trained past the DistributedDataParallel that wraps it.",
    explanation="DDP prepares the reduction in its own forward pass. After `ddp.module(x)`, or "
    "the model that was wrapped, its hooks ignore the backward pass: every rank steps with its "
    "own gradients, and the replicas drift apart. Where the wrapper is also called for a "
    "backward pass, a direct call may be meant and is not reported.",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel


def train(model, loader):
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        ddp.module(x).mean().backward()
        optimizer.step()
""",
    good="""\
import torch
from torch.nn.parallel import DistributedDataParallel


def train(model, loader):
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        ddp(x).mean().backward()
        optimizer.step()
""",
    remedy="Call the wrapper in training; `.module` is for saving and evaluation.",
    alert="MpAgentGradientsNotReduced",
    find=_find_bypassed_wrapper,
)


def _find_unsharded_data(trace: Trace) -> Iterator[Problem]:
    yield from _without_sampler(trace)
    yield from _without_epoch(trace)


def _without_sampler(trace: Trace) -> Iterator[Problem]:
    wraps = [one for one in trace.operations if _WRAPPER.search(one.target)]
    if not wraps or trace.mentions(_SHARDS_BY_ITSELF):
        return
    seen = set()
    for loop in _training_loops(trace):
        loader = _loader_of(loop.receiver)
        if loader is None or loader.place is None or loader.key in seen or loader.maybe:
            continue
        if keyword(loader, 3, "sampler") or keyword(loader, 4, "batch_sampler"):
            continue
        given = keyword(loader, 0, "dataset")
        made = loader.items[0] if loader.items else None
        if given is None or made is None or not is_whole(made):
            continue
        if any(wrap.compatible(loop) for wrap in wraps):
            seen.add(loader.key)
            yield Problem(
                loader.place,
                "every rank reads the whole dataset: the DataLoader of a distributed training "
                "has no DistributedSampler",
            )


def _training_loops(trace: Trace) -> Iterator[Operation]:
    """Yield the loops whose own body, not that of a loop in it, has a backward pass."""
    own = {backward.loops[-1] for backward in backwards(trace) if backward.loops}
    for loop in trace.of("<loop>"):
        if loop.loops[-1] in own:
            yield loop


def _loader_of(over: Value) -> Value | None:
    while over.name == "enumerate" and over.items:
        over = over.items[0]
    return over if over.kind is ValueKind.LOADER else None


def _without_epoch(trace: Trace) -> Iterator[Problem]:
    if trace.mentions(_SHARDS_BY_ITSELF | {"set_epoch"}):
        return
    samplers = [one for one in trace.operations if _SAMPLER.match(one.target) and _shuffles(one)]
    for loop in _training_loops(trace):
        loader = _loader_of(loop.receiver)
        outer = loop_of(trace, loop.loops[-2]) if len(loop.loops) > 1 else None
        if loader is None or outer is None or has_one_pass(outer):
            continue
        for sampler in samplers:
            own = sampler.result.key == _sampler_key(trace, loader)
            if own and not sampler.loops and sampler.compatible(loop):
                yield Problem(
                    sampler.place,
                    "the DistributedSampler never gets the epoch: every epoch has the same "
                    "order of samples",
                )


def _sampler_key(trace: Trace, loader: Value) -> str:
    for one in trace.operations:
        if one.result.key == loader.key and one.result.kind is ValueKind.LOADER:
            sampler = one.argument(3, "sampler")
            return "" if sampler is None else sampler.key
    return ""


def _shuffles(sampler: Operation) -> bool:
    value = sampler.argument(3, "shuffle")
    return value is None or (value.kind is ValueKind.CONSTANT and value.constant is True)


UNSHARDED_DATA = Rule(
    code="MP210",
    name="unsharded-data",
    severity=FindingSeverity.ERROR,
    summary="The ranks of a distributed training read the same data, or the same order each epoch.",
    explanation="Without a DistributedSampler every rank iterates over the whole dataset: on N "
    "ranks an epoch has N times the data, in identical batches unless each rank shuffles with a "
    "seed of its own. A DistributedSampler that shuffles needs `set_epoch`, or it repeats the "
    "order of epoch 0. Reported where the trace shows the wrapper, the dataset and the loop; not "
    "for iterable datasets, nor where a framework shards the loader.",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train(model, x, y, epochs):
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (ddp(inputs) - targets).square().mean().backward()
            optimizer.step()
""",
    good="""\
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(model, x, y, epochs):
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            (ddp(inputs) - targets).square().mean().backward()
            optimizer.step()
""",
    remedy="Give the DataLoader `sampler=DistributedSampler(dataset)` and no `shuffle`, and call "
    "`sampler.set_epoch(epoch)` before each epoch.",
    alert="MpAgentRanksShareBatches",
    find=_find_unsharded_data,
)


def _find_never_synchronized(trace: Trace) -> Iterator[Problem]:
    enters = list(trace.of("<no_sync>.enter"))
    if not enters or _reduces_by_itself(trace):
        return
    passes = list(backwards(trace))
    for step, _ in steps(trace):
        own = [
            one
            for one in passes
            if one.index < step.index
            and one.compatible(step)
            and one.loops[: len(step.loops)] == step.loops
        ]
        covering = [_covering(trace, one) for one in own]
        if own and all(covering):
            last = covering[-1]
            assert last is not None
            yield Problem(
                last.place,
                "every backward pass before the step runs under no_sync: the gradients are never "
                "reduced, and the ranks train models of their own",
            )


def _covering(trace: Trace, backward: Operation) -> Operation | None:
    """Return the no_sync block around a backward pass."""
    open_blocks: list[Operation] = []
    for one in trace.operations[: backward.index]:
        if one.target == "<no_sync>.enter":
            open_blocks.append(one)
        elif one.target == "<no_sync>.exit" and open_blocks:
            open_blocks.pop()
    return open_blocks[-1] if open_blocks else None


NEVER_SYNCHRONIZED = Rule(
    code="MP214",
    name="never-synchronized",
    severity=FindingSeverity.ERROR,
    summary="All micro-batches of a step run under `no_sync`, the last one as well.",
    explanation="`no_sync()` defers the reduction to the first backward pass outside of it. "
    "Where there is none before the step, every rank steps with its own gradients. Code that "
    "reduces by itself (`all_reduce`) is not reported.",
    bad="""\
def train(ddp, batches, optimizer):
    for micro_batches in batches:
        optimizer.zero_grad()
        with ddp.no_sync():
            for x in micro_batches:
                ddp(x).mean().backward()
        optimizer.step()
""",
    good="""\
def train(ddp, batches, optimizer):
    for micro_batches in batches:
        optimizer.zero_grad()
        with ddp.no_sync():
            for x in micro_batches[:-1]:
                ddp(x).mean().backward()
        ddp(micro_batches[-1]).mean().backward()
        optimizer.step()
""",
    remedy="Run the last micro-batch of each step outside of `no_sync()`.",
    alert="MpAgentGradientsNotReduced",
    find=_find_never_synchronized,
)
