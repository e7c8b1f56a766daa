"""The doctor reports which ranks and node agents are there, with real ones."""

import os
import socket
from pathlib import Path

import pytest

from mp_agent.doctor.machine import CheckStatus, Machine
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.doctor.conftest import found, only, verdicts
from tests.agent.node.agent_process import StartAgent
from tests.agent.node.conftest import StartRank
from tests.agent.node.fake_rank import FakeRank


def test_no_run_is_wrong_but_only_unknown_where_another_machine_is_asked(
    settings: Settings,
) -> None:
    assert "mp_agent.init()" in only("runs", Machine(settings)).remedy
    assert verdicts("runs", Machine(settings, scrape="http://node7:9464")) == {CheckStatus.UNKNOWN}


def test_living_and_dead_ranks_are_counted(start_rank: StartRank, settings: Settings) -> None:
    start_rank(0, world_size=2)
    start_rank(1, world_size=2).kill()
    finding = only("runs", Machine(settings))
    assert finding.verdict is CheckStatus.OK
    assert finding.text == "run llama: ranks on this node: 1 alive, 1 gone"


def test_a_run_that_is_over_is_not_taken_for_a_living_one(
    start_rank: StartRank, settings: Settings
) -> None:
    start_rank().kill()
    assert verdicts("runs", Machine(settings)) == {CheckStatus.UNKNOWN}
    assert verdicts("node-agent", Machine(settings)) == {CheckStatus.UNKNOWN}


def test_only_the_run_that_was_named_is_looked_at(
    start_rank: StartRank, settings: Settings
) -> None:
    start_rank()
    assert verdicts("runs", Machine(settings, run="llama")) == {CheckStatus.OK}
    other = only("runs", Machine(settings, run="gpt"))
    assert other.verdict is CheckStatus.WRONG
    assert "'gpt'" in other.text


def test_the_runs_of_a_supervised_job_are_found(settings: Settings) -> None:
    base = settings.dir / "exec-k3_x9zab"
    with FakeRank(locations.run_directory(base, "llama")):
        assert verdicts("runs", Machine(settings)) == {CheckStatus.OK}


def test_a_ring_of_another_version_is_reported(start_rank: StartRank, settings: Settings) -> None:
    rank = start_rank()
    assert verdicts("rings", Machine(settings)) == {CheckStatus.OK}
    with rank.path.open("r+b") as file:
        file.write(b"another!")
    finding = only("rings", Machine(settings))
    assert finding.verdict is CheckStatus.WRONG
    assert str(rank.path) in finding.text


def test_a_ring_of_another_user_is_reported(
    start_rank: StartRank, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_rank()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to uid" in only("rings", Machine(settings)).text


@pytest.mark.parametrize(
    ("node_agent", "hint"), [("spawn", "the job's log"), ("external", "mp-agent node")]
)
def test_a_run_without_a_node_agent_is_reported_with_who_should_watch_it(
    node_agent: str, hint: str, start_rank: StartRank, settings: Settings
) -> None:
    start_rank()
    machine = Machine(settings.model_copy(update={"node_agent": node_agent}))
    finding = only("node-agent", machine)
    assert finding.verdict is CheckStatus.WRONG
    assert hint in finding.remedy


def test_a_run_with_its_node_agent_is_fine(watched: Settings) -> None:
    machine = Machine(watched)
    assert "its node agent is alive, pid" in only("node-agent", machine).text
    assert verdicts("port", machine) == {CheckStatus.OK}


@pytest.mark.slow
def test_a_port_that_another_program_has_is_reported(
    start_rank: StartRank, start: StartAgent, settings: Settings
) -> None:
    start_rank().steps(1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = settings.model_copy(update={"port": other.getsockname()[1]})
        agent = start(port=taken.port)
        findings = found("port", Machine(taken))
    assert {finding.verdict for finding in findings} == {CheckStatus.WRONG}
    assert f"pid {agent.pid} serves no port" in findings[0].text
    assert findings[1].text == f"port {taken.port} is another program's"


def test_an_agent_that_moved_to_another_port_is_reported(watched: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    finding = only("port", Machine(watched.model_copy(update={"port": free})))
    assert finding.verdict is CheckStatus.WRONG
    assert f"not on {free}" in finding.text


def test_errors_in_the_log_are_shown_and_warnings_mentioned(
    start_rank: StartRank, settings: Settings, run_dir: Path
) -> None:
    start_rank()
    log = settings.log_dir / f"{run_dir.name}.log"
    log.parent.mkdir()
    log.write_text("2026 INFO fine\n")
    assert verdicts("log", Machine(settings)) == {CheckStatus.OK}
    log.write_text("2026 CRITICAL condition=MpAgentGradientExplosion state=firing step=7\n")
    assert verdicts("log", Machine(settings)) == {CheckStatus.OK}
    log.write_text("2026 WARNING odd\n2026 INFO fine\n2026 ERROR no metrics are served\n")
    odd, broken = found("log", Machine(settings))
    assert odd.verdict is CheckStatus.UNKNOWN
    assert broken.verdict is CheckStatus.WRONG
    assert broken.text.endswith("ERROR no metrics are served")
