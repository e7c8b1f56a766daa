import logging

import pytest

from mp_agent import settings
from mp_agent.errors import SettingError
from mp_agent.settings import load_settings


@pytest.fixture
def without_extra(monkeypatch) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(settings, "find_spec", find)


def test_otlp_can_be_asked_for_where_its_packages_are():
    assert load_settings(exporters=("prometheus", "otlp"))[0].exporters == ("prometheus", "otlp")


def test_an_argument_that_needs_the_extra_raises_and_names_it(without_extra):
    with pytest.raises(SettingError, match=r"exporters.*mp-agent\[otlp\]"):
        load_settings(exporters=("otlp",))


def test_a_variable_that_needs_the_extra_is_logged_and_ignored(without_extra, monkeypatch, caplog):
    monkeypatch.setenv("MP_AGENT_EXPORTERS", "otlp")
    with caplog.at_level(logging.WARNING):
        loaded, ignored = load_settings()
    assert (loaded.exporters, ignored) == (("prometheus",), 1)
    assert "MP_AGENT_EXPORTERS" in caplog.text and "mp-agent[otlp]" in caplog.text


def test_prometheus_alone_needs_no_extra(without_extra):
    assert load_settings(exporters=("prometheus",))[0].exporters == ("prometheus",)
