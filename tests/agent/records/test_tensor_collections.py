"""Definitions of tensor collections: what is refused, and which layers are members."""

import re

import pytest

from mp_agent.errors import SettingError
from mp_agent.records.tensor_collections import (
    decode_collections,
    encode_collections,
    make_collection,
    members_of,
)
from tests.subtests import each

LAYERS = (
    "h.0.attn.c_attn.weight",
    "h.0.mlp.c_fc.weight",
    "h.1.attn.c_attn.weight@0-3",
    "h.1.mlp.c_fc.weight@attn",
)


@each(
    ("patterns", "members"),
    [
        ((r"attn",), (0, 2)),
        ((r"^h\.0\.",), (0, 1)),
        ((r"mlp.*weight$", "nothing"), (1, 3)),
        ((r"attn", r"c_attn"), (0, 2)),
        ((r"(?i)ATTN",), (0, 2)),
        ((r"^attn",), ()),
        ((r".",), (0, 1, 2, 3)),
        (("(",), ()),
    ],
)
def test_a_layer_is_a_member_where_one_pattern_is_found_in_its_name(patterns, members):
    assert members_of(patterns, LAYERS) == members


@each(
    ("name", "include", "message"),
    [
        ("", "a", "name has value '': must have 1 to 128 characters"),
        ("n" * 129, "a", "must have 1 to 128 characters"),
        (7, "a", "name has value 7: must be text"),
        ("two\nlines", "a", "name has value 'two\\nlines': becomes a label"),
        ("lone \ud800", "a", "becomes a label"),
        (" padded", "a", "name has value ' padded': becomes a label"),
        ("x", "(", r"include has value '\(': is no regular expression: "),
        ("x", ["fine", "*"], r"include has value '\*': is no regular expression: "),
        ("x", "", "include has value '': must have 1 to 1024 characters"),
        ("x", "a" * 1025, "must have 1 to 1024 characters"),
        ("x", "\ud800", "is no regular expression: "),
        ("x", [], r"include has value \[\]: must hold 1 to 64 regular expressions"),
        ("x", ["a"] * 65, "must hold 1 to 64 regular expressions"),
        ("x", [1], "include has value 1: must be text"),
        ("x", None, "include has value None: must be the text of a regular expression, or a list"),
        (
            "x",
            re.compile("a"),
            r"include has value re.compile\('a'\): must be the text of a regular",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_argument_and_value(name, include, message):
    with pytest.raises(SettingError, match=message.replace("\\n", r"\\n")):
        make_collection(name, include)


def test_definitions_travel_as_text():
    collections = (
        make_collection("attention", "attn"),
        make_collection("Schräge, «Gewichte»", (r"\.w\d+", '"')),
    )

    assert decode_collections(encode_collections(collections)) == collections
    assert encode_collections(()) == ""


@each("fact", ["", "{", "[1]", '[["a"]]', '[["a",["b"],1]]', '{"a": "b"}'])
def test_what_cannot_be_read_defines_nothing(fact):
    assert decode_collections(fact) == ()
