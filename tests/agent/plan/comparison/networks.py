"""Models that others publish, small and with random weights, each with a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any, Any]


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config), _tokens(), None


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config), _tokens(), None


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
    )
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 0, 1])}
    return ViTForImageClassification(config), batch, None


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, 12))
    return {"input_ids": tokens, "labels": tokens}


class ResidualBlock(nn.Module):
    """The basic block of ResNet-18, in-place operations included."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        activated: torch.Tensor = self.relu(out)
        return activated


def resnet() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        ResidualBlock(8, 8, 1),
        ResidualBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return model, (torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))), nn.CrossEntropyLoss()


class Recurrent(nn.Module):
    """An LSTM, and a cell that is called once for each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2)
        self.cell = nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, (hidden, _) = self.lstm(x)
        state = hidden[-1]
        for output in outputs:
            state = self.cell(output, state)
        logits: torch.Tensor = self.head(state)
        return logits


def rnn() -> Made:
    return Recurrent(), (torch.randn(5, 6, 8), torch.randint(0, 4, (6,))), nn.CrossEntropyLoss()


NETWORKS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "resnet": resnet,
    "rnn": rnn,
}


def made(name: str) -> Made:
    """Return a network with the same weights and batch every time."""
    torch.manual_seed(7)
    return NETWORKS[name]()
