"""What an analysis says beyond its diagnoses."""

import pytest

from mp_agent.flight.postmortem.analysis import remedies_for
from mp_agent.flight.postmortem.diagnosis import Causes


@pytest.mark.parametrize("cause", Causes)
def test_every_cause_has_remedies_in_the_catalog(cause):
    assert remedies_for(cause.value)
