"""Names of layers and experts that count those of the whole model; whole runs: see frameworks."""

from typing import Any

from torch import nn

from mp_agent.probe.engines.megatron_gradients import chunks_of, named_by_chunks


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.proj = nn.Linear(1, 1, bias=False)


class Chunk(nn.Module):
    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module.layers = nn.ModuleList(map(Layer, numbers))


def names_of(*chunks: nn.Module) -> list[str]:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    modules = [module for chunk in chunks for module in chunk.modules()]
    return [each.name for each in named_by_chunks(parameters, chunks_of(parameters, modules))]


def test_layers_of_a_stage_have_the_numbers_of_the_model():
    assert names_of(Chunk(3, 4)) == ["layers.2.proj.weight", "layers.3.proj.weight"]


def test_chunks_stand_in_the_order_of_their_layers():
    late, early = Chunk(5), Chunk(1)
    assert names_of(late, early) == ["layers.0.proj.weight", "layers.4.proj.weight"]


def test_equal_numbers_of_two_models_give_two_names():
    assert len(set(names_of(Chunk(1), Chunk(1)))) == 2


def test_numbered_modules_that_are_no_layers_keep_their_numbers():
    assert names_of(nn.Sequential(nn.Linear(1, 1, bias=False))) == ["0.weight"]


def test_a_parameter_that_two_modules_share_has_the_first_name():
    chunk = Chunk(1, 2)
    layers: Any = chunk.module.layers
    layers[1].proj.weight = layers[0].proj.weight
    assert names_of(chunk) == ["layers.0.proj.weight"]
