"""Outputs of modules of real models, at small random configurations."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mp_agent.probe.probe import Probe
from mp_agent.records.columns import ACTIVATIONS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity, read_ring

pytestmark = pytest.mark.slow

Loss = Callable[[], torch.Tensor]


def gpt2() -> tuple[nn.Module, Loss, set[str]]:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    )
    tokens = torch.randint(32, (2, 8))
    named = {"transformer.h.0.attn.c_attn", "transformer.h.1.mlp.act", "lm_head"}
    return model, lambda: model(input_ids=tokens, labels=tokens).loss, named


def llama() -> tuple[nn.Module, Loss, set[str]]:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            hidden_size=16,
            intermediate_size=32,
            vocab_size=32,
        )
    )
    tokens = torch.randint(32, (2, 8))
    named = {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"}
    return model, lambda: model(input_ids=tokens, labels=tokens).loss, named


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.norm(self.conv(inputs)).relu()
        return outputs


def resnet() -> tuple[nn.Module, Loss, set[str]]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), _Residual(), nn.Flatten(), nn.Linear(4 * 36, 5))
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    return model, lambda: model(images).square().mean(), {"0", "1.conv", "1.norm", "3"}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.lstm = nn.LSTM(4, 8, num_layers=2)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return outputs


def recurrent() -> tuple[nn.Module, Loss, set[str]]:
    model = _Recurrent()
    tokens = torch.randint(16, (6, 2))
    return model, lambda: model(tokens).square().mean(), {"embedding", "lstm", "head"}


@pytest.mark.parametrize("make", [gpt2, llama, resnet, recurrent])
def test_the_largest_magnitudes_are_those_that_hooks_of_ones_own_see(make, tmp_path: Path):
    torch.manual_seed(0)
    model, loss, named = make()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    writer = RingWriter.create(tmp_path / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings(measure_activations=True))
    probe.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: dict[str, float] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor):
                seen[name] = float(output.detach().double().abs().max())

        return hook

    for _ in range(2):
        handles = [each.register_forward_hook(keep(name)) for name, each in model.named_modules()]
        loss().backward()
        for handle in handles:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    probe.flush()
    probe.detach()
    writer.close()

    contents = read_ring(tmp_path / "rank0.ring")
    (rows,) = [
        table.families[ACTIVATIONS.name]
        for table in contents.layers
        if ACTIVATIONS.name in table.families
    ]
    found = {
        layer.name: row[ACTIVATIONS.names.index("abs_max")]
        for layer, row in zip(contents.schema.layers, rows.tolist(), strict=True)
        if row[0] == row[0]
    }
    assert named <= found.keys()
    compared = found.keys() & seen.keys()
    assert named - {"lstm"} <= compared
    for name in compared:
        assert found[name] == seen[name], name
