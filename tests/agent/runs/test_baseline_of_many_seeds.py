"""Whichever good runs a baseline is of, no other good run differs from it."""

import msgspec
import pytest

from mp_agent.node.commands.flight import evidence_at
from mp_agent.runs.baseline import baseline_of, compare_with_baseline, departure_text, good_run
from mp_agent.settings import Settings
from tests.agent.runs.trainings import STEPS, Training, train

pytestmark = [pytest.mark.slow, pytest.mark.long]

SEEDS = 12
CHOSEN = ((0,), (1,), (2,), (0, 1), (2, 3), (4, 5), (9, 11), (0, 1, 2), (3, 4, 5, 6))


def test_no_seed_is_a_difference(tmp_path, monkeypatch):
    settings = Settings(flight_steps=2 * STEPS)
    monkeypatch.setenv("MP_AGENT_FLIGHT_STEPS", str(settings.flight_steps))
    runs = [train(Training(seed=seed), tmp_path / f"seed{seed}") for seed in range(SEEDS)]
    good = [good_run(evidence_at(run, settings)) for run in runs]
    for chosen in CHOSEN:
        path = tmp_path / "baseline.json"
        path.write_bytes(msgspec.json.encode(baseline_of([good[seed] for seed in chosen])))
        for seed, run in enumerate(runs):
            found = [
                departure_text(one) for one in compare_with_baseline(str(run), path).departures
            ]
            assert not found, (chosen, seed, found)
