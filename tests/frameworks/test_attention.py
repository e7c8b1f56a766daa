"""Attention logits of real models, at small random configurations, against hooks of one's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.probe import Probe
from mp_agent.records.columns import ATTENTION, LOGITS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity, read_ring

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_compiled")]


def gpt2(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=16,
            vocab_size=32,
            n_positions=8,
            attn_implementation=attention,
        )
    )
    return model


def llama(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=16,
            intermediate_size=32,
            vocab_size=32,
            attn_implementation=attention,
        )
    )
    return model


NAMES = {
    gpt2: ("transformer.h.0.attn", "transformer.h.1.attn"),
    llama: ("model.layers.0.self_attn", "model.layers.1.self_attn"),
}


def softmax_inputs(model: nn.Module, tokens: torch.Tensor, monkeypatch: Any) -> list[torch.Tensor]:
    """The logits [B, H, L, S] of each attention, by the implementation that computes them."""
    seen: list[torch.Tensor] = []
    softmax = nn.functional.softmax

    def keep(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(logits.detach().double())
        return softmax(logits, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "softmax", keep)
        model(input_ids=tokens)
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_largest_logits_are_those_that_softmax_is_given(
    make, attention, tmp_path: Path, monkeypatch
):
    torch.manual_seed(0)
    model = make(attention)
    tokens = torch.randint(32, (2, 8))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name:
                parameter.mul_(20.0)  # so that logits differ by more than rounding
    twin = make("eager")
    twin.load_state_dict(model.state_dict())
    expected = [
        float(logits.where(logits > -1e30, -torch.inf).max())
        for logits in softmax_inputs(twin.eval(), tokens, monkeypatch)
    ]
    with torch.no_grad():
        output = twin(input_ids=tokens).logits[:, :-1].double().logsumexp(-1)

    writer = RingWriter.create(tmp_path / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings(measure_attention=True))
    probe.attach(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.flush()
    probe.detach()
    writer.close()

    contents = read_ring(tmp_path / "rank0.ring", one_schema=False)
    names = [layer.name for layer in contents.schema.layers]
    (table,) = [each for each in contents.layers if ATTENTION.name in each.families]
    rows = dict(zip(names, table.families[ATTENTION.name].tolist(), strict=True))
    found = {name: row for name, row in rows.items() if row[0] == row[0]}
    assert tuple(found) == NAMES[make]
    for row, largest in zip(found.values(), expected, strict=True):
        assert row[2] == pytest.approx(largest, rel=1e-4)
        assert row[1] == 0.0
    of_loss = table.families[LOGITS.name][names.index("output")]
    assert of_loss[0] == output.numel()
    assert of_loss[3] == pytest.approx(float(output.max()), rel=1e-4)
