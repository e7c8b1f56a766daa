"""The main script of a run is checked once per start, in a process; failures are contained."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from mp_agent.lint.rules.scaling import CLIP_WITHOUT_UNSCALE
from mp_agent.node import children
from mp_agent.node.children import ScriptChecks
from mp_agent.node.run.run import Run
from mp_agent.records.views import ScriptFindings
from tests.waiting import wait_until


@dataclass
class WatchedRun:
    """What the service asks of a run."""

    run_dir: Path
    script: str
    session: str = "0"
    seen: bool = True
    is_root: bool = True
    name: str = "llama"
    script_findings: ScriptFindings | None = None


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(CLIP_WITHOUT_UNSCALE.bad)
    return path


@pytest.fixture
def checks_of() -> Iterator[Callable[..., ScriptChecks]]:
    made: list[ScriptChecks] = []

    def make(*runs: WatchedRun) -> ScriptChecks:
        made.append(ScriptChecks(lambda: cast("list[Run]", list(runs))))
        return made[-1]

    yield make
    for checks in made:
        asyncio.run(checks.stop(0.0))


def settle(checks: ScriptChecks, run: WatchedRun) -> ScriptFindings:
    def findings() -> ScriptFindings | None:
        checks.tick(time.monotonic())
        return run.script_findings

    return wait_until(findings, seconds=300, what="the check of the script")


@pytest.mark.slow
def test_each_start_of_a_run_is_checked_once(checks_of, script, caplog):
    caplog.set_level("INFO", "mp_agent.node")
    run = WatchedRun(script.parent / "llama", str(script))
    checks = checks_of(run)
    assert settle(checks, run) == ScriptFindings(files=1, counts={"MP106": 1})
    assert f"{script}:6: MP106" in caplog.text
    run.script_findings = None
    for _ in range(3):
        checks.tick(time.monotonic())
    assert checks._check is None, "it is not checked again"
    script.write_text(CLIP_WITHOUT_UNSCALE.good)
    run.session = "1"
    assert settle(checks, run) == ScriptFindings(files=1)


def test_only_a_root_agent_with_a_script_checks(checks_of, script):
    runs = [
        WatchedRun(script.parent / "a", ""),
        WatchedRun(script.parent / "b", str(script), is_root=False),
        WatchedRun(script.parent / "c", str(script), seen=False),
    ]
    checks = checks_of(*runs)
    checks.tick(0.0)
    assert checks._check is None


@pytest.mark.slow
def test_scripts_are_checked_one_after_the_other(checks_of, script):
    runs = [WatchedRun(script.parent / name, str(script), name=name) for name in "ab"]
    checks = checks_of(*runs)
    assert settle(checks, runs[0]).files == 1
    assert runs[1].script_findings is None
    assert settle(checks, runs[1]).files == 1


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("-c", "import sys; sys.exit('no such script')"), "exit status 1: no such script"),
        (("-c", "print('{}')"), "exit status 0: {}"),
        (("-c", "print('no json')"), "exit status 0: no json"),
        (("-c", "import os; os.kill(os.getpid(), 9)"), "exit status -9"),
    ],
)
def test_a_check_that_fails_counts_no_files_and_is_logged(
    checks_of, script, monkeypatch, caplog, command, reason
):
    monkeypatch.setattr(children, "_SCRIPT_CHECK", command)
    run = WatchedRun(script.parent / "llama", str(script))
    assert settle(checks_of(run), run) == ScriptFindings(files=0)
    (record,) = caplog.records
    assert record.getMessage().endswith(f"the main script cannot be checked: {reason}")


def test_a_check_that_takes_too_long_is_ended(checks_of, script, monkeypatch, caplog):
    monkeypatch.setattr(children, "_SCRIPT_CHECK", ("-c", "import time; time.sleep(600)"))
    run = WatchedRun(script.parent / "llama", str(script))
    checks = checks_of(run)
    checks.tick(0.0)
    process = checks._check[1].process
    checks.tick(children.SECONDS_MAX - 1)
    assert process.poll() is None and run.script_findings is None
    checks.tick(children.SECONDS_MAX)
    assert process.poll() is not None
    assert run.script_findings == ScriptFindings(files=0)
    assert "it took more than 600 s" in caplog.text


def test_a_process_that_cannot_be_made_is_contained(checks_of, script, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", str(script.parent / "no-python"))
    run = WatchedRun(script.parent / "llama", str(script))
    checks_of(run).tick(0.0)
    assert run.script_findings == ScriptFindings(files=0)
    assert "No such file" in caplog.text


def test_stopping_ends_the_process(checks_of, script, monkeypatch):
    monkeypatch.setattr(children, "_SCRIPT_CHECK", ("-c", "import time; time.sleep(600)"))
    checks = checks_of(WatchedRun(script.parent / "llama", str(script)))
    checks.tick(0.0)
    process = checks._check[1].process
    asyncio.run(checks.stop(0.0))
    assert process.poll() is not None
