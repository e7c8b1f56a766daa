"""The public API changes on purpose only: names and signatures are compared with a golden file."""

import inspect
from pathlib import Path

import mp_agent
from tools.public_api import api_summary, public_names

GOLDEN = Path(__file__).with_name("public_api.txt")


def test_names_and_signatures_are_those_of_the_golden_file() -> None:
    assert api_summary() == GOLDEN.read_text("utf-8"), (
        "the public API has changed: if that is intended, write the new text to "
        f"{GOLDEN.name}, say so in CHANGELOG.md, and deprecate what goes (docs/compatibility.md)"
    )


def test_every_public_name_exists_once_and_is_described() -> None:
    assert len(set(mp_agent.__all__)) == len(mp_agent.__all__)
    described = {entry.name for entry in public_names()}
    assert described | {"__version__"} == set(mp_agent.__all__)
    assert all(entry.docstring for entry in public_names())


def test_no_public_function_takes_several_optional_positional_arguments() -> None:
    """Optional arguments are keywords, so that a new one never shifts another."""
    for name in mp_agent.__all__:
        function = getattr(mp_agent, name)
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            optional = [one for one in parameters if one.default is not one.empty]
            kinds = [parameter.kind for parameter in optional]
            assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) <= 1, name
            assert all(one.kind is not one.VAR_POSITIONAL for one in parameters), name
