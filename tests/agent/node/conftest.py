"""A run's directory and processes that play its ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mp_agent.node.run.run import Run
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import StartAgent, starting_agents
from tests.agent.node.fake_rank import FakeRank

StartRank = Callable[..., FakeRank]
OpenRun = Callable[[], Run]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return locations.run_directory(tmp_path / "shm", "llama")


@pytest.fixture
def start_rank(run_dir: Path) -> Iterator[StartRank]:
    """Start ranks of the run; they are killed when the test ends."""
    with ExitStack() as stack:

        def start(rank: int = 0, **options: Any) -> FakeRank:
            return stack.enter_context(FakeRank(run_dir, rank, **options))

        yield start


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        port=0,
        bind="127.0.0.1",
        log_dir=tmp_path / "log",
        dir=tmp_path / "shm",
        flight_dir=tmp_path / "flight",
        linger_seconds=60,
    )


@pytest.fixture
def open_run(run_dir: Path, settings: Settings) -> Iterator[OpenRun]:
    """Open the run as a node agent would; again, as its successor would."""
    with ExitStack() as stack:

        def open_() -> Run:
            run = Run(run_dir, settings)
            stack.callback(run.close)
            return run

        yield open_


@pytest.fixture
def start(run_dir: Path, settings: Settings) -> Iterator[StartAgent]:
    """Start node agents in their own processes, for the run if nothing else is said."""
    with starting_agents(settings, run_dir) as start_:
        yield start_
