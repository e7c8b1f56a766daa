"""What is wrong with batches: what repeats in them, and targets that are no next tokens, or seen.

Batches are looked at in pairs of neighbouring steps, with one hook on the model that is gone with
the first backward, whose batch is the last one before it: an agent may have acted until then, with
gradients enabled, on one observation at a time. The digest stays on the device of the batch, and
goes the way of a loss from there.

Targets, and the tokens that a model embeds, are read of the graph of a loss: a cross-entropy keeps
the ones, and an embedding what it was given, which is what a model has made of its inputs: shifted
to the right, or masked.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants, on_one_device
from mp_agent.probe.instruments.attention_logits import attention_in, next_seen
from mp_agent.probe.instruments.instrument import Instrument, PreForwardHook, Run
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.data import Loaders, Seeds
from mp_agent.probe.step.loss_graph import LIKELIHOODS, LOOK_INTERVAL_STEPS, nodes_near, saved
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import (
    BATCH_DIGEST,
    BATCH_INTERVAL_STEPS,
    BATCH_KEPT,
    BATCH_LOADED,
    BATCH_ROWS,
    EPOCH_REPEATED,
    LOADED_BY_WORKERS,
    PADDING_IN_TARGETS,
    SEED_REPEATED,
    TARGETS_MISALIGNED,
    TARGETS_SEEN,
)

_TENSORS = 4
_ELEMENTS = 256
"""Elements of each tensor that the digest is of."""
_ALONG = 16
"""The most of them along any dimension but the last."""
_BYTES_AT_MOST = 16
_WEIGHTS = tuple(
    2654435761 * (2 * place + 1) % 2**31 for place in range(_TENSORS * _ELEMENTS * _BYTES_AT_MOST)
)
_DIGEST_BITS = 2**32 - 1

_Origin = tuple[weakref.ref[torch.Tensor] | None, int]


class Repetitions(Instrument):
    """Notes in a step what it repeats of earlier ones: their random numbers, or their batches."""

    subject = "repetitions"
    begins = "once used"

    def __init__(self, loaders: Loaders, seeds: Seeds) -> None:
        self._loaders = loaders
        self._seeds = seeds

    def backward_begins(self, step: OpenStep) -> None:
        """Add to the step what its batch, and the random numbers until now, repeat."""
        if self._loaders.backward_begins():
            step.scalars[EPOCH_REPEATED] = 1.0
        if self._seeds.backward_begins(step.sequence):
            step.scalars[SEED_REPEATED] = 1.0


class Batches(Instrument):
    """Has a hook on the model from one backward to the first one of the next step, if due."""

    subject = "batches"

    def __init__(
        self,
        run: Run,
        in_training: Callable[[], bool],
        loaders: Loaders,
        targets: "TokenTargets",
        model: Callable[[], nn.Module | None],
        sequence: Callable[[], int],
    ) -> None:
        """model: returns the run's. sequence: returns the number of the step under way."""
        self._hook = PreForwardHook(run, self._forward_begins)
        self._in_training = in_training
        self._loaders = loaders
        self._targets = targets
        self._model = model
        self._sequence = sequence
        self._constants = DeviceConstants()
        self._handle: RemovableHandle | None = None
        self._awaited = 0
        """Number of the step whose forward is awaited."""
        self._has_begun = False
        """There was such a forward."""
        self._found: dict[str, Scalar] = {}
        self._latest: _Origin = (None, 0)
        """The first tensor of the last forward, and what loaders had delivered."""
        self._before: _Origin = (None, 0)
        """The same of the step before."""

    def end(self, step: OpenStep) -> None:
        """Add to the step what was found in its last forward; await those of the next one.

        A backward before its forward, such as a discriminator's, changes nothing.
        """
        if self._found:
            step.scalars.update(self._found)
            self._found = {}
            self._before = self._latest
        if self._awaited > step.sequence:
            return
        if self._awaited == step.sequence and self._handle is not None and not self._has_begun:
            return
        self.close()
        self._awaited = step.sequence + 1
        if not self._is_compared and self._awaited % LOOK_INTERVAL_STEPS:
            return
        model = self._model()
        if model is not None and not isinstance(model, torch.jit.ScriptModule):
            self._handle = nn.Module.register_forward_pre_hook(
                model, self._hook, prepend=True, with_kwargs=True
            )

    def close(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        self._has_begun = False
        if handle is not None:
            handle.remove()

    @property
    def _is_compared(self) -> bool:
        return self._awaited % BATCH_INTERVAL_STEPS in (0, 1)

    def _forward_begins(self, inputs: Sequence[object], named: Mapping[str, object]) -> None:
        due = self._handle is not None and self._sequence() == self._awaited
        if not due or not self._in_training():
            return
        self._has_begun = True
        if self._awaited % LOOK_INTERVAL_STEPS == 0:
            self._targets.given(self._model(), (named, *inputs))
        if not self._is_compared:
            return
        tensors = list(islice(_tensors((inputs, named)), _TENSORS))
        if not tensors:
            return
        digest = self._digest(tensors)
        if digest is not None:
            self._found[BATCH_DIGEST] = digest
        first = next((each for each in tensors if each.dim()), None)
        if first is not None:
            self._found[BATCH_ROWS] = float(first.shape[0])
        self._note_origin(tensors[0] if tensors[0]._base is None else tensors[0]._base)

    def _note_origin(self, memory: torch.Tensor) -> None:
        """Note whether this is the memory of the step before, and whether a loader delivered."""
        delivered = self._loaders.delivered
        before, delivered_before = self._before
        if self._awaited % BATCH_INTERVAL_STEPS and before is not None:
            self._found[BATCH_KEPT] = float(before() is memory)
            if delivered:
                new = delivered > delivered_before
                of_workers = new and self._loaders.from_workers
                self._found[BATCH_LOADED] = LOADED_BY_WORKERS if of_workers else float(new)
        self._latest = weakref.ref(memory), delivered

    def _digest(self, tensors: Sequence[torch.Tensor]) -> Scalar | None:
        parts = [_some_of(each.detach()) for each in tensors]
        digest = crc32(repr([tuple(each.shape) for each in tensors]).encode())
        if all(accelerator.is_on_host(part.device) for part in parts):
            for part in parts:
                digest = crc32(part.view(torch.uint8).numpy().data, digest)
            return float(digest)
        bits_N = torch.cat(on_one_device([_bits(part) for part in parts]))
        weights_N = self._constants.on(bits_N.device, _WEIGHTS)[: bits_N.numel()]
        return scalar_of(((bits_N * weights_N).sum() + digest) & _DIGEST_BITS)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield plain tensors, with any elements, among what a module gets."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if plain and value.numel() and accelerator.is_supported(value.device):
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of elements [N], evenly spread: of the batch first, and none at the border."""
    left = _ELEMENTS
    places: list[slice] = []
    for size in tensor.shape:
        kept = min(size, left if len(places) == tensor.dim() - 1 else min(left, _ALONG))
        stride = -(-size // kept)
        places.append(slice(stride // 2, None, stride))
        left = max(1, left // kept)
    return tensor[tuple(places)].resolve_conj().resolve_neg().contiguous().reshape(-1)


def _bits(part: torch.Tensor) -> torch.Tensor:
    """Return the elements [N] as int64, floating point ones by their bits."""
    if part.is_floating_point() or part.is_complex():
        return part.view(torch.uint8).to(torch.int64)
    return part.to(torch.int64)


_EMBEDDING_NODES = 1024
"""Nodes that are gone through to an embedding, along the first operands."""
_EMBEDDINGS = 4
_LOOKS_WITHOUT = 3
"""Looks at a model that has shown no tokens after which it is not looked at again."""
_TARGETS_AT_LEAST = 32
_NEXT = 0.9
"""Share of the targets that are the next tokens from which on they are meant to be."""
_OTHERS = 0.5
"""Share of them below which they are not."""
_PADDING = 0.1
"""Share of padding among the targets that makes a difference."""
_FILLING_AT_LEAST = 4
"""Tokens of one kind at the end of a row that are taken for padding."""
_NO_PADDING_INDEX = 2**63
"""From which on an index is a negative one that torch has kept without its sign."""


class TokenTargets:
    """Compares the targets of a model's losses with the tokens that it embeds."""

    def __init__(self) -> None:
        self._mask: weakref.ref[torch.Tensor] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._looks_without = 0

    def given(self, model: nn.Module | None, arguments: Iterable[object]) -> None:
        """Note what the run's model is called with: the attention mask [B, T] by that name."""
        if model is not None and (self._model is None or self._model() is not model):
            self._model, self._looks_without = weakref.ref(model), 0
        named = (each for each in arguments if isinstance(each, Mapping))
        mask = next((each["attention_mask"] for each in named if "attention_mask" in each), None)
        self._mask = weakref.ref(mask) if type(mask) is torch.Tensor else None

    def mistakes_of(self, roots: object) -> Mapping[str, Scalar]:
        """Return by column whether something is wrong with the targets of the losses in a graph.

        Of compiled graphs, and of losses in functions of a library's own, nothing is known.
        """
        mask, self._mask = None if self._mask is None else self._mask(), None
        if self._looks_without >= _LOOKS_WITHOUT:
            return {}
        losses = [node for node in nodes_near(roots) if node.name() in LIKELIHOODS]
        sources = list(_sources(losses))
        embeddings = list(islice(_embedded(sources), _EMBEDDINGS))
        by_embedding = {
            node: [pair for loss in losses if (pair := _pair_of(loss, tokens_BT, index))]
            for node, tokens_BT, index in embeddings
        }
        pairs = [pair for found in by_embedding.values() for pair in found]
        self._looks_without = 0 if pairs else self._looks_without + 1
        if not pairs:
            return {}
        device = pairs[0][0].device
        mask = None if mask is None or mask.device != device else mask
        shares = [_shares(*pair, mask) for pair in pairs if pair[0].device == device]
        most_next = torch.stack([each[0] for each in shares]).amax()
        misaligned = torch.stack([each[1] for each in shares]).any() & (most_next < _OTHERS)
        padded = torch.stack([each[2] for each in shares]).any()
        found = {TARGETS_MISALIGNED: misaligned, PADDING_IN_TARGETS: padded}
        if (seen := _seen(by_embedding, sources)) is not None:
            found[TARGETS_SEEN] = seen
        flags = {column: scalar_of(flag.double()) for column, flag in found.items()}
        return {column: flag for column, flag in flags.items() if flag is not None}


def _embedded(sources: Iterable[Any]) -> Iterator[tuple[Any, torch.Tensor, int | None]]:
    """Yield nodes of embeddings with their tokens [B, T], and the index of padding."""
    for node in sources:
        tokens = saved(node, "indices") if node.name() == "EmbeddingBackward0" else None
        if tokens is not None and 1 <= tokens.dim() <= 2:
            index = int(node._saved_padding_idx)
            declared = 0 <= index < _NO_PADDING_INDEX
            yield node, tokens if tokens.dim() == 2 else tokens[None], index if declared else None


def _sources(losses: Sequence[Any]) -> Iterator[Any]:
    """Yield what losses were computed from, along first operands first, as residuals often are."""
    waiting, seen = list(losses), set(losses)
    while waiting and len(seen) <= _EMBEDDING_NODES:
        node = waiting.pop()
        yield node
        found = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(found)
        waiting += reversed(found)


_Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int | None]


