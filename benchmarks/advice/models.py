"""Models for `mp-agent recommend` and `evaluate`: each function returns (model, batches, loss).

$ mp-agent recommend benchmarks/advice/models.py:gpt2
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_BATCHES = 64
Made = tuple[nn.Module, Iterator[Any], Any]


def gpt2() -> Made:
    """Return GPT-2 with two layers and its own vocabulary of 50 257, on sequences that repeat."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config), _sequences(config.vocab_size, 4, 64), None


def vit() -> Made:
    """Return a ViT with four layers on random images, whose class is their brightest channel."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_labels=3,
    )
    return ViTForImageClassification(config), _images(), None


def lstm() -> Made:
    """Return a tagger with two LSTM layers of 200 units."""
    torch.manual_seed(0)
    return _Tagger(), _tags(), nn.CrossEntropyLoss()


def odd_mlp() -> Made:
    """Return a classifier whose layers have 1001 and 333 features."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(100, 1001), nn.GELU(), nn.Linear(1001, 333), nn.GELU(), nn.Linear(333, 10)
    )
    return model, _points(), nn.CrossEntropyLoss()


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 100)
        self.lstm = nn.LSTM(100, 200, num_layers=2, batch_first=True)
        self.head = nn.Linear(200, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(tokens))
        logits: Tensor = self.head(states)
        return logits.flatten(0, 1)


def _sequences(vocabulary: int, batch: int, length: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_BATCHES):
        half = torch.randint(0, vocabulary, (batch, length // 2), generator=generator)
        tokens = torch.cat((half, half), 1)
        yield {"input_ids": tokens, "labels": tokens}


def _images() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_BATCHES):
        images = torch.randn(8, 3, 64, 64, generator=generator)
        labels = torch.randint(0, 3, (8,), generator=generator)
        images[torch.arange(8), labels] += 0.5
        yield {"pixel_values": images, "labels": labels}


def _tags() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_BATCHES):
        tokens = torch.randint(0, 500, (16, 32), generator=generator)
        yield tokens, (tokens % 20).flatten()


def _points() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_BATCHES):
        points = torch.randn(64, 100, generator=generator)
        yield points, points[:, :10].argmax(1)


MODELS = {"gpt2": gpt2, "vit": vit, "lstm": lstm, "odd_mlp": odd_mlp}
