"""Rules on how samples and batches are drawn."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.modules import ClassInfo
from mp_agent.lint.interpret.values import Trace, Value, ValueKind
from mp_agent.lint.rules.events import (
    backwards,
    is_fixed,
    is_made_in,
    keyword,
    loop_of,
    repeats,
    text_of,
)

_GENERATOR = re.compile(
    r"^(np|numpy)\.random\.(default_rng|RandomState|Generator)$|^(random\.)?Random$"
    r"|^torch\.Generator$"
)


def _find_shared_generator(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        loader = operation.result
        if loader.kind is not ValueKind.LOADER or not loader.items:
            continue
        dataset = loader.items[0]
        if dataset.klass is None or dataset.kind is not ValueKind.INSTANCE or dataset.maybe:
            continue
        workers = keyword(loader, 5, "num_workers")
        if not _is_positive(workers) or keyword(loader, 9, "worker_init_fn") is not None:
            continue
        name = _own_generator(dataset.klass)
        if name:
            yield Problem(
                operation.place,
                f"each worker has a copy of `self.{name}` of {dataset.klass.node.name} in the same "
                "state: all of them, and all epochs, draw the same numbers",
            )


def _is_positive(node: ast.expr | None) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int)
        and not isinstance(node.value, bool)
        and node.value > 1
    )


def _own_generator(klass: ClassInfo) -> str:
    """Return the attribute of a generator that __init__ makes and __getitem__ draws from."""
    constructor, reader = klass.methods.get("__init__"), klass.methods.get("__getitem__")
    if constructor is None or reader is None:
        return ""
    source = ast.unparse(klass.node)
    if "get_worker_info" in source or "__setstate__" in klass.methods:
        return ""
    for node in ast.walk(constructor.node):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if _GENERATOR.match(ast.unparse(node.value.func)) is None:
            continue
        for target in node.targets:
            if _is_own(target) and isinstance(target, ast.Attribute):
                drawn = f"self.{target.attr}"
                if re.search(rf"\b{re.escape(drawn)}\b", ast.unparse(reader.node)) and (
                    len(re.findall(rf"\b{re.escape(drawn)}\s*=[^=]", source)) == 1
                    and f"{drawn}.seed(" not in source
                    and f"{drawn}.manual_seed(" not in source
                ):
                    return target.attr
    return ""


def _is_own(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


SHARED_GENERATOR = Rule(
    code="MP211",
    name="shared-generator",
    severity=FindingSeverity.WARNING,
    summary="A dataset draws from a generator that every DataLoader worker copies.",
    explanation="Since PyTorch 1.9 workers seed `random`, `torch` and the global generator of "
    "NumPy, each its own way and again in each epoch. A generator that the dataset keeps "
    "(`default_rng`, `RandomState`, `random.Random`, `torch.Generator`) is copied with its state "
    "when the workers start: N workers draw the same numbers for N different samples, and draw "
    "them again in the next epoch. Reported where the class, the constant `num_workers` and the "
    "absence of `worker_init_fn` are seen.",
    bad="""\
import numpy as np
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, samples):
        self.samples = samples
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] + self.rng.normal()


def train(model, samples, optimizer):
    for x in DataLoader(Noisy(samples), batch_size=32, num_workers=4):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
""",
    good="""\
import numpy as np
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] + np.random.normal()


def train(model, samples, optimizer):
    for x in DataLoader(Noisy(samples), batch_size=32, num_workers=4):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
""",
    remedy="Seed the generator in `worker_init_fn` from `torch.initial_seed()`, draw from "
    "`np.random` or `torch`, or make a generator per sample from seed, epoch and index.",
    alert="",
    no_alert="Augmentations that repeat look like augmentations; the probe sees no samples.",
    find=_find_shared_generator,
)


def _find_first_batch(trace: Trace) -> Iterator[Problem]:
    passes = [one for one in backwards(trace) if one.loops]
    for operation in trace.of("next"):
        loader = operation.argument(0)
        if loader is None or not operation.loops or not _takes_first(operation.place.node):
            continue
        loop = loop_of(trace, operation.loops[-1])
        if loop is None or is_made_in(trace, loader, loop) or not _is_in_order(loader):
            continue
        if repeats(trace, operation, loop) and any(
            operation.loops == one.loops and set(operation.path) <= set(one.path) for one in passes
        ):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` makes a new iterator at every pass of the loop: it "
                "trains on the first batch alone",
            )


def _takes_first(node: ast.expr | ast.stmt) -> bool:
    return (
        isinstance(node, ast.Call)
        and bool(node.args)
        and isinstance(node.args[0], ast.Call)
        and isinstance(node.args[0].func, ast.Name)
        and node.args[0].func.id == "iter"
    )


def _is_in_order(loader: Value) -> bool:
    """Return whether a loader certainly begins with the same samples whenever it is iterated."""
    if loader.kind is not ValueKind.LOADER or loader.maybe or not loader.items:
        return False
    shuffle = keyword(loader, 2, "shuffle")
    return (
        is_fixed(loader.items[0])
        and (shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is False))
        and keyword(loader, 3, "sampler") is None
        and keyword(loader, 4, "batch_sampler") is None
    )


FIRST_BATCH = Rule(
    code="MP206",
    name="first-batch",
    severity=FindingSeverity.ERROR,
    summary="`next(iter(loader))` in a training loop takes the first batch at every step.",
    explanation="`iter(loader)` begins a new epoch. Without shuffling, every step trains on the "
    "same samples, and the loss falls nicely. Reported where the trace shows a DataLoader that "
    "does not shuffle, over a dataset whose samples are fixed. With shuffling, each call draws "
    "another batch (and starts the workers again): that is slow, not wrong.",
    bad="""\
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(model, x, y, optimizer, steps):
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    for _ in range(steps):
        inputs, targets = next(iter(loader))
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(model, x, y, optimizer, steps):
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    batches = iter(loader)
    for _ in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        inputs, targets = batch
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    remedy="Make the iterator once, before the loop, or loop over the loader itself.",
    alert="MpAgentSameBatch",
    find=_find_first_batch,
)