def _pair_of(node: Any, tokens_BT: torch.Tensor, padding_index: int | None) -> _Pair | None:
    """Return targets [B, S] of as many tokens, which of them count, the tokens, and the padding."""
    targets = saved(node, "target")
    rows, columns = tokens_BT.shape
    if targets is None or not rows or targets.device != tokens_BT.device:
        return None
    width, rest = divmod(targets.numel(), rows)
    if rest or width < 4 or not columns - 2 <= width <= columns:
        return None
    targets_BS = targets.reshape(rows, width)
    return targets_BS, targets_BS != node._saved_ignore_index, tokens_BT, padding_index


def _shares(
    targets_BS: torch.Tensor,
    counts_BS: torch.Tensor,
    tokens_BT: torch.Tensor,
    padding_index: int | None,
    mask_BT: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the share of the next tokens, and whether others, or padding, are the targets.

    Others: each token itself, or the one after the next, which a second shift leaves.
    """
    width = targets_BS.shape[1]
    enough = counts_BS.sum() >= _TARGETS_AT_LEAST

    def agreement(shift: int) -> torch.Tensor:
        shifted_BS = tokens_BT[:, shift : shift + width]
        ahead = shifted_BS.shape[1]
        counts = counts_BS[:, :ahead]
        equal = (targets_BS[:, :ahead] == shifted_BS) & counts
        return equal.sum() / counts.sum().clamp(min=1)

    following = agreement(1)
    others = (agreement(0) == 1.0) | (agreement(2) > _NEXT)
    padding_BT = _padding(tokens_BT, padding_index, mask_BT)[:, 1 : 1 + width]
    padded = padding_BT & counts_BS[:, : padding_BT.shape[1]]
    many = (following >= _NEXT) & (padded.sum() > _PADDING * counts_BS.sum())
    return following, others & enough, many & enough


def _seen(pairs: Mapping[Any, Sequence[_Pair]], sources: Sequence[Any]) -> torch.Tensor | None:
    """Return whether all attention over the tokens goes from each to the next, its target.

    None where no attention is seen. Where several embeddings have such tokens, one may be that of
    an encoder, which is to see them all.
    """
    attention = attention_in(sources)
    matched: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    for embedding, found in pairs.items():
        upright = [pair[:3] for pair in found]
        # The time may come first.
        upright += [(pair[0].t(), pair[1].t(), pair[2].t()) for pair in found if _is_even(pair)]
        are_next = [_are_next(*each) for each in upright]
        matched += [torch.stack(are_next).any()] if are_next else []
        for (_, counts_BS, tokens_BT), is_next in zip(upright, are_next, strict=True):
            if accelerator.is_on_host(is_next.device) and not is_next:
                continue
            layers = next_seen(attention, embedding, tokens_BT.shape[1])
            if layers and layers[0].device == tokens_BT.device:
                shares = [_share_of(each, counts_BS) for each in layers]
                seen.append(is_next & (torch.stack(shares).amin() > _OTHERS))
    if not seen:
        return None
    device = seen[0].device
    only = torch.stack([each for each in matched if each.device == device]).sum() == 1
    return torch.stack([each for each in seen if each.device == device]).any() & only


def _is_even(pair: _Pair) -> bool:
    return pair[0].shape == pair[2].shape


def _are_next(
    targets_BS: torch.Tensor, counts_BS: torch.Tensor, tokens_BT: torch.Tensor
) -> torch.Tensor:
    """Return whether all targets that count are the next tokens, which are not all the same."""
    width = min(targets_BS.shape[1], tokens_BT.shape[1] - 1)
    targets, counts = targets_BS[:, :width], counts_BS[:, :width]
    others = ((targets != tokens_BT[:, 1 : 1 + width]) & counts).any()
    same = ((targets == tokens_BT[:, :width]) & counts).sum()
    return ~others & (counts.sum() >= _TARGETS_AT_LEAST) & (same < _OTHERS * counts.sum())


def _share_of(seen: torch.Tensor, counts_BS: torch.Tensor) -> torch.Tensor:
    """Return the share of the targets that a layer's attention sees, by any of its heads."""
    rows, width = counts_BS.shape[0], min(counts_BS.shape[1], seen.shape[-1])
    per_row = seen.numel() % (rows * seen.shape[-1]) == 0
    seen_BS = seen.reshape(rows if per_row else 1, -1, seen.shape[-1]).any(1)[:, :width]
    counts = counts_BS[:, :width]
    return (seen_BS & counts).sum() / counts.sum().clamp(min=1)


def _padding(
    tokens_BT: torch.Tensor, padding_index: int | None, mask_BT: torch.Tensor | None
) -> torch.Tensor:
    """Return where a mask has zeros, or else where padding is repeated [B, T].

    The first of it may end the sequence, and is meant to be learned.
    """
    if mask_BT is not None and mask_BT.shape == tokens_BT.shape:
        return _of_one_token(tokens_BT, mask_BT == 0)
    found_BT = _filling(tokens_BT) if padding_index is None else tokens_BT == padding_index
    return functional.pad(found_BT[:, 1:] & found_BT[:, :-1], (1, 0))


def _of_one_token(tokens_BT: torch.Tensor, masked_BT: torch.Tensor) -> torch.Tensor:
    """Return where tokens are masked if all of them are one token [B, T].

    Others are a text: a mask of a model's own may have zeros where it has tokens.
    """
    highest = tokens_BT.masked_fill(~masked_BT, -1).amax()
    lowest = tokens_BT.masked_fill(~masked_BT, torch.iinfo(tokens_BT.dtype).max).amin()
    return masked_BT & (highest == lowest)


def _filling(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return where rows end in one token, the same for all, that occurs nowhere else [B, T]."""
    last_B1 = tokens_BT[:, -1:]
    run_BT = (tokens_BT == last_B1).flip(1).int().cumprod(1).flip(1).bool()
    fills_B1 = run_BT.sum(1, keepdim=True) >= _FILLING_AT_LEAST
    filling = torch.where(fills_B1, last_B1, -1).amax()
    run_BT &= fills_B1
    is_padding = ((tokens_BT == filling) == run_BT).all() & ~run_BT.all()
    return run_BT & is_padding
