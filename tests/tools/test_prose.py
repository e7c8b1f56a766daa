"""Phrases to avoid are found where prose stands, and nowhere else."""

from pathlib import Path

import pytest

from tools.prose import (
    Configuration,
    findings,
    main,
    markdown_texts,
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


def test_messages_and_comments_are_prose_but_names_are_not() -> None:
    source = 'nobody = {"nobody": f"told {1} of two"}  # for nobody\nlog("nobody was there")\n'
    assert [text for _, text in python_texts(source)] == ["nobody was there", "# for nobody"]


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


@pytest.mark.slow
def test_the_repository_keeps_to_the_rules_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out


def test_every_rule_finds_its_own_phrase() -> None:
    rules = read_configuration().rules
    for phrase in ("as the documents have it", "Make sure", "patience", "is told", "beside it"):
        assert list(uses(rules, phrase)), phrase
    assert not list(uses(rules, "the two can be told apart"))
