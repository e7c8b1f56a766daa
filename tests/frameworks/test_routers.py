"""Routers of real models, at small random configurations, against the models' own logits."""

from math import log, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.probe import Probe
from mp_agent.records.columns import ROUTERS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity, read_ring

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_compiled")]

COMMON = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "vocab_size": 32,
    "num_experts_per_tok": 2,
}


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**COMMON, num_local_experts=4)
    )
    return model


def qwen2_moe() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **COMMON, num_experts=6, moe_intermediate_size=8, shared_expert_intermediate_size=8
        )
    )
    return model


def qwen3_moe() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, num_experts=6, moe_intermediate_size=8)
    )
    return model


def gpt_oss() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**COMMON, num_local_experts=4, head_dim=8)
    )
    return model


def switch() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            d_model=16,
            d_ff=16,
            d_kv=8,
            num_heads=2,
            num_layers=2,
            num_decoder_layers=2,
            num_experts=4,
            vocab_size=32,
            expert_capacity=3,
            router_jitter_noise=0.0,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    return model


CAUSAL = ("model.layers.0.mlp.{}", "model.layers.1.mlp.{}")


def trained(
    model: nn.Module, inputs: dict[str, torch.Tensor], directory: Path
) -> dict[str, dict[str, float]]:
    """Train for two steps without changing weights; return the rows of the second by router."""
    writer = RingWriter.create(directory / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings(measure_routers=True))
    probe.attach(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.flush()
    probe.detach()
    writer.close()
    contents = read_ring(directory / "rank0.ring", one_schema=False)
    names = [layer.name for layer in contents.schema.layers]
    (table,) = [each for each in contents.layers if ROUTERS.name in each.families]
    return {
        name: dict(zip(ROUTERS.names, row, strict=True))
        for name, row in zip(names, table.families[ROUTERS.name].tolist(), strict=True)
        if row[0] == row[0]
    }


def expected_row(logits: torch.Tensor, top_k: int) -> dict[str, float]:
    logits_TE = logits.detach().reshape(-1, logits.shape[-1]).double()
    experts = logits_TE.shape[-1]
    load = torch.bincount(logits_TE.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    shares = logits_TE.softmax(-1)
    return {
        "tokens": float(len(logits_TE)),
        "nonfinite_tokens": 0.0,
        "entropy_tokens": float(len(logits_TE)),
        "entropy_sum": float(-(shares * shares.log()).sum()) / log(experts),
        "logit_abs_max": float(logits_TE.abs().max()),
        "load_max": float(load.max()) / (len(logits_TE) * top_k / experts),
        "experts": float(experts),
        "unused_experts": float((load == 0).sum()),
        "limited_choices": nan,
        "dropped_choices": nan,
    }


def randomize(model: nn.Module) -> None:
    """Let no two logits be alike: some models begin with routers of zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name:
                parameter.normal_()


def approximately(row: dict[str, float]) -> Any:
    return pytest.approx(row, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("make", [mixtral, qwen2_moe, qwen3_moe, gpt_oss])
def test_rows_are_those_of_the_logits_that_the_model_returns(make, tmp_path):
    torch.manual_seed(0)
    model = make()
    randomize(model)
    tokens = torch.randint(32, (2, 8))
    with torch.no_grad():
        output = model.train()(input_ids=tokens, output_router_logits=True)
    found = trained(model, {"input_ids": tokens, "labels": tokens}, tmp_path)

    name = "router" if make is gpt_oss else "gate"
    assert tuple(found) == tuple(each.format(name) for each in CAUSAL)
    assert len(output.router_logits) == 2
    for row, logits in zip(found.values(), output.router_logits, strict=True):
        assert row == approximately(expected_row(logits, top_k=2))


def test_switch_transformers_report_which_tokens_were_dropped(tmp_path):
    torch.manual_seed(0)
    model = switch()
    randomize(model)
    tokens = torch.randint(1, 32, (2, 8))
    inputs = {"input_ids": tokens, "labels": tokens}
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: output[2]})
        )
        for name, module in model.named_modules()
        if name.endswith("mlp.router")
    ]
    with torch.no_grad():
        model.train()(**inputs)
    for hook in hooks:
        hook.remove()
    found = trained(model, inputs, tmp_path)

    assert found.keys() == seen.keys() and len(found) == 2
    for name, row in found.items():
        load = [
            torch.bincount(sequence.argmax(-1), minlength=4).tolist() for sequence in seen[name]
        ]
        beyond = sum(max(0, count - 3) for counts in load for count in counts)
        assert row == approximately(
            {**expected_row(seen[name], 1), "limited_choices": 16.0, "dropped_choices": beyond}
        )
    assert any(row["dropped_choices"] > 0.0 for row in found.values())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_deepspeeds_gate_reports_its_load_and_what_it_dropped(top_k, sparse):
    sharded_moe = pytest.importorskip("deepspeed.moe.sharded_moe")
    from mp_agent.probe.instruments.router_gates import read_of_class
    from mp_agent.probe.instruments.routers import router_row

    torch.manual_seed(1)
    gate = sharded_moe.TopKGate(
        8, 4, k=top_k, capacity_factor=0.5, min_capacity=1, top2_2nd_expert_sampling=False
    )
    inputs = torch.randn(24, 8)
    output = gate(inputs, None, sparse)
    read = read_of_class(gate)
    assert read is not None
    routing = read(gate, (inputs,), output)
    assert routing is not None
    row = router_row(routing)
    assert row is not None

    logits = inputs @ gate.wg.weight.T
    load = torch.bincount(logits.topk(top_k, dim=-1).indices.flatten(), minlength=4)
    capacity = -(-24 * top_k // 8)  # half of an even share
    beyond = float((load - capacity).clamp(min=0).sum())
    assert beyond > 0.0
    assert dict(zip(ROUTERS.names, row.tolist(), strict=True)) == approximately(
        {
            **expected_row(logits, top_k),
            "limited_choices": 24.0 * top_k,
            "dropped_choices": beyond,
        }
    )
