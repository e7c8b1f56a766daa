"""What fails in the probe stays in the probe."""

import logging

import pytest

from mp_agent.probe import accelerator
from mp_agent.probe.isolation import FAILURES_AT_MOST, REST_CALLS, REST_CALLS_AT_MOST, Shield


@pytest.fixture
def failures() -> list[int]:
    return []


@pytest.fixture
def shield(failures: list[int]) -> Shield:
    return Shield(on_failure=lambda: failures.append(1))


def fail(*_: object) -> None:
    raise RuntimeError("broken")


def test_a_failure_is_swallowed_counted_and_logged_once_per_kind(shield, failures, caplog):
    with caplog.at_level(logging.WARNING, "mp_agent"):
        for kind in ("one", "one", "two"):
            shield.run(kind, fail)
    assert len(failures) == 3
    assert [record.args for record in caplog.records] == [("one",), ("two",)]
    assert all(record.exc_info for record in caplog.records)


def test_a_kind_that_keeps_failing_rests_and_is_tried_again_while_others_go_on(failures):
    resting: list[str] = []
    shield = Shield(on_failure=lambda: failures.append(1), on_rest=resting.append)
    for _ in range(FAILURES_AT_MOST + REST_CALLS):
        shield.run("kind", fail)
    assert len(failures) == FAILURES_AT_MOST
    assert resting == ["kind"]
    calls: list[int] = []
    shield.run("other", calls.append, 1)
    shield.run("kind", calls.append, 2)
    assert calls == [1, 2]
    shield.run("kind", fail)
    assert len(failures) == FAILURES_AT_MOST + 1


@pytest.mark.slow
def test_the_longer_a_kind_fails_the_longer_it_rests(shield, failures):
    for _ in range(20 * REST_CALLS_AT_MOST):
        shield.run("kind", fail)
    assert len(failures) < 40


def test_what_is_contained_fails_by_itself(shield, failures):
    calls: list[int] = []

    def hook() -> None:
        shield.contain("part", fail)
        calls.append(1)

    shield.run("hook", hook)
    assert (calls, failures) == ([1], [1])


def test_a_failure_that_cannot_be_logged_is_swallowed_too(shield, failures, monkeypatch):
    def refuse(record: logging.LogRecord) -> bool:
        raise RuntimeError("a filter of the script's")

    logger = logging.getLogger("mp_agent")
    logger.addFilter(refuse)
    try:
        shield.run("kind", fail)
    finally:
        logger.removeFilter(refuse)


def test_a_failure_of_the_counting_is_swallowed_too():
    Shield(on_failure=fail).run("kind", fail)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_not_an_error_passes_and_leaves_it_usable(shield, error):
    def leave() -> None:
        raise error

    with pytest.raises(error):
        shield.run("kind", leave)
    calls: list[int] = []
    shield.run("kind", calls.append, 1)
    assert calls == [1]


def test_it_does_not_run_within_itself(shield):
    calls: list[int] = []
    shield.run("outer", shield.run, "inner", calls.append, 1)
    assert calls == []


def test_nothing_runs_while_a_graph_is_captured(monkeypatch):
    noted: list[tuple[object, ...]] = []
    calls: list[int] = []
    shield = Shield(on_failure=fail, on_capture=lambda *event: noted.append(event))
    monkeypatch.setattr(accelerator, "captures_graph", lambda: True)
    shield.run("kind", calls.append, 1)
    assert (noted, calls) == ([(calls.append, (1,))], [])


def test_it_accounts_for_its_time_once(shield):
    taken: list[float] = []
    shield.run("kind", lambda: sum(range(100_000)) and None)
    shield.run("kind", lambda: taken.append(shield.pop_seconds()))
    shield.run("kind", lambda: taken.append(shield.pop_seconds()))
    assert taken[0] > taken[1] > 0
