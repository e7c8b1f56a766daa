"""What the probe records of the order of loops, wrong ones and healthy ones that look like them."""

from collections.abc import Callable
from math import isnan

import pytest
import torch

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.records.columns import (
    AUTOCAST_FP32_SHARE,
    BACKWARDS_DISCARDED,
    GRADIENTS_ADD_UP,
    LATE_CLIPPING,
    LEFT_IN_EVALUATION,
)
from tests.agent.probe.scenarios.loop_orders import HEALTHY, WRONG

_STREAKS = (GRADIENTS_ADD_UP, BACKWARDS_DISCARDED, LATE_CLIPPING, LEFT_IN_EVALUATION)
_STEPS, _SAMPLES = int(DEFAULTS["loop_mistake_steps"]), int(DEFAULTS["autocast_fp32_samples"])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler"),
]


@pytest.fixture
def recorded(watch) -> Callable[[Callable[[], object]], set[str]]:
    """Run a loop, and return the columns that show a mistake for as long as alerts require."""

    def run(loop: Callable[[], object]) -> set[str]:
        torch.manual_seed(0)
        watched = watch()
        loop()
        watched.probe.flush()
        ring = watched.read(one_schema=False)
        rows = [
            dict(zip(schema.step_columns, record.values.tolist(), strict=True))
            for record, schema in zip(ring.records, ring.record_schemas, strict=True)
        ]
        assert ring.state.probe_errors == 0
        shares = [row[AUTOCAST_FP32_SHARE] for row in rows if not isnan(row[AUTOCAST_FP32_SHARE])]
        found = {name for name in _STREAKS if longest([row[name] for row in rows]) >= _STEPS}
        wasted = len(shares) >= _SAMPLES and min(shares) > DEFAULTS["autocast_fp32_share"]
        return found | ({AUTOCAST_FP32_SHARE} if wasted else set())

    return run


def longest(values: list[float]) -> int:
    """Return the number of consecutive steps with a value above 0."""
    best = count = 0
    for value in values:
        count = count + 1 if value > 0.0 else 0
        best = max(best, count)
    return best


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_loop_is_recorded_as_what_it_is(recorded, name):
    loop, column = WRONG[name]
    assert recorded(loop) == {column}


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_healthy_loop_shows_no_mistake(recorded, name):
    assert recorded(HEALTHY[name]) == set()
