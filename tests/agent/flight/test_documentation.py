"""docs/flight-record.md says what is true."""

import re
from pathlib import Path
from typing import Any

from mp_agent.flight.postmortem.diagnosis import Causes
from mp_agent.flight.report import as_dict
from tests.agent.flight.analyses import exploding
from tests.agent.flight.builders import make_node_record
from tests.agent.flight.record.test_archive import written
from tests.subtests import each

PAGE = Path(__file__).parents[3] / "docs" / "flight-record.md"


def test_the_sample_reads_a_record(tmp_path, monkeypatch):
    written(make_node_record(), tmp_path)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["loss"].tolist() == [2.0, 2.0, 2.0]


@each("cause", [member.value for member in Causes])
def test_every_cause_is_listed_with_its_alerts(cause):
    (row,) = (line for line in PAGE.read_text().splitlines() if f"`{cause.name}`" in line)
    assert set(re.findall(r"`(MpAgent\w+)`", row)) == set(cause.conditions)


def test_every_key_of_the_document_is_described():
    text = PAGE.read_text()
    analysis = as_dict(exploding())
    nested = (
        *analysis["findings"][:1],
        *analysis["steps"][:1],
        *analysis["ranks"][:1],
        analysis["run"],
    )
    keys = {*analysis, *(key for item in nested for key in item)}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []
