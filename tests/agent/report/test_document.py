"""JSON that any reader takes."""

import json
from dataclasses import dataclass
from enum import Enum
from math import inf, nan
from typing import Any

import pytest

from mp_agent.report.content import picked, plain, written


class Kind(Enum):
    GOOD = "good"


@dataclass(frozen=True, slots=True)
class Record:
    kind: Kind
    value: float
    parts: tuple[Any, ...] = ()


def test_records_enumerations_and_numbers_that_are_not_finite_become_plain():
    found = plain(Record(Kind.GOOD, nan, (Record(Kind.GOOD, 1.5), {1: inf}, None)))
    inner = {"kind": "good", "value": 1.5, "parts": []}
    assert found == {"kind": "good", "value": None, "parts": [inner, {"1": None}, None]}


def test_a_document_is_json_without_nan_in_ascii():
    text = written({"format": "x", "version": 1, "value": -inf, "name": "Ω\u2028"})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "format": "x",
        "version": 1,
        "value": None,
        "name": "Ω\u2028",
    }
    assert text.isascii()


def test_a_record_may_give_some_of_its_fields():
    assert picked(Record(Kind.GOOD, 1.0), "value") == {"value": 1.0}
