"""Of models of Transformers, those whose tied weights were parted are found, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.recording.parameter_census import TiedWeights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about each other
]
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def make_gpt2(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=16, bos_token_id=0, eos_token_id=0, **settings
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def make_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=16,
        tie_word_embeddings=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def make_t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=8,
        d_kv=8,
        d_ff=8,
        num_layers=1,
        num_heads=1,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def part(model: nn.Module) -> nn.Module:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def adapt(model: nn.Module, **settings: object) -> nn.Module:
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **settings)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def parted(model: nn.Module) -> list[str]:
    """Return what is found after a backward."""
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    return TiedWeights().parted(model)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_state_loaded_by_assignment_parts_them():
    assert parted(part(make_gpt2())) == ["transformer.wte.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "make",
    [
        make_gpt2,
        make_llama,
        make_t5,
        lambda: part(make_gpt2(tie_word_embeddings=False)),
        lambda: adapt(make_gpt2()),
        lambda: adapt(make_gpt2(), modules_to_save=["lm_head"]),
        lambda: adapt(make_gpt2(), modules_to_save=["wte", "lm_head"]),
        lambda: adapt(part(make_gpt2())),
    ],
)
def test_models_in_good_health_have_none(make: Callable[[], nn.Module]):
    assert parted(make()) == []


@pytest.mark.parametrize("keeps", [False, True])
def test_wrapped_models_have_none(group, keeps: bool):
    wrapped: tuple[Any, ...] = (
        DistributedDataParallel(make_gpt2()),
        FullyShardedDataParallel(make_gpt2(), use_orig_params=keeps, device_id=torch.device("cpu")),
        fully_shard(make_gpt2(), mesh=init_device_mesh("cpu", (1,))),
    )
    assert [parted(model) for model in wrapped] == [[], [], []]
