"""What is written is read again, to the bit; what cannot be read is named."""

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mp_agent.errors import FlightError
from mp_agent.flight.record.archive import read_archive, write_archive
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.flight import FlightRequest, NodeRecord, RankLog, Segment
from tests.agent.flight.builders import make_log, make_node_record, make_segment
from tests.agent.node.builders import gradient_row, layer_table, make_schema
from tests.agent.records.samples import make_condition

CONDITION = make_condition()


def written(record: NodeRecord, directory: Path) -> Path:
    path = directory / "node0.npz"
    with path.open("wb") as file:
        write_archive(file, record)
    return path


def rows_of(log: RankLog) -> list[bytes]:
    """Return every number of a rank's rows, as bytes: NaN and −0.0 included."""
    rows: list[bytes] = []
    for segment in log.segments:
        for step in segment.steps:
            moment = np.array([step.sequence, step.step, step.time_unix_ns])
            rows.append(moment.tobytes() + step.values.tobytes() + step.gradients.tobytes())
        rows += [
            bytes(str(table.sequence), "ascii") + table.gradients.tobytes()
            for table in segment.tables
        ]
    return rows


def test_everything_comes_back(tmp_path):
    trigger = StoredConditionEvent(
        state="firing", condition=CONDITION, step=9, time_unix_seconds=3.0
    )
    later = make_segment(2, first=4, schema=make_schema(layers=("other",)), tables=(5,))
    odd = make_segment(1, first=6, loss=-0.0, loss_scale=float("inf"))
    log = make_log(segments=(make_segment(tables=(1, 3)), later, odd), world_size=2)
    record = make_node_record(log, make_log(1, world_size=2))
    record = replace(
        record,
        conditions=(CONDITION,),
        request=replace(record.request, trigger=trigger),
        settings={"run": "llama", "thresholds": {}, "sd_dir": None},
        left_out=2,
    )
    read = read_archive(written(record, tmp_path))
    assert [rows_of(log) for log in read.ranks] == [rows_of(log) for log in record.ranks]
    assert [segment.schema for segment in read.ranks[0].segments] == [
        segment.schema for segment in log.segments
    ]
    for name in ("request", "conditions", "settings", "thresholds", "versions", "left_out", "run"):
        assert getattr(read, name) == getattr(record, name)
    assert [(log.identity, log.state, log.end) for log in read.ranks] == [
        (log.identity, log.state, log.end) for log in record.ranks
    ]


def test_numpy_and_a_zip_tool_are_enough_to_read_it(tmp_path):
    path = written(make_node_record(), tmp_path)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["rank0/0/sequence"].tolist() == [1, 2, 3]
        assert arrays["rank0/0/values"].dtype == np.dtype("<f8")
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    assert (manifest["format"], manifest["version"]) == ("mp_agent flight record", 2)
    segment = manifest["ranks"][0]["segments"][0]
    assert manifest["schemas"][segment["schema"]]["step_columns"][0] == "loss"


def test_tables_that_replicas_have_in_common_are_written_once(tmp_path):
    ranks = [make_log(r, segments=(make_segment(tables=(1,)),), world_size=8) for r in range(8)]
    path = written(make_node_record(*ranks), tmp_path)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.startswith("layers/")]
    assert len(names) == 1
    assert [len(log.segments[0].tables) for log in read_archive(path).ranks] == [1] * 8


def test_a_name_that_is_no_utf8_does_not_prevent_the_record(tmp_path):
    schema = make_schema(layers=("bad\udcff",))
    rows = np.stack([gradient_row(elements=1.0)])
    segment = Segment(schema=schema, tables=(layer_table(1, rows),))
    record = make_node_record(make_log(segments=(segment,)))
    read = read_archive(written(record, tmp_path))
    assert read.ranks[0].segments[0].schema.layers[0].name == "bad?"


def altered(path: Path, **changes: object) -> Path:
    """Rewrite the manifest with other values."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = {**json.loads(members["manifest.json"]), **changes}
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_every_truncation_is_refused_by_name(tmp_path):
    path = written(make_node_record(), tmp_path)
    whole = path.read_bytes()
    for length in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FlightError, match=r"node0\.npz: .*truncated"):
            read_archive(path)


def test_flipped_bytes_are_refused_or_change_nothing(tmp_path):
    path = written(make_node_record(), tmp_path)
    whole = path.read_bytes()
    expected = [rows_of(log) for log in read_archive(path).ranks]
    for place in range(0, len(whole), max(len(whole) // 80, 1)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            read = read_archive(path)
        except FlightError as error:
            assert "node0.npz" in str(error)
        else:
            assert [rows_of(log) for log in read.ranks] == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 1}, "format version 1; this release reads 2"),
        ({"format": "something"}, "not a flight record"),
        ({"ranks": 3}, "its manifest cannot be read"),
        ({"schemas": []}, "damaged: no schema 0"),
        ({"layers": []}, "its manifest contradicts itself"),
    ],
)
def test_a_foreign_manifest_is_refused_by_name(tmp_path, changes, problem):
    path = altered(written(make_node_record(), tmp_path), **changes)
    with pytest.raises(FlightError, match=rf"node0\.npz: .*{problem}"):
        read_archive(path)


def test_arrays_that_are_missing_or_of_another_shape_are_refused(tmp_path):
    path = written(make_node_record(), tmp_path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for array in (np.zeros((3, 2)), np.zeros(3, dtype="<f4"), None):
        changed = dict(members)
        del changed["rank0/0/values.npy"]
        if array is not None:
            file = io.BytesIO()
            np.lib.format.write_array(file, array)
            changed["rank0/0/values.npy"] = file.getvalue()
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in changed.items():
                archive.writestr(name, data)
        with pytest.raises(FlightError, match=r"damaged: .*values"):
            read_archive(path)


def test_a_zip_of_something_else_is_no_record(tmp_path):
    path = tmp_path / "node0.npz"
    np.savez(path, a=np.zeros(3))
    with pytest.raises(FlightError, match="not a flight record: it has no manifest"):
        read_archive(path)


@pytest.mark.parametrize("name", ["", "../evil", "a/b", "..", "x" * 200])
def test_a_request_cannot_name_a_place_elsewhere(name):
    with pytest.raises(ValueError, match="name of a flight record"):
        FlightRequest(name=name, reason="request", first=1, last=2, requested_unix_seconds=0.0)
