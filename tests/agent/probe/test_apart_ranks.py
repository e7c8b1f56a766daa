"""Ranks whose guard or reduction are not alike train on as if they had none, and say so once."""

from pathlib import Path
from typing import Any

import pytest

from tests.agent.probe import apart_job
from tests.agent.probe.apart_job import Case, Ended
from tests.agent.probe.ranks import run_ranks

pytestmark = pytest.mark.long

RANKS = 2
GUARD = {"guard": True}
REDUCTION = {"reduction": "process_group", "reduction_interval": 2}
SKIPPING: dict[str, Any] = {"guard": {"skip_nonfinite": {}}}
DIFFERENT = "the guard where its settings differ between ranks"
MISSING = "the guard where ranks take no part"

OFF = {
    "other policies": (
        Case(ranks=({"guard": {"clip_spikes": {}}}, SKIPPING), spiking=True),
        ["guard is clip_spikes on rank 0 and skip_nonfinite on rank 1"],
        DIFFERENT,
    ),
    "another parameter": (
        Case(
            ranks=(
                {"guard": {"clip_spikes": {"factor": 3}}},
                {"guard": {"clip_spikes": {"factor": 1e9}}},
            ),
            spiking=True,
        ),
        ["clip_spikes.factor is 3 on rank 0 and 1e+09 on rank 1"],
        DIFFERENT,
    ),
    "a dry run": (
        Case(ranks=(SKIPPING, {**SKIPPING, "guard_dry_run": True}), poisoned=True),
        ["guard_dry_run is False on rank 0 and True on rank 1"],
        DIFFERENT,
    ),
    "a guard on rank 0 alone": (
        Case(ranks=(GUARD, {}), spiking=True),
        ["rank 1 takes no part within 2 s"],
        MISSING,
    ),
    "a guard on rank 1 alone": (
        Case(ranks=(None, GUARD), spiking=True),
        ["rank 0 takes no part within 2 s"],
        MISSING,
    ),
    "a guard that begins late": (
        Case(ranks=(GUARD, GUARD), spiking=True, begins_late=True),
        ["rank 1 takes no part within 2 s"],
        MISSING,
    ),
    "a guard of a rank that stops": (
        Case(ranks=(SKIPPING, SKIPPING), poisoned=True, pauses=True),
        ["could not agree on an update", "could not agree on an update"],
        "the guard where ranks cannot agree",
    ),
    "a guard that leaves": (
        Case(ranks=(GUARD, GUARD), spiking=True, leaves=True),
        ["could not agree on an update"],
        "the guard where ranks cannot agree",
    ),
    "a reduction on rank 0 alone": (
        Case(ranks=(REDUCTION, None)),
        ["the ranks do not reduce their statistics: rank 1 takes no part within 2 s"],
        "the reduction where ranks take no part",
    ),
    "a reduction that begins late": (
        Case(ranks=(REDUCTION, REDUCTION), begins_late=True),
        ["rank 1 takes no part within 2 s"],
        "the reduction where ranks take no part",
    ),
    "another interval": (
        Case(ranks=(REDUCTION, {**REDUCTION, "reduction_interval": 7})),
        ["reduction_interval is 2 on rank 0 and 7 on rank 1"],
        "the reduction where its settings differ between ranks",
    ),
    "a reduction that leaves": (
        Case(ranks=(REDUCTION, REDUCTION), leaves=True),
        ["the ranks do not reduce their statistics"],
        "the reduction by ranks where they cannot meet",
    ),
}


def _trained(directory: Path, case: Case) -> list[Ended]:
    directory.mkdir()
    run_ranks(apart_job.run, directory, case, ranks=RANKS)
    return [apart_job.ended(directory, rank) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], list[float]]:
    """The weights of jobs without a guard, by their trouble."""
    found = {}
    for spiking, poisoned in ((False, False), (True, False), (False, True)):
        case = Case(ranks=(None, None), spiking=spiking, poisoned=poisoned)
        one, other = _trained(tmp_path_factory.mktemp("plain") / "job", case)
        assert repr(one.weights) == repr(other.weights)
        found[spiking, poisoned] = one.weights
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", OFF)
def test_training_ends_with_the_weights_of_a_job_without_a_guard(tmp_path, untouched, name):
    case, expected, feature = OFF[name]
    ranks = _trained(tmp_path / "job", case)
    for rank in ranks:
        assert repr(rank.weights) == repr(untouched[case.spiking, case.poisoned])
    said = [line for rank in ranks for line in rank.lines if expected[0] in line]
    assert len(said) == len(expected)
    assert any(feature in rank.unsupported for rank in ranks)


@pytest.mark.slow
def test_ranks_meet_again_in_groups_that_are_made_again(tmp_path, untouched):
    case = Case(ranks=(GUARD, GUARD), poisoned=True, groups_are_made_again=True)
    one, other = _trained(tmp_path / "job", case)
    assert one.weights == other.weights
    assert not (one.unsupported or other.unsupported)
    assert not any("off" in line for rank in (one, other) for line in rank.lines)


@pytest.mark.slow
def test_a_reduction_goes_on_in_groups_that_are_made_again(tmp_path):
    case = Case(ranks=(REDUCTION, REDUCTION), groups_are_made_again=True)
    for rank in _trained(tmp_path / "job", case):
        assert rank.reduced_sequence > apart_job.TROUBLED
        assert not rank.unsupported
