"""Who hears of a condition: the log, the ranks of this node and of others, the metrics."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.node.conditions import messages
from mp_agent.node.conditions import tracker as module
from mp_agent.ring.run_files import conditions_path, read_conditions
from tests.agent.node.training import EXPLOSION, Training


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge every step, however fast the test makes them."""
    monkeypatch.setattr(module, "PROCESSOR_SHARE", 1.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def training(run_dir: Path) -> Training:
    found = Training(run_dir)
    found.train(60)
    return found


def test_each_event_is_one_line_of_the_log(training: Training, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "mp_agent.node")
    training.step(norm=5_000.0)
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelno == logging.CRITICAL
    assert line.startswith(
        f"condition={EXPLOSION} state=firing severity=critical run=llama step=61 "
        "since_step=61 rank= layer= phase= value=1 "
        'summary="Gradients are exploding, since step 61. '
    )
    remedy = json.loads(line.split(" remedy=")[1])
    assert remedy.startswith("Clip gradients")


def test_the_file_for_the_ranks_holds_the_events(training: Training, run_dir: Path):
    training.step(norm=5_000.0)
    training.step(nan_elements=1.0)
    news = read_conditions(run_dir)
    assert news is not None
    assert [item.event for item in news.events] == training.events


def test_a_full_directory_is_logged_once_and_the_events_written_later(
    training: Training, run_dir: Path, monkeypatch, caplog: pytest.LogCaptureFixture
):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(messages, "write_conditions", full)
        training.step(norm=5_000.0)
        training.step(nan_elements=1.0)
        training.tracker.publish_again()
        assert len(training.events) == 2
        assert caplog.text.count("conditions cannot be sent to the ranks") == 1
        assert read_conditions(run_dir) is None

    training.tracker.publish_again()
    news = read_conditions(run_dir)
    assert news is not None
    assert [item.event for item in news.events] == training.events
    before = conditions_path(run_dir).stat().st_ino
    training.tracker.publish_again()
    assert conditions_path(run_dir).stat().st_ino == before


def test_other_nodes_are_notified_while_it_is_news(training: Training, tmp_path: Path):
    assert training.tracker.recent_news(training.now_seconds) == b""
    training.step(norm=5_000.0)
    content = training.tracker.recent_news(training.now_seconds + 59)
    assert training.tracker.recent_news(training.now_seconds + 61) == b""

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = Training(elsewhere).tracker
    other.adopt_from_root(b"")
    assert not conditions_path(elsewhere).exists()
    other.adopt_from_root(content)
    assert read_conditions(elsewhere) == read_conditions(tmp_path)
    before = conditions_path(elsewhere).stat().st_ino
    other.adopt_from_root(content)
    assert conditions_path(elsewhere).stat().st_ino == before


def test_what_the_root_says_may_be_nonsense(run_dir: Path, caplog: pytest.LogCaptureFixture):
    tracker = Training(run_dir).tracker
    for content in (b"nonsense", b"more nonsense"):
        tracker.adopt_from_root(content)
    assert not conditions_path(run_dir).exists()
    assert len(caplog.records) == 1


def test_both_metrics_exist_for_everything_from_the_start(run_dir: Path):
    training = Training(run_dir)
    assert set(training.tracker.fired) == {
        (condition.name, level.severity.value)
        for condition in CONDITIONS
        for level in condition.levels
    }
    view = training.export().view
    for name in ("mp_agent_condition_active", "mp_agent_condition_fired_total"):
        reading = BY_PROMETHEUS_NAME[name].read
        assert reading is not None
        assert reading(view) == dict.fromkeys(training.tracker.fired, 0.0)


def test_they_show_what_is_in_force_and_how_often_it_began(training: Training):
    training.step(norm=5_000.0)
    view = training.export().view
    read_active = BY_PROMETHEUS_NAME["mp_agent_condition_active"].read
    read_fired = BY_PROMETHEUS_NAME["mp_agent_condition_fired_total"].read
    assert read_active is not None and read_fired is not None
    active, fired = read_active(view), read_fired(view)
    assert isinstance(active, Mapping) and isinstance(fired, Mapping)
    # The milder level holds as well; it is muted, but in force.
    levels = {(EXPLOSION, "critical"): 1.0, (EXPLOSION, "warning"): 1.0}
    assert {level: value for level, value in active.items() if value} == levels
    assert {level: value for level, value in fired.items() if value} == levels
