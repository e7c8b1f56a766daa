"""Jobs that go wrong, run once for all tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mp_agent.flight.postmortem.analysis import Analysis, analyse
from mp_agent.flight.record.evidence import Evidence
from mp_agent.node.flight.job import evidence_of_rings
from mp_agent.node.flight.replay import judged
from mp_agent.settings import Settings
from tests.agent.flight.jobs import Outcome, finished_jobs

KINDS = (
    "clean",
    "calibrating",
    "explosion",
    "overflow-storm",
    "nan-on-one-rank",
    "nan-in-backward",
    "never-reduced",
    "optimizer-of-a-copy",
    "nan-of-one-rank-that-a-scaler-skips",
    "one-rank-off",
    "killed",
)


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    with finished_jobs(KINDS, tmp_path_factory.mktemp("jobs")) as outcomes:
        yield outcomes


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(flight_dir=tmp_path / "flight", dir=tmp_path / "shm")


@pytest.fixture
def evidence_of(outcomes: dict[str, Outcome], settings: Settings) -> Callable[[str], Evidence]:
    """Return what the rings of a job of some kind say."""
    return lambda kind: evidence_of_rings(outcomes[kind].run_dir, settings)


@pytest.fixture
def analysis_of(evidence_of: Callable[[str], Evidence]) -> Callable[[str], Analysis]:
    def analysis(kind: str) -> Analysis:
        evidence = evidence_of(kind)
        return analyse(evidence, judged(evidence))

    return analysis
