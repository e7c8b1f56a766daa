"""Phrases to avoid are found in prose and in names, and nowhere else."""

from pathlib import Path

import pytest

from tools.prose import (
    Configuration,
    findings,
    markdown_texts,
    python_names,
    python_texts,
    read_configuration,
    uses,
)

RULES = """\
[files]
markdown = ["*.md"]
python = ["*.py"]
except = ["generated.md"]

[[rule]]
phrase = "makes? sure"
instead = "confirm"

[[rule]]
phrase = "nobody"
instead = "no process"
pending = true
"""


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    path = tmp_path / "prose.toml"
    path.write_text(RULES)
    return read_configuration(path)


def test_a_phrase_is_reported_with_its_line_and_what_to_write(
    configuration: Configuration, tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text("# Title\n\nFirst line, then make\nsure of it.\n")
    (tmp_path / "generated.md").write_text("Make sure.\n")
    (tmp_path / "code.py").write_text('def f():\n    """Read it.\n\n    Nobody waits.\n    """\n')
    assert [str(finding) for finding in findings(configuration, tmp_path)] == [
        'page.md:3: "make sure": write confirm',
        'code.py:4: "Nobody": write no process',
    ]


@pytest.mark.parametrize(
    "text", ["`make sure`", "[label](make-sure.md)", "remake sure", "make sureness", "make-sure"]
)
def test_code_and_parts_of_words_are_no_prose(configuration: Configuration, text: str) -> None:
    assert not list(uses(configuration.rules, text))


def test_code_blocks_are_left_out_and_lines_still_count() -> None:
    page = "One.\n\n```console\n$ make sure\n```\nTwo\nthree.\n"
    assert list(markdown_texts(page)) == [(1, "One."), (6, "Two\nthree.")]


def test_messages_and_comments_are_prose_but_keys_are_not() -> None:
    source = 'nobody = {"nobody": f"told {1} of two"}  # for nobody\nlog("nobody was there")\n'
    assert [text for _, text in python_texts(source)] == ["nobody was there", "# for nobody"]


DEFINITIONS = """\
import a as nobody_imported
def nobody_called(nobody_given, *nobody_more, **nobody_named): ...
async def nobody_awaited(): ...
class NobodyMade: ...
NOBODY_SET = used.nobody
for nobody_looped in used(nobody=1): ...
with used as (nobody_held, _): ...
try: ...
except used as nobody_raised: ...
self.nobody_kept: int = 1
[used for nobody_listed in used]
if nobody_walrus := used: ...
"""


def test_each_definition_of_a_name_is_read_and_its_uses_are_not() -> None:
    names = [text for _, text in python_names(DEFINITIONS) if " " not in text]
    assert sorted(names) == sorted(
        "nobody_imported nobody_called nobody_given nobody_more nobody_named nobody_awaited "
        "NobodyMade NOBODY_SET nobody_looped nobody_held _ nobody_raised nobody_kept nobody_listed "
        "nobody_walrus".split()
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_make__sure", "make sure"),
        ("MakeSureHTTPServer2Runs", "Make Sure HTTP Server2 Runs"),
        ("MAKE_SURE", "MAKE SURE"),
    ],
)
def test_a_name_is_read_as_it_is_and_word_by_word(name: str, words: str) -> None:
    assert list(python_names(f"\n{name} = 1\n{name} = 2\n")) == [(2, name), (2, words)]


def test_names_of_files_and_functions_are_reported(
    configuration: Configuration, tmp_path: Path
) -> None:
    (tmp_path / "make_sure.py").write_text("\ndef remake_sure(nobody): ...\n")
    assert [str(finding) for finding in findings(configuration, tmp_path)] == [
        'make_sure.py:1: "make sure": write confirm',
        'make_sure.py:2: "nobody": write no process',
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('phrase = "x"', "'instead'"),
        ('phrase = "("\ninstead = "y"', "phrase"),
        ('phrase = "x"\ninstead = "y"\nseverity = 1', "'severity'"),
    ],
)
def test_a_wrong_rule_is_named(tmp_path: Path, entry: str, message: str) -> None:
    path = tmp_path / "prose.toml"
    path.write_text(f"files = {{}}\n[[rule]]\n{entry}\n")
    with pytest.raises(SystemExit, match=f"rule 1.*{message}"):
        read_configuration(path)


def test_every_rule_finds_its_own_phrase() -> None:
    rules = read_configuration().rules
    for phrase in ("as the documents have it", "Make sure", "patience", "is told", "beside it"):
        assert list(uses(rules, phrase)), phrase
    assert list(uses(rules, "test_" + 76 * "x")), "81 characters"
    assert not list(uses(rules, "test_" + 75 * "x"))
    assert not list(uses(rules, "the two can be told apart"))
