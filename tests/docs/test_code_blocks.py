"""What the documentation shows can be typed: code compiles, commands and settings exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.cli import COMMANDS
from mp_agent.settings import ENV_PREFIX, Settings
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.every import for_every

PYTHON, CONSOLE, YAML, JSON = (blocks(one) for one in ("python", "console", "yaml", "json"))
_LANGUAGES = {"", "python", "console", "diff", "yaml", "json", "toml", "promql"}

_OTHER_VARIABLES = {
    "MP_AGENT_CONFIG",
    "MP_AGENT_CRD_DIR",
    "MP_AGENT_SERVICE_HOST",
    "MP_AGENT_ATTACH",
    "MP_AGENT_NODE_SETTINGS",
}
_VARIABLE = re.compile(r"\bMP_AGENT_[A-Z0-9_]*[A-Z0-9]\b(?!…)")
_METRIC = re.compile(r"(?<![\w:])mp_agent_[a-z0-9_]*[a-z0-9]\b(?![*…-])")
_NAMED_IN_ITSELF = {"alerts.md"}
"""Made from the catalogs, with names of readings in it that are no metrics."""


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in blocks()} <= _LANGUAGES
    assert PYTHON and CONSOLE and YAML and JSON


@for_every(PYTHON)
def test_python_compiles(block: Block) -> None:
    # What is left out of a record is no Python.
    compile(block.text.replace("…", "..."), str(block), "exec")


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in PYTHON if block.executed], ids=str)
def test_python_that_is_marked_runs(block: Block, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text],
        env={**os.environ, "MP_AGENT_DIR": str(tmp_path / "shm"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each `mp-agent …` in a console block."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        if not line.startswith("$ "):
            continue
        lexer = shlex.shlex(line[2:], posix=True, punctuation_chars="|;&<>()")
        lexer.whitespace_split = True
        words = list(lexer)
        while "mp-agent" in words:
            words = words[words.index("mp-agent") + 1 :]
            end = next((i for i, word in enumerate(words) if set(word) <= set("|;&<>()")), None)
            # What follows a release's or a unit's name is no command.
            if words and words[0] in COMMANDS:
                yield words[:end]


def test_console_blocks_hold_commands() -> None:
    assert sum(len(list(commands(block))) for block in CONSOLE) > 10


@for_every(CONSOLE)
def test_commands_exist_with_their_options(block: Block) -> None:
    assert_commands_exist(block)


def assert_commands_exist(block: Block) -> None:
    """Fail unless each command of the block exists, with the options that it is given."""
    for name, *arguments in commands(block):
        command = COMMANDS[name].load()
        context = click.Context(command, **command.context_settings)
        command.make_parser(context).parse_args(list(arguments))


def test_an_option_that_does_not_exist_would_be_found() -> None:
    block = Block(ROOT, 1, "console", "$ A=1 mp-agent doctor \\\n  --nothing x | head\n", False)
    with pytest.raises(click.NoSuchOption):
        assert_commands_exist(block)


@for_every(YAML)
def test_yaml_parses(block: Block) -> None:
    assert list(yaml.safe_load_all(block.text))


@for_every(JSON)
def test_json_parses(block: Block) -> None:
    json.loads(block.text)


def prometheus_configurations() -> list[Block]:
    return [block for block in YAML if "scrape_configs" in yaml.safe_load(block.text)]


@pytest.mark.e2e
def test_prometheus_takes_the_configurations(server: Callable[[str], Path], tmp_path: Path) -> None:
    assert len(prometheus_configurations()) >= 4
    for number, block in enumerate(prometheus_configurations()):
        path = tmp_path / f"{number}.yml"
        path.write_text(block.text)
        checked = subprocess.run(
            [server("promtool"), "check", "config", "--syntax-only", path],
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, f"{block}: {checked.stderr}"


@pytest.mark.e2e
def test_prometheus_takes_the_expressions(server: Callable[[str], Path], tmp_path: Path) -> None:
    expressions = [text for block in blocks("promql") for text in block.text.split("\n\n")]
    assert expressions
    rules = [{"record": "x", "expr": text} for text in expressions if text.strip()]
    path = tmp_path / "expressions.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "documentation", "rules": rules}]}))
    checked = subprocess.run(
        [server("promtool"), "check", "rules", "--lint=none", path], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


@for_every(PAGES)
def test_variables_exist(page: Path) -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | _OTHER_VARIABLES
    assert set(_VARIABLE.findall(page.read_text("utf-8"))) <= known


@for_every(PAGES)
def test_metrics_exist(page: Path) -> None:
    named = set(_METRIC.findall(page.read_text("utf-8")))
    known = set(BY_PROMETHEUS_NAME) | {
        f"{name}_{part}" for name in BY_PROMETHEUS_NAME for part in ("bucket", "sum", "count")
    }
    assert page.name in _NAMED_IN_ITSELF or named <= known
