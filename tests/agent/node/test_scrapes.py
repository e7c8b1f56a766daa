from mp_agent.node.scrapes import ScrapeLog


def test_who_comes_once_is_not_waited_for():
    scrapes = ScrapeLog()
    scrapes.note("curl", 0.0)

    assert scrapes.regulars(0.1) == set()


def test_both_of_a_pair_of_servers_are_waited_for():
    scrapes = ScrapeLog()
    for time in (0.0, 15.0, 30.0):
        scrapes.note("a", time)
        scrapes.note("b", time + 5)

    assert scrapes.regulars(40.0) == {"a", "b"}


def test_who_stays_away_for_some_of_its_own_intervals_is_given_up():
    scrapes = ScrapeLog()
    for time in (0.0, 15.0):
        scrapes.note("slow", time)
    for time in (0.0, 1.0):
        scrapes.note("fast", time)

    assert scrapes.regulars(20.0) == {"slow"}
