"""What the user says of placements; wrong words are refused by name and value."""

import gc

import pytest
import torch
from torch import nn

import mp_agent
from mp_agent.errors import SettingError
from mp_agent.probe.placement import declarations
from tests.agent.probe.rings import read_ring
from tests.subtests import each


@each(
    ("arguments", "message"),
    [
        ({"target": 3}, "target has value 3: must be a module or a parameter"),
        ({"shard": "all"}, "shard has value 'all': must be a process group, a device mesh or"),
        ({"shard": 4}, "shard has value 4: must be a process group, a device mesh or"),
        ({"replicate": [0, 1]}, r"replicate has value \[0, 1\]: must hold ranks from 0 to 0"),
        ({"replicate": [0, 0]}, r"replicate has value \[0, 0\]: holds a rank twice"),
        ({"shard": []}, r"shard has value \[\]: does not hold this rank, 0"),
        ({"shard": [True]}, r"shard has value \[True\]: must hold ranks"),
        ({"counted": 1}, "counted has value 1: must be True or False"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_value(arguments, message):
    generation = declarations.generation
    with pytest.raises(SettingError, match=message):
        mp_agent.declare(**{"target": nn.Linear(1, 1), **arguments})
    assert declarations.generation == generation


def test_shards_and_copies_on_the_same_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SettingError, match=r"replicate has value \[0, 1\]: shares ranks with"):
        mp_agent.declare(nn.Linear(1, 1), shard=[0, 1], replicate=[0, 1])


@pytest.mark.slow
def test_a_declaration_keeps_nothing_alive():
    before = len(declarations.by_parameter())
    module, parameter = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    mp_agent.declare(module)
    mp_agent.declare(parameter, counted=False)
    assert len(declarations.by_parameter()) == before + 3
    del module, parameter
    gc.collect()
    assert len(declarations.by_parameter()) == before


@pytest.mark.slow
def test_a_declaration_after_the_first_step_counts_from_the_next_one_on(watch):
    watched, model = watch(ranks_in_run=2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if step == 1:
            mp_agent.declare(model.bias, counted=False)
        optimizer.step()
    contents = read_ring(watched.writer.path, one_schema=False)
    elements = [record.gradients[:, 5].sum() for record in contents.records]
    assert elements == [3, 2]
    assert contents.state.unsupported == ()
