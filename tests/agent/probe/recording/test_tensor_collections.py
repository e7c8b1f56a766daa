"""The collections of a process: each name once."""

import pytest

from mp_agent.errors import SettingError
from mp_agent.probe.instruments.tensors import TensorCollections
from mp_agent.records.tensor_collections import COLLECTIONS_AT_MOST, decode_collections


def test_definitions_keep_their_order_and_the_same_one_again_changes_nothing():
    defined = TensorCollections()
    defined.define("mlp", "mlp")
    defined.define("attention", ["attn", "qkv"])
    before = defined.fact
    defined.define("mlp", ["mlp"])

    assert [(one.name, one.patterns) for one in decode_collections(defined.fact)] == [
        ("mlp", ("mlp",)),
        ("attention", ("attn", "qkv")),
    ]
    assert defined.fact is before


def test_another_definition_of_a_name_is_refused_and_the_first_one_stays():
    defined = TensorCollections()
    defined.define("mlp", "mlp")
    before = defined.fact

    with pytest.raises(
        SettingError, match=r"name has value 'mlp': it is defined already, with include=\('mlp',\)"
    ):
        defined.define("mlp", "ffn")
    assert defined.fact == before


def test_the_number_of_collections_is_bounded():
    defined = TensorCollections()
    for number in range(COLLECTIONS_AT_MOST):
        defined.define(f"layer {number}", "weight")

    with pytest.raises(SettingError, match="name has value 'one more': there are 64 collections"):
        defined.define("one more", "weight")
    assert len(decode_collections(defined.fact)) == COLLECTIONS_AT_MOST
