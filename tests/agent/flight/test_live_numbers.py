"""An analysis has the numbers of the live agent."""

import pytest

from mp_agent.node.flight.replay import judged
from mp_agent.node.run.run import Run
from mp_agent.records.merged import MergedStep
from mp_agent.settings import Settings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("kind", ["clean", "nan-on-one-rank", "nan-in-backward", "overflow-storm"])
def test_steps_and_incident_are_those_of_the_live_merge(
    kind, outcomes, evidence_of, tmp_path, monkeypatch
):
    live: list[MergedStep] = []
    run = Run(outcomes[kind].run_dir, Settings(dir=tmp_path))
    monkeypatch.setattr(run.history, "add", live.append)
    run.poll(0.0)
    view = run.export(0.0, 0.0).view
    run.close()
    assert view is not None

    history = judged(evidence_of(kind))
    assert history.steps == tuple(live)
    assert history.first_nonfinite == view.first_nonfinite
