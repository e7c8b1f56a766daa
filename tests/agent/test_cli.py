"""The command as a whole: completion in shells, and help of every sub-command."""

import os
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mp_agent.cli import COMMANDS, GROUPS, main
from tests.subtests import each


def completed(words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from mp_agent.cli import main; main(prog_name='mp-agent')"],
        check=False,
        text=True,
        capture_output=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "_MP_AGENT_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
    )
    assert done.returncode == 0, done.stderr
    return {line.partition(",")[2] for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_shells_complete_commands_and_values() -> None:
    assert completed("mp-agent ex") == {"exec", "explain", "export"}
    assert completed("mp-agent export x --to p") == {"parquet"}


@each("name", sorted(COMMANDS))
def test_help_says_what_a_command_does_and_ends_with_an_example_of_it(name: str) -> None:
    command = COMMANDS[name].load()
    assert command.name == name
    text = command.get_help(click.Context(command, info_name=f"mp-agent {name}"))
    assert command.help and text.startswith(f"Usage: mp-agent {name}")
    assert " ".join(text.split()).endswith(COMMANDS[name].example)
    words = shlex.split(COMMANDS[name].example)
    if isinstance(command, click.Group):
        command = command.commands[words[words.index(name) + 1]]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {word for word in words[words.index(name) :] if word.startswith("--")}
    assert name == "exec" or given <= known


def test_help_lists_every_command_with_its_summary_in_one_line() -> None:
    lines = main.get_help(click.Context(main, info_name="mp-agent")).splitlines()
    for title, entries in GROUPS.items():
        assert f"{title}:" in lines
        for name, entry in entries.items():
            assert f"  {name:<12}  {entry.summary}" in lines


def test_help_and_completion_import_no_command() -> None:
    script = (
        "import sys\nfrom mp_agent.cli import main\n"
        "try:\n    main(['--help'], prog_name='mp-agent')\nexcept SystemExit:\n    pass\n"
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    for environment in ({}, {"_MP_AGENT_COMPLETE": "bash_complete", "COMP_WORDS": "mp-agent c"}):
        done = subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            text=True,
            capture_output=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "COMP_CWORD": "1",
                **environment,
            },
        )
        assert "compare" in done.stdout
        for heavy in ("pydantic", "numpy", "aiohttp", "rich", "torch", "mp_agent.settings"):
            assert f"'{heavy}'" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
@pytest.mark.parametrize("arguments", [["rules"], ["--help"]])
def test_a_full_disk_behind_standard_output_is_said_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mp_agent", *arguments],
            check=False,
            text=True,
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert said[-1] == "mp-agent: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "encoding"),
    [
        (["explain", "MpAgentLossSpike"], "latin-1"),
        (["run", "--help"], "latin-1"),
        (["explain", "MpAgentLossSpike"], "ascii:surrogateescape"),
    ],
)
def test_an_encoding_that_lacks_characters_shows_them_as_escapes(
    arguments: list[str], encoding: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mp_agent", *arguments],
        check=False,
        text=True,
        encoding="latin-1",
        capture_output=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONIOENCODING": encoding,
        },
    )
    assert done.returncode == 0 and not done.stderr
    assert "\\u20" in done.stdout


