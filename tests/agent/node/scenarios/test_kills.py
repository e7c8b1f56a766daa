"""Node agents that are killed again and again: what was shown once is never taken back."""

import random
import time
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.agent.node.agent_process import StartAgent, get, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.waiting import wait_until

pytestmark = pytest.mark.long

KILLS = 10
STEPS = 4


class Follower:
    """Scrapes, and notes every counter and bucket that fell."""

    def __init__(self) -> None:
        self.levels: dict[str, float] = {}
        self.falls: list[str] = []

    def scrape(self, url: str) -> float:
        """Return the steps that are shown."""
        for family in text_string_to_metric_families(get(f"{url}/metrics")[0].decode()):
            if family.type not in ("counter", "histogram"):
                continue
            for sample in family.samples:
                key = f"{sample.name}{sorted(sample.labels.items())}"
                if sample.value < self.levels.get(key, 0.0):
                    self.falls.append(f"{key}: {self.levels[key]:g} to {sample.value:g}")
                self.levels[key] = sample.value
        return next(v for k, v in self.levels.items() if k.startswith("mp_agent_steps_total"))

    def sees(self, url: str, steps: int) -> bool:
        """Scrape, and say whether so many steps are shown."""
        return self.scrape(url) == steps


@pytest.mark.slow
def test_no_counter_and_no_bucket_falls_in_a_storm_of_kills(
    start: StartAgent, start_rank: StartRank, run_dir: Path
) -> None:
    """One rank is late by more than the deadline: read again, its steps would be merged whole."""
    prompt, late = start_rank(0, world_size=2), start_rank(1, world_size=2)
    random_, follower = random.Random(3), Follower()
    for kills in range(1, KILLS + 1):
        agent = start(merge_deadline_seconds=0.05)
        url = wait_for_status(run_dir, pid=agent.pid).url
        follower.scrape(url)
        prompt.steps(STEPS, step_seconds=0.01, loss=1.0)
        wait_until(
            partial(follower.sees, url, STEPS * kills),
            what="the steps of one rank",
        )
        late.steps(STEPS, step_seconds=2.0, loss=1.0)
        time.sleep(random_.random() / 2)
        agent.kill()
        agent.wait()

    assert follower.falls == []
