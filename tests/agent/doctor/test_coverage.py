"""The doctor reports why the numbers of a run over several nodes do not cover all ranks."""

import socket
from pathlib import Path

import pytest
from pydantic import SecretStr

from mp_agent.doctor.machine import CheckStatus, Machine
from mp_agent.ring.run_files import RootNote, write_root_note
from mp_agent.settings import Settings
from tests.agent.doctor.conftest import found, only, verdicts
from tests.agent.node.agent_process import StartAgent, scrape, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.waiting import wait_until

TWO_NODES = {"world_size": 2, "local_world_size": 1, "local_rank": 0}


@pytest.mark.slow
def test_ranks_that_are_missing_and_what_the_others_lost_is_named(
    start_rank: StartRank, start: StartAgent, settings: Settings, run_dir: Path
) -> None:
    rank = start_rank(0, world_size=2)
    rank.steps(2)
    rank.count(probe_errors=2)
    agent = start(merge_deadline_seconds=0.1)
    status = wait_for_status(run_dir, pid=agent.pid)
    wait_until(
        lambda: scrape(status).get("coverage_ratio", 1.0) < 1.0,
        seconds=60,
        what="a step without rank 1",
    )
    finding = only("coverage", Machine(settings))
    assert finding.verdict is CheckStatus.WRONG
    assert "50% of the ranks; missing: 1" in finding.text
    lost = [finding.text for finding in found("losses", Machine(settings))]
    assert "mp_agent_probe_errors_total is 2 in run llama" in lost
    assert verdicts("coverage", Machine(settings, run="gpt")) == {CheckStatus.UNKNOWN}


@pytest.mark.slow
def test_a_whole_run_is_covered(watched: Settings) -> None:
    machine = Machine(watched)
    assert verdicts("coverage", machine) == {CheckStatus.OK}
    assert verdicts("root", machine) == {CheckStatus.OK}


@pytest.fixture
def rank_of_node_1(start_rank: StartRank) -> None:
    start_rank(1, **TWO_NODES, node_rank=1)


@pytest.mark.usefixtures("rank_of_node_1")
def test_without_token_and_without_root_both_are_reported(settings: Settings) -> None:
    token, root = found("root", Machine(settings, environ={}))
    assert (token.verdict, root.verdict) == (CheckStatus.WRONG, CheckStatus.WRONG)
    assert "no token is known" in token.text
    assert "MP_AGENT_ROOT" in root.remedy


@pytest.mark.usefixtures("rank_of_node_1")
def test_what_the_jobs_store_gave_is_used_and_what_it_did_not_is_reported(
    settings: Settings, run_dir: Path
) -> None:
    note = RootNote(asked_by_unix_ns=1_001, url="http://127.0.0.1:1", token="secret")
    write_root_note(run_dir, note)
    finding = only("root", Machine(settings, environ={}))
    assert finding.verdict is CheckStatus.WRONG
    assert "http://127.0.0.1:1 cannot be reached" in finding.text
    problem = RootNote(asked_by_unix_ns=1_001, url="http://127.0.0.1:1", problem="no store answers")
    write_root_note(run_dir, problem)
    findings = found("root", Machine(settings, environ={}))
    assert "no store answers" in findings[0].text
    assert "no token" in findings[1].text
    write_root_note(run_dir, RootNote(asked_by_unix_ns=7, url="http://127.0.0.1:1", token="old"))
    assert "no token" in found("root", Machine(settings, environ={}))[0].text


@pytest.mark.usefixtures("rank_of_node_1")
def test_a_root_that_can_be_reached_is_fine(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        root = f"127.0.0.1:{listener.getsockname()[1]}"
        changes = {"root": root, "token": SecretStr("secret")}
        machine = Machine(settings.model_copy(update=changes), environ={})
        assert verdicts("root", machine) == {CheckStatus.OK}


def test_the_node_of_rank_0_needs_only_a_token(start_rank: StartRank, settings: Settings) -> None:
    start_rank(0, **TWO_NODES)
    findings = found("root", Machine(settings, environ={}))
    assert [finding.verdict for finding in findings] == [CheckStatus.WRONG, CheckStatus.OK]
