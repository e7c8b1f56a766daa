"""The soak benchmark: what it reads of a real agent, and what it calls growth."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak import Soak, Use, growth

_USE = Use(
    hours=1.0,
    steps=600,
    ranks=8,
    memory_mib=100.0,
    descriptors=10,
    threads=2,
    files=5,
    file_mib=40.0,
    flight_files=0,
    series=1000,
    processor_seconds=1.0,
)


def test_growth_is_what_the_last_third_takes_more_than_the_middle_third() -> None:
    uses = [replace(_USE, memory_mib=mib) for mib in (50, 60, 100, 100, 100, 130, 130, 500, 90)]
    found = growth(uses)
    assert found["memory_mib"] == pytest.approx(0.3)
    assert found["descriptors"] == 0.0


@pytest.mark.slow
def test_an_agent_reads_jobs_one_after_another_and_keeps_no_files_open(tmp_path: Path) -> None:
    soak = Soak(tmp_path, step_seconds=6.0, interval_seconds=0.1)
    with soak.agent():
        uses = [soak.train(0.2) for _ in range(5)]
    assert [use.ranks for use in uses] == [8, 4, 8, 2, 8]
    assert [use.steps for use in uses] == [120, 240, 360, 480, 600]
    assert uses[4].descriptors <= uses[0].descriptors + 1
    assert uses[4].series == pytest.approx(uses[0].series, rel=0.02)
