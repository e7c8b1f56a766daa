import pytest

from mp_agent.catalog.metrics import run
from mp_agent.errors import CatalogError
from tests.alerting.examples.example import Example, Track, flat, halving, ramp


def test_the_last_sample_goes_on_to_the_end() -> None:
    assert Track(run.LOSS, (1, 2)).over(4) == (1, 2, 2, 2, 2)


@pytest.mark.parametrize("last", ["stale", None])
def test_a_series_that_ended_does_not_go_on(last: str | None) -> None:
    assert Track(run.LOSS, (1, last)).over(3) == (1, last, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [(), (1, 2, 3, 4)])
def test_more_samples_than_minutes_and_none_at_all_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(CatalogError, match="mp_agent_loss"):
        Example(title="x", minutes=2, tracks=(Track(run.LOSS, values),))


def test_shapes_of_series() -> None:
    assert flat(3, 2) == (3, 3)
    assert ramp(1, 2, 3) == (1, 3, 5)
    assert halving(8, 3) == (8, 4, 2)
