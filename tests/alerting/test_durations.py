import pytest

from mp_agent.alerting.durations import BY_NAME, DURATIONS, duration
from mp_agent.errors import CatalogError


def test_names_are_unique_and_unknown_ones_fail() -> None:
    assert len(BY_NAME) == len(DURATIONS)
    with pytest.raises(CatalogError, match="'nap'"):
        duration("nap")
