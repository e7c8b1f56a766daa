"""What users and programs read of canonical runs, byte by byte as committed.

A change of these files is a change that someone read.
`UPDATE_EXPECTED=1 python -m pytest tests/outputs` writes them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from mp_agent.catalog.metric import Snapshot
from mp_agent.catalog.metrics import METRICS
from tests.outputs.texts import texts

EXPECTED = Path(__file__).parent / "expected"
WITHOUT_VALUE = frozenset(
    {
        "mp_agent.zero_epsilon.info",
        "mp_agent.divergent_rates.info",
        "mp_agent.cut_off_parameters.info",
        "mp_agent.rank_series.left_out",
    }
)
"""Metrics that no canonical run has a value of."""


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, str], Snapshot]:
    return texts(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_the_texts_are_the_committed_ones(reported: tuple[Mapping[str, str], Snapshot]) -> None:
    found, _ = reported
    if os.environ.get("UPDATE_EXPECTED"):
        EXPECTED.mkdir(exist_ok=True)
        for path in EXPECTED.iterdir():
            path.unlink()
        for name, text in found.items():
            (EXPECTED / name).write_text(text, encoding="utf-8")
    committed = {path.name: path.read_text(encoding="utf-8") for path in EXPECTED.iterdir()}
    assert found.keys() == committed.keys()
    differing = [_first_difference(name, found[name], committed[name]) for name in found]
    assert not any(differing), "\n".join(filter(None, differing))


def _first_difference(name: str, found: str, committed: str) -> str:
    """Return where two texts differ first; "" if they do not."""
    if found == committed:
        return ""
    pairs = zip([*found.splitlines(), ""], [*committed.splitlines(), ""], strict=False)
    for number, (now, before) in enumerate(pairs, 1):
        if now != before:
            return f"{name}:{number}: {now[:300]!r}, committed is {before[:300]!r}"
    return f"{name}: one is the beginning of the other"


@pytest.mark.slow
def test_every_metric_has_a_value_in_a_canonical_run(
    reported: tuple[Mapping[str, str], Snapshot],
) -> None:
    _, snapshot = reported
    shown = {family.metric.name for family in snapshot if family.samples}
    assert {metric.name for metric in METRICS} - shown == WITHOUT_VALUE
