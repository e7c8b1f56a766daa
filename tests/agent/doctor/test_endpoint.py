"""The doctor asks real node agents, protected ones too, and knows another program from them."""

from pathlib import Path

import pytest
import trustme
from pydantic import SecretStr

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, Kind
from mp_agent.doctor.export import LOSSES
from mp_agent.doctor.machine import CheckStatus, Machine
from mp_agent.settings import Settings
from tests.agent.doctor.conftest import answering, found, only, verdicts
from tests.agent.node.agent_process import StartAgent
from tests.agent.node.conftest import StartRank

ASKED = ("health", "metrics", "losses", "unsupported")


def test_an_agent_that_answers_is_fine_in_every_respect(watched: Settings) -> None:
    machine = Machine(watched)
    for check in ASKED:
        assert verdicts(check, machine) == {CheckStatus.OK}, check
    assert only("metrics", machine).text.endswith("of llama")


def test_no_agent_to_ask_is_unknown(settings: Settings) -> None:
    for check in (*ASKED, "coverage"):
        assert verdicts(check, Machine(settings)) == {CheckStatus.UNKNOWN}


def test_an_address_without_an_answer_is_reported(settings: Settings) -> None:
    finding = only("health", Machine(settings, scrape="http://127.0.0.1:1"))
    assert finding.verdict is CheckStatus.WRONG
    assert "refused" in finding.text
    for check in ("losses", "unsupported"):
        machine = Machine(settings, scrape="http://127.0.0.1:1")
        assert only(check, machine).verdict is CheckStatus.UNKNOWN


def test_another_program_is_not_taken_for_the_agent(settings: Settings) -> None:
    answers = {"/metrics": (200, "# TYPE up gauge\nup 1\n"), "/healthz": (200, "ok")}
    with answering(answers) as url:
        finding = only("metrics", Machine(settings, scrape=url))
    assert finding.verdict is CheckStatus.WRONG
    assert "no mp_agent_build_info" in finding.text


@pytest.mark.parametrize("answer", [(200, "<html>{{"), (404, ""), (302, ""), (500, "")])
def test_answers_of_every_other_kind_are_wrong(answer: tuple[int, str], settings: Settings) -> None:
    with answering({"/metrics": answer}) as url:
        finding = only("metrics", Machine(settings, scrape=url))
    assert finding.verdict is CheckStatus.WRONG
    # A redirect is reported, not followed: it would carry the password to another server.
    assert answer[0] == 200 or f"status {answer[0]}" in finding.text


def test_each_loss_is_a_counter_and_its_series_is_named(settings: Settings) -> None:
    assert {BY_PROMETHEUS_NAME[loss.metric].kind for loss in LOSSES} == {Kind.COUNTER}
    text = "".join(
        f'# TYPE {loss.metric} counter\n{loss.metric}{{run="a"}} {number}\n'
        f'{loss.metric}{{run="b"}} 0\n'
        for number, loss in enumerate(LOSSES, 1)
    )
    with answering({"/metrics": (200, text)}) as url:
        findings = found("losses", Machine(settings, scrape=url))
        assert verdicts("losses", Machine(settings, scrape=url, run="b")) == {CheckStatus.OK}
    texts = [finding.text for finding in findings]
    assert texts == [f"{loss.metric} is {n} in run a" for n, loss in enumerate(LOSSES, 1)]
    assert all(finding.verdict is CheckStatus.WRONG and finding.remedy for finding in findings)


def test_a_feature_that_is_not_supported_is_mentioned(settings: Settings) -> None:
    text = 'mp_agent_unsupported_info{run="a",node_rank="0",feature="sparse"} 1\n'
    with answering({"/metrics": (200, text)}) as url:
        finding = only("unsupported", Machine(settings, scrape=url))
    assert finding.verdict is CheckStatus.UNKNOWN
    assert "sparse" in finding.text


@pytest.mark.slow
def test_a_protected_agent_is_asked_with_the_settings_else_the_remedy_is_named(
    start_rank: StartRank, start: StartAgent, settings: Settings, tmp_path: Path
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("node0.example.com")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "agent.pem")
    start_rank().steps(1)
    tls = {
        "tls_certificate": tmp_path / "agent.pem",
        "tls_key": tmp_path / "key.pem",
        "tls_client_ca": tmp_path / "ca.pem",
    }
    start(**tls, basic_auth_user="scraper", basic_auth_password="secret")
    secret = {"basic_auth_user": "scraper", "basic_auth_password": SecretStr("secret")}

    def asked(**changes: object) -> Machine:
        return Machine(settings.model_copy(update=changes))

    whole = asked(**tls, **secret, tls_ca=tmp_path / "ca.pem")
    assert verdicts("metrics", whole) == {CheckStatus.OK}
    assert "BASIC_AUTH" in only("metrics", asked(**tls, tls_ca=tmp_path / "ca.pem")).remedy
    assert "MP_AGENT_TLS_CA" in only("metrics", asked(**tls, **secret)).remedy
    missing = asked(**secret, tls_ca=tmp_path / "none.pem")
    assert "none.pem cannot be used" in only("metrics", missing).text
