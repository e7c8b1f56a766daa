"""JSON and YAML that are made to be endless, and text that is made for terminals."""

import pytest

from mp_agent.errors import SourceError
from mp_agent.inputs import files
from mp_agent.inputs.files import bounded_values, parse_json, parse_yaml_texts, printable


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("1" * 100_000, "too many digits"),
        ('{"a": 1,\n "b"}', "line 2 column 5: is no JSON"),
        ("", "line 1 column 1: is no JSON"),
    ],
)
def test_json_that_cannot_be_read_is_named_by_its_place(text, problem):
    with pytest.raises(SourceError, match=problem):
        parse_json(text)


def test_json_of_more_values_than_memory_holds_is_not_parsed(monkeypatch):
    monkeypatch.setattr(files, "VALUES_MAX", 1000)
    assert parse_json("[" + "1," * 900 + "1]")
    with pytest.raises(SourceError, match="holds 1001 values, more than 1000"):
        parse_json("[" + "{}," * 500 + "1]")
    with pytest.raises(SourceError, match="more than 1000"):
        bounded_values("," * 1001, ",\n")


def test_trainers_write_nan_and_infinity():
    assert parse_json('{"a": NaN, "b": -Infinity}')["b"] == float("-inf")


LAUGHS = 'a: &a ["lol"]\n' + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(20)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "line 2: aliases are not read"),
        ("&a [*a]", "line 1: aliases are not read"),
        ("a: " + "[" * 50_000, "nested too deeply"),
        ("a: [\nb", "line 2: is no YAML"),
        ("\x00", "is no YAML"),
    ],
)
def test_yaml_without_end_is_refused(text, problem):
    with pytest.raises(SourceError, match=problem):
        parse_yaml_texts(text)


def test_yaml_scalars_stay_texts():
    assert parse_yaml_texts("1: yes\na: 2026-13-45\n") == {"1": "yes", "a": "2026-13-45"}
    digits = "9" * 100_000
    assert parse_yaml_texts(f"a: {digits}") == {"a": digits}


def test_what_a_terminal_would_obey_is_escaped():
    assert printable("llama 7b <ü>") == "llama 7b <ü>"
    assert printable("a\x1b[2J\nb\udcff\u202e\x9b") == r"a\x1b[2J\nb\udcff\u202e\x9b"
    assert printable("a\x07\nb", keep="\n") == "a\\x07\nb"
