"""Trainings to measure: transformers of two sizes, in FP32, BF16 or FP16."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a transformer and of its batch."""

    name: str
    width: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    """Number of tokens of each sequence."""
    experts: int = 0
    """After each layer of the transformer, of which each token takes `EXPERTS_CHOSEN`."""


TINY = Shape("0.1 M parameters", 64, 2, 4, 64, 2, 16)
SMALL = Shape("5 M parameters", 256, 6, 8, 512, 16, 256)
GPT2_MEDIUM = Shape(
    "the layers of GPT-2 medium, 405 M parameters (embeddings not tied)",
    1024,
    24,
    16,
    50_257,
    8,
    1024,
)
MIXTURE = Shape("30 M parameters, 8 experts in each of 6 layers", 256, 6, 8, 512, 4, 256, 8)
SHAPES = {"tiny": TINY, "mixture": MIXTURE, "small": SMALL, "gpt2-medium": GPT2_MEDIUM}
EXPERTS_CHOSEN = 2
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Mixture(nn.Module):
    """Experts, of which `gate` chooses some for each token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, inputs_BTW: torch.Tensor) -> torch.Tensor:
        """Return the inputs [B, T, W] with what the experts add."""
        inputs_NW = inputs_BTW.flatten(0, 1)
        shares_NK, chosen_NK = self.gate(inputs_NW).softmax(-1).topk(EXPERTS_CHOSEN)
        outputs_NW = inputs_NW.clone()
        for number, expert in enumerate(self.experts):
            tokens, places = (chosen_NK == number).nonzero(as_tuple=True)
            weighted = expert(inputs_NW[tokens]) * shares_NK[tokens, places, None]
            outputs_NW.index_add_(0, tokens, weighted)
        return outputs_NW.view_as(inputs_BTW)


class Training(NamedTuple):
    """What is trained, and one step of it."""

    what: str
    model: nn.Module
    step: Callable[[Callable[[], None]], None]
    """Calls its argument once the gradients are there and unscaled, before it clips them."""


class CausalLayer(nn.TransformerEncoderLayer):
    """A layer in which no token sees those that follow."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(states.shape[1], states.device)
        return super().forward(states, mask, is_causal=True)


def make_model(shape: Shape) -> nn.Module:
    """Return a transformer, from tokens to logits."""
    layers: list[nn.Module] = []
    for _ in range(shape.layers):
        layers.append(CausalLayer(shape.width, shape.heads, 4 * shape.width, 0.0, batch_first=True))
        if shape.experts:
            layers.append(Mixture(shape.width, shape.experts))
    embedding = nn.Embedding(shape.vocabulary, shape.width)
    return nn.Sequential(embedding, *layers, nn.Linear(shape.width, shape.vocabulary))


def make_training(
    device: torch.device, shape: Shape = SMALL, precision: torch.dtype = torch.float32
) -> Training:
    """Return a training of a transformer on random tokens; FP16 has a GradScaler.

    Where there is a process group, each of its ranks calls this; gradients are averaged over them.
    """
    torch.manual_seed(0)
    model = make_model(shape).to(device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
    text = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device=device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].flatten()

    def step(log: Callable[[], None]) -> None:
        with torch.autocast(device.type, precision, enabled=precision is not torch.float32):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        log()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    dtype = next(name for name, each in PRECISIONS.items() if each is precision).upper()
    what = f"{shape.name}, {dtype}, {shape.batch} x {shape.length} tokens"
    if ranks > 1:
        what += f", DDP on {ranks} ranks"
    return Training(what, model, step)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let users choose what is trained, and where."""
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")


def chosen_training(arguments: argparse.Namespace) -> Training:
    """Return what was chosen."""
    return make_training(arguments.device, SHAPES[arguments.model], PRECISIONS[arguments.precision])
