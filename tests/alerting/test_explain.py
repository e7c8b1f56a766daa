"""`mp-agent explain`."""

import pytest
from click.testing import CliRunner

from mp_agent.alerting.commands import explain_command
from mp_agent.alerting.conditions import CONDITIONS


@pytest.mark.parametrize("name", ["MpAgentRankNonFinite", "ranknonfinite", "RankNonFinite"])
def test_it_shows_what_the_runbook_says(name: str) -> None:
    done = CliRunner().invoke(explain_command, [name])
    assert done.exit_code == 0
    shown = " ".join(done.output.split())
    assert "MpAgentRankNonFinite" in shown and "Check the rank's batch at that step." in shown
    assert "Critical, as PromQL" in shown and "<details>" not in shown and "../" not in shown


def test_every_alert_is_explained() -> None:
    for condition in CONDITIONS:
        done = CliRunner().invoke(explain_command, [condition.name])
        assert done.exit_code == 0 and "What to do" in done.output, condition.name


@pytest.mark.parametrize(
    ("name", "meant"), [("MpAgentLossSpik", "MpAgentLossSpike"), ("LossSpik", "LossSpike")]
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(name: str, meant: str) -> None:
    done = CliRunner().invoke(explain_command, [name])
    assert done.exit_code == 2 and f"did you mean {meant}?" in done.output
