import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from mp_agent.node import main
from mp_agent.node.__main__ import main as command
from mp_agent.node.logs import log_to_file
from mp_agent.settings import Settings
from mp_agent.settings.load import HANDOVER_VARIABLE, handed_over


class StubAgent:
    """Takes what a node agent is started with, and serves nothing."""

    started: ClassVar[list[tuple[Settings, int]]] = []

    def __init__(self, settings: Settings, *, setting_errors: int) -> None:
        self.started.append((settings, setting_errors))

    def watch_all(self, base: Path, *, with_parent: bool) -> None:
        pass

    async def serve(self) -> None:
        pass


@pytest.fixture
def usual_collection() -> Iterator[None]:
    """Leave the garbage collection of this process as it was."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture
def started(monkeypatch, usual_collection) -> list[tuple[Settings, int]]:
    """Return settings and setting errors of the agents that were started."""
    monkeypatch.setattr(StubAgent, "started", [])
    monkeypatch.setattr(main, "NodeAgent", StubAgent)
    monkeypatch.setattr(main, "log_to_stderr", lambda: None)
    return StubAgent.started


def test_it_works_with_the_settings_that_were_handed_over(started, monkeypatch, tmp_path):
    given = Settings(port=1234, linger_seconds=7, token="secret")
    for name, value in handed_over(given).items():
        monkeypatch.setenv(name, value)
    main.watch_directory(tmp_path, detached=False)

    assert started == [(given, 0)]


def test_what_lives_long_is_not_searched_for_garbage_again_and_again(
    started, monkeypatch, tmp_path
):
    searched = []

    async def serve(agent: StubAgent) -> None:
        gc.collect()  # What other tests have left would bring the next one forward.
        before = gc.get_stats()[2]["collections"]
        rows = [[number] for number in range(1_000_000)]
        searched.append((len(rows), gc.get_stats()[2]["collections"] - before))

    monkeypatch.setattr(StubAgent, "serve", serve)
    main.watch_directory(tmp_path, detached=False)
    assert searched == [(1_000_000, 0)]


def test_it_counts_the_settings_that_it_ignores(started, monkeypatch, tmp_path):
    monkeypatch.delenv(HANDOVER_VARIABLE, raising=False)
    monkeypatch.setenv("MP_AGENT_LINGER_SECONDS", "soon")
    main.watch_directory(tmp_path, detached=False)

    ((_, ignored),) = started
    assert ignored == 1


def test_a_run_directory_that_does_not_exist_is_refused_by_name(tmp_path, capsys):
    assert command(["--run-dir", str(tmp_path / "none")]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err


class TestLogs:
    @pytest.fixture(autouse=True)
    def root_logger(self, monkeypatch):
        """Leave the handlers of the test run alone."""
        root = logging.RootLogger(logging.WARNING)
        monkeypatch.setattr(logging, "getLogger", lambda name=None: root)
        monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
        yield root
        for handler in root.handlers:
            handler.close()

    def test_logs_rotate_within_two_megabytes(self, root_logger, tmp_path):
        log_to_file(tmp_path / "log", "run")
        for _ in range(300):
            root_logger.error("x" * 10_000)

        files = sorted((tmp_path / "log").iterdir())
        assert [file.name for file in files] == ["run.log", "run.log.1"]
        assert sum(file.stat().st_size for file in files) <= 2_000_000

    def test_without_a_directory_to_write_to_it_is_silent(self, root_logger, tmp_path, capsys):
        (tmp_path / "log").write_text("a file in the way")
        log_to_file(tmp_path / "log", "run")
        root_logger.error("no handler logs this")

        assert capsys.readouterr().err == ""

    def test_a_planted_link_is_not_written_through(self, root_logger, tmp_path):
        (tmp_path / "log").mkdir(mode=0o700)
        target = tmp_path / "precious"
        (tmp_path / "log" / "run.log").symlink_to(target)
        log_to_file(tmp_path / "log", "run")
        root_logger.error("x")

        assert not target.exists()
