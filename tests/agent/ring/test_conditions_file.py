import dataclasses
import os
from pathlib import Path

import pytest

from mp_agent.errors import ReportError
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.ring.run_files import (
    BYTES_MAX,
    EVENTS_KEPT,
    ConditionNews,
    conditions_path,
    decode_news,
    encode_news,
    read_conditions,
    write_conditions,
)
from tests.agent.records.samples import make_event


def news_of(*events: StoredConditionEvent) -> ConditionNews:
    news = ConditionNews(epoch="a")
    for event in events:
        news = news.with_event(event)
    return news


def test_what_is_written_is_read(tmp_path: Path):
    news = news_of(make_event(), make_event(name="MpAgentLossNonFinite", rank="3", layer="head"))
    write_conditions(tmp_path, news)
    assert read_conditions(tmp_path) == news
    assert [path.name for path in tmp_path.iterdir()] == ["conditions.json"]
    assert conditions_path(tmp_path).stat().st_mode & 0o777 == 0o600


def test_events_are_numbered_on_and_the_oldest_go():
    news = news_of(*(make_event(since_step=step) for step in range(EVENTS_KEPT + 5)))
    assert len(news.events) == EVENTS_KEPT
    assert news.last_number == EVENTS_KEPT + 5
    assert [event.condition.since_step for event in news.after(EVENTS_KEPT + 3)] == [
        EVENTS_KEPT + 3,
        EVENTS_KEPT + 4,
    ]
    assert news.after(news.last_number) == ()
    assert ConditionNews(epoch="a").last_number == 0


def test_long_texts_cost_the_oldest_events_and_never_more_bytes_than_are_read():
    news = news_of(*(make_event(since_step=step, description="ä" * 5_000) for step in range(20)))
    content = encode_news(news)
    kept = decode_news(content)
    assert len(content) <= BYTES_MAX
    assert 0 < len(kept.events) < 20
    assert kept.events[-1] == news.events[-1]


_ONE = news_of(make_event())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b'{"epoch": 1}',
        b'{"epoch": "a", "format": 99}',
        b'{"epoch": "a", "events": [{"number": 1, "event": {}}]}',
        b" " * (BYTES_MAX + 1),
        b"[" * 50_000,
        encode_news(dataclasses.replace(_ONE, events=_ONE.events * 2)),
    ],
)
def test_what_is_no_such_file_is_refused_and_reads_as_nothing(tmp_path: Path, content: bytes):
    with pytest.raises(ReportError):
        decode_news(content)
    conditions_path(tmp_path).write_bytes(content)
    assert read_conditions(tmp_path) is None


def test_a_fifo_and_a_link_in_its_place_are_not_read(tmp_path: Path):
    os.mkfifo(conditions_path(tmp_path))
    assert read_conditions(tmp_path) is None
    conditions_path(tmp_path).unlink()
    write_conditions(tmp_path, news_of(make_event()))
    linked = tmp_path / "run"
    linked.mkdir()
    conditions_path(linked).symlink_to(conditions_path(tmp_path))
    assert read_conditions(linked) is None
