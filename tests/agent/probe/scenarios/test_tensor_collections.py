"""Collections on their way into the ring: whenever they are defined, and at no step's cost."""

from collections.abc import Iterator

import pytest
import torch

import mp_agent
from mp_agent.errors import SettingError
from mp_agent.probe.instruments.tensors import tensor_collections
from mp_agent.records.schema import Schema
from mp_agent.records.tensor_collections import FACT, decode_collections
from tests.agent.probe.rings import read_ring


@pytest.fixture(autouse=True)
def none_defined() -> Iterator[None]:
    tensor_collections.clear()
    yield
    tensor_collections.clear()


def train(steps: int) -> Iterator[int]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def names(schema: Schema) -> list[str]:
    return [collection.name for collection in decode_collections(schema.fact(FACT))]


def test_what_is_defined_before_the_first_step_is_in_the_first_schema(watch):
    mp_agent.collection("weights", include="weight")
    watched = watch()
    list(train(3))
    contents = watched.read()

    assert [names(schema) for schema in contents.record_schemas] == [["weights"]] * 3


def test_what_is_defined_later_counts_from_the_next_step_on_and_no_step_is_lost(watch):
    watched = watch(layer_interval=1)
    for step in train(6):
        if step == 2:
            mp_agent.collection("weights", include="weight")
        if step == 4:
            mp_agent.collection("biases", include="bias")
    contents = read_ring(watched.writer.path, one_schema=False)

    assert [record.sequence for record in contents.records] == [1, 2, 3, 4, 5, 6]
    both = ["weights", "biases"]
    assert [names(schema) for schema in contents.record_schemas] == [
        [],
        [],
        ["weights"],
        ["weights"],
        both,
        both,
    ]
    assert [table.sequence for table in contents.layers] == [1, 2, 3, 4, 5, 6]
    assert contents.state.probe_errors == contents.state.records_dropped == 0


def test_a_definition_within_a_step_changes_the_schema_only_after_it(watch):
    watched = watch()
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: mp_agent.collection("weights", include="weight"))
    for _ in range(3):
        model(torch.randn(5, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # measured before the hook
        optimizer.step()
        optimizer.zero_grad()
    contents = read_ring(watched.writer.path, one_schema=False)

    found = [names(schema) for schema in contents.record_schemas]
    assert found == [[], ["weights"], ["weights"]]
    assert contents.state.probe_errors == 0


def test_without_any_the_schema_has_no_such_fact(watch):
    watched = watch()
    list(train(1))

    assert FACT not in dict(watched.read().schema.facts)


def test_a_wrong_definition_raises_and_is_forgotten():
    with pytest.raises(SettingError, match="include has value"):
        mp_agent.collection("weights", include="(")
    mp_agent.collection("weights", include="weight")

    assert len(decode_collections(tensor_collections.fact)) == 1
