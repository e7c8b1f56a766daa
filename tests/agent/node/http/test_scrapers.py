import pytest

from mp_agent.node.http.status import SCRAPERS_AT_MOST, ScrapeLog


def test_who_comes_once_is_not_waited_for():
    scrapes = ScrapeLog()
    scrapes.record("curl", 0.0)

    assert scrapes.regulars(0.1) == set()


def test_both_of_a_pair_of_servers_are_waited_for():
    scrapes = ScrapeLog()
    for time in (0.0, 15.0, 30.0):
        scrapes.record("a", time)
        scrapes.record("b", time + 5)

    assert scrapes.regulars(40.0) == {"a", "b"}


def test_who_stays_away_for_some_of_its_own_intervals_is_given_up():
    scrapes = ScrapeLog()
    for time in (0.0, 15.0):
        scrapes.record("slow", time)
    for time in (0.0, 1.0):
        scrapes.record("fast", time)

    assert scrapes.regulars(20.0) == {"slow"}


@pytest.mark.slow
def test_names_are_forgotten_when_there_are_too_many_except_those_that_recur():
    scrapes = ScrapeLog()
    scrapes.record("prometheus", 0.0)
    scrapes.record("prometheus", 15.0)
    for number in range(100_000):
        scrapes.record(f"curl/{number}", 15.0 + number / 100_000)

    assert len(scrapes.names) == SCRAPERS_AT_MOST
    assert scrapes.regulars(20.0) == {"prometheus"}


def test_a_scraper_of_the_beginning_outlives_a_crowd_that_comes_twice():
    scrapes = ScrapeLog()
    for time in (0.0, 15.0, 30.0):
        scrapes.record("prometheus", time)
    for number in range(1000):
        scrapes.record(f"curl/{number}", 31.0)
        scrapes.record(f"curl/{number}", 41.0)

    assert "prometheus" in scrapes.regulars(41.0)
