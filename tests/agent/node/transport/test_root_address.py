import pytest
from pydantic import SecretStr

from mp_agent.node.transport.root_address import RootAddress, locate, root_url
from mp_agent.ring.run_files import RootNote
from mp_agent.settings import Settings

NOTE = RootNote(
    asked_by_unix_ns=1, created_unix_ns=77, url="http://10.0.0.1:9464", token="from-store"
)
PROBLEM = RootNote(asked_by_unix_ns=1, url="http://10.0.0.1:9464", problem="no store")
MASTER = {"MASTER_ADDR": "10.0.0.9"}


def settings(**changes) -> Settings:
    if "token" in changes:
        changes["token"] = SecretStr(changes["token"])
    return Settings(**changes)


def test_what_the_store_gave_names_url_attempt_and_token():
    found = locate(settings(token="set"), NOTE, MASTER, waited=False)
    assert found == RootAddress(url=NOTE.url, token="from-store", created_unix_ns=77)


def test_the_setting_root_wins_and_takes_the_token_that_there_is():
    found = locate(settings(root="head:1234", token="set"), NOTE, MASTER, waited=False)
    assert found == RootAddress(url="http://head:1234", token="set")
    found = locate(settings(root="head:1234"), NOTE, {}, waited=False)
    assert found == RootAddress(url="http://head:1234", token="from-store")


def test_without_the_store_the_master_has_to_do_but_only_once_it_was_waited_for():
    assert locate(settings(token="set"), None, MASTER, waited=False) is None
    found = locate(settings(token="set"), None, MASTER, waited=True)
    assert found == RootAddress(url="http://10.0.0.9:9464", token="set")
    assert locate(settings(token="set"), None, {}, waited=True) is None


def test_where_the_store_did_not_answer_the_token_is_that_of_the_settings():
    assert locate(settings(token="set"), PROBLEM, {}, waited=False) == RootAddress(
        url=PROBLEM.url, token="set"
    )
    assert locate(settings(), PROBLEM, {}, waited=True) == RootAddress(url=PROBLEM.url)


def test_no_token_is_shown():
    shown = repr(NOTE) + repr(locate(settings(), NOTE, {}, waited=False))
    assert "from-store" not in shown


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("head", "http://head:9464"),
        ("head:80", "http://head:80"),
        ("[fe80::1]", "http://[fe80::1]:9464"),
        ("http://head", "http://head:9464"),
        ("https://proxy/agents/", "https://proxy/agents"),
    ],
)
def test_the_setting_may_be_a_host_an_address_or_a_url(setting, url):
    assert root_url(setting) == url