def test_an_interruption_exits_with_130_since_1_speaks_of_findings(monkeypatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    check = COMMANDS["check"].load()
    monkeypatch.setattr(check, "callback", interrupted)
    result = CliRunner().invoke(main, ["check", "."])
    assert result.exit_code == 130
    assert result.stderr == "\nmp-agent: interrupted\n"


def test_a_command_that_is_unknown_is_refused_with_the_one_that_is_like_it() -> None:
    outcome = CliRunner().invoke(main, ["bactest", "train.log"])
    assert outcome.exit_code == 2
    assert "'bactest' is unknown; did you mean backtest?" in outcome.output


@pytest.mark.parametrize("command", ["dashboards", "alertmanager"])
def test_a_directory_that_cannot_be_made_is_a_wrong_use(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--output", "/dev/null/below"])
    assert result.exit_code == 2
    assert "/dev/null/below cannot be made: Not a directory" in result.output


@each("value", ["nan", "-nan", "inf"])
@each(
    "arguments",
    [
        ("backtest", "--step-seconds"),
        ("tune", "--margin"),
        ("top", "--interval"),
        ("recommend", "--memory"),
        ("evaluate", "--learning-rate"),
        ("compare", "--tolerance"),
    ],
)
def test_an_option_with_a_number_takes_neither_nan_nor_infinity(arguments, value: str) -> None:
    result = CliRunner().invoke(main, [*arguments, value, __file__])
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[1]}'" in result.output


@each(
    "arguments",
    [
        ("check", "PATH", "--output", "PATH"),
        ("backtest", "PATH", "--html", "PATH"),
        ("tune", "PATH", "--output", "PATH"),
        ("tune", "PATH", "--chart-values", "PATH"),
        ("tune", "PATH.csv", "--labels", "PATH", "--output", "PATH"),
        ("postmortem", "PATH", "--html", "PATH"),
        ("postmortem", "PATH.csv", "--gpu-errors", "PATH", "--html", "PATH"),
        ("compare", "PATH", "PATH.csv", "--html", "PATH"),
        ("compare", "PATH.csv", "PATH", "--html", "PATH"),
        ("compare", "PATH:make", "--html", "PATH"),
        ("baseline", "save", "PATH", "--output", "PATH"),
        ("recommend", "PATH:make", "--output", "PATH"),
        ("recommend", "PATH:make", "--code", "PATH"),
        ("recommend", "PATH.py:make", "--evaluation", "PATH", "--output", "PATH"),
        ("evaluate", "PATH:make", "--output", "PATH"),
        ("evaluate", "PATH:make", "--html", "PATH"),
    ],
)
def test_no_command_writes_its_output_over_what_it_reads(arguments, tmp_path) -> None:
    read = tmp_path / "input"
    read.write_text("step,loss\n1,2.0\n2,1.0\n")
    (tmp_path / "input.csv").write_text(read.read_text())
    link = tmp_path / f"link {len(os.listdir(tmp_path))}"
    link.symlink_to(read)
    *inputs, output = (one.replace("PATH", str(read)) for one in arguments)
    for written in (output, str(link)):
        done = CliRunner().invoke(main, [*inputs, written])
        assert done.exit_code == 2, done.output
        assert f"{written} cannot be written: it is what is read" in done.output
    assert read.read_text() == "step,loss\n1,2.0\n2,1.0\n"


def test_check_writes_over_no_file_that_it_finds_in_a_folder(tmp_path) -> None:
    read = {"train.py": "import torch\n", "pyproject.toml": "[tool.mp-agent.check]\n"}
    for name, text in read.items():
        (tmp_path / name).write_text(text)
    for name, text in read.items():
        output = str(tmp_path / name)
        done = CliRunner().invoke(main, ["check", str(tmp_path), "--output", output])
        assert done.exit_code == 2, done.output
        assert f"{output} cannot be written: it is what is read" in done.output
        assert (tmp_path / name).read_text() == text


@each(
    "arguments",
    [
        ("check", "--output"),
        ("rules", "--output"),
        ("dashboards", "--output"),
        ("alertmanager", "--receiver", "slack", "--output"),
        ("baseline", "save", __file__, "--output"),
        ("tune", __file__, "--chart-values"),
        ("backtest", __file__, "--html"),
    ],
)
def test_no_command_takes_an_empty_path_for_the_current_folder(
    arguments, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for written in ("", "-") if arguments[0] != "rules" else ("",):
        done = CliRunner().invoke(main, [*arguments, written])
        assert done.exit_code == 2, done.output
        assert f"Invalid value for '{arguments[-1]}'" in done.output
        assert not os.listdir(tmp_path)
