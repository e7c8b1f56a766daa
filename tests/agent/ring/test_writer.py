"""What a rank writes and when it refuses; how its life is seen from outside."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mp_agent.errors import RingError
from mp_agent.records.schema import Schema
from mp_agent.records.steps import EndReason, LayerTable, Phase, StepRecord
from mp_agent.ring.files import appearing
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.children import exit_code_of
from tests.agent.ring.samples import identity, layer_table, schema, step_record


def test_the_state_says_where_the_rank_stands(writer: RingWriter) -> None:
    reader = RingReader.open(writer.path)
    assert (reader.state.phase, reader.state.phase_name) == (Phase.STARTING, "starting")
    assert reader.state.phase_unix_ns > 0
    writer.stamp(Phase.BACKWARD, sequence=7)
    writer.stamp(Phase.OPTIMIZER)
    state = reader.state
    assert (state.phase, state.phase_name) == (Phase.OPTIMIZER, "optimizer")
    assert (state.started_sequence, state.committed_sequence) == (7, 0)
    writer.stamp(Phase.OTHER, name="Warm-up")
    assert reader.state.phase_name == "Warm-up"
    writer.stamp(Phase.FORWARD)
    assert reader.state.phase_name == "forward"


def test_a_long_phase_name_is_cut_between_characters(writer: RingWriter) -> None:
    writer.stamp(Phase.OTHER, name="x" + "ä" * 100)
    assert RingReader.open(writer.path).state.phase_name == "x" + "ä" * 31


def test_a_phase_name_that_is_no_text_is_written_all_the_same(writer: RingWriter) -> None:
    writer.stamp(Phase.OTHER, name="a\ud800b")
    assert RingReader.open(writer.path).state.phase_name == "a?b"


def test_a_half_made_file_that_a_signal_left_is_in_no_ones_way(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "rank0.ring"
    path.parent.mkdir(mode=0o700)
    left = path.with_name(f".{path.name}.{os.getpid()}")
    left.write_bytes(b"half")
    with appearing(path) as fd:
        os.write(fd, b"whole")
    os.close(fd)
    assert path.read_bytes() == b"whole"
    assert not left.exists()


def test_steps_move_the_sequence_numbers_of_the_state(writer: RingWriter, schema: Schema) -> None:
    reader = RingReader.open(writer.path)
    writer.write_step(step_record(schema, 4), complete=False)
    assert reader.state.committed_sequence == 0
    writer.write_step(step_record(schema, 4))
    assert (reader.state.started_sequence, reader.state.committed_sequence) == (4, 4)


def test_counts_add_up(writer: RingWriter) -> None:
    writer.count(probe_errors=1, probe_seconds=0.25)
    writer.count(probe_errors=2, setting_errors=3, records_dropped=4, probe_seconds=0.5)
    state = RingReader.open(writer.path).state
    assert (state.probe_errors, state.setting_errors, state.records_dropped) == (3, 3, 4)
    assert state.probe_seconds == 0.75


def test_unsupported_features_are_listed_once_and_bounded(writer: RingWriter) -> None:
    reader = RingReader.open(writer.path)
    at_first = reader.state.unsupported
    assert at_first == ()
    for feature in ("second optimizer", "ünusual", "second optimizer"):
        writer.note_unsupported(feature)
    noted = reader.state.unsupported
    assert noted == ("second optimizer", "ünusual")
    for index in range(100):
        writer.note_unsupported(f"{index}" * 200)
    listed = reader.state.unsupported
    assert listed[:2] == ("second optimizer", "ünusual") and 3 <= len(listed) < 20


@pytest.mark.parametrize("reason", [EndReason.COMPLETED, EndReason.FAILED])
def test_the_end_and_the_wait_for_the_last_export_are_seen(
    writer: RingWriter, reason: EndReason
) -> None:
    reader = RingReader.open(writer.path)
    assert (reader.state.end_reason, reader.state.scrape_wait) == (EndReason.RUNNING, False)
    writer.wait_for_export(True)
    writer.end(reason)
    state = reader.state
    assert (state.end_reason, state.phase, state.scrape_wait) == (reason, Phase.ENDED, True)
    writer.wait_for_export(False)
    assert not reader.state.scrape_wait


def test_files_and_directories_are_for_their_owner_alone(writer: RingWriter, path: Path) -> None:
    def mode(of: Path) -> int:
        return stat.S_IMODE(of.stat().st_mode)

    assert mode(path) == 0o600
    assert mode(path.parent) == mode(path.parent.parent) == 0o700
    assert os.listdir(path.parent) == [path.name]


def test_a_ring_that_exists_is_never_taken_over(writer: RingWriter, path: Path) -> None:
    content = path.read_bytes()
    with pytest.raises(FileExistsError):
        RingWriter.create(path, identity())
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


def test_a_ring_under_directories_of_another_owner_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir(parents=True)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with pytest.raises(RingError, match=f"belongs to uid {real}"):
        RingWriter.create(path, identity())
    assert os.listdir(path.parent) == []


def test_a_ring_under_a_linked_directory_is_refused(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path.parent.parent.mkdir()
    path.parent.symlink_to(elsewhere)
    with pytest.raises(RingError, match="not a directory"):
        RingWriter.create(path, identity())
    assert os.listdir(elsewhere) == []


def test_an_identity_too_long_for_the_head_is_refused(path: Path) -> None:
    with pytest.raises(RingError, match="identity of rank 3"):
        RingWriter.create(path, identity(rank=3, launch="x" * 3000))
    assert not path.exists()


def test_the_longest_run_name_fits(path: Path) -> None:
    longest = identity(run="\U0001f525" * 200, launch="l" * 255, host="h" * 255)
    writer = RingWriter.create(path, longest)
    assert RingReader.open(path).identity == longest
    writer.close()


def test_records_before_the_schema_are_refused(path: Path, schema: Schema) -> None:
    writer = RingWriter.create(path, identity())
    with pytest.raises(RingError, match="write_schema"):
        writer.write_step(step_record(schema, 1))
    with pytest.raises(RingError, match="write_schema"):
        writer.write_layers(layer_table(schema, 1))
    writer.close()


def test_arrays_that_do_not_fit_the_schema_are_refused(writer: RingWriter) -> None:
    for other in (schema(shares=1), schema(columns=4)):
        with pytest.raises(ValueError, match="of step 1 have shape"):
            writer.write_step(step_record(other, 1))
    with pytest.raises(ValueError, match="layers of step 1 have shape"):
        writer.write_layers(LayerTable(sequence=1, families={"gradients": np.zeros((1, 1))}))
    one_number = StepRecord(
        sequence=1,
        step=1,
        time_unix_ns=1,
        values=np.zeros(1),
        families={"gradients": np.zeros((1, 1))},
    )
    with pytest.raises(ValueError, match="values of step 1"):
        writer.write_step(one_number)
    unknown = replace(step_record(schema(), 1), families={"activations": np.zeros((1, 1))})
    with pytest.raises(ValueError, match="step 1: activations is not in the schema"):
        writer.write_step(unknown)
    reader = RingReader.open(writer.path)
    assert reader.schema is not None
    assert reader.steps_after(0) == ([], 0)


def seen_alive(path: Path) -> bool:
    """Whether another process sees the ring's writer alive; run in its own child."""
    return exit_code_of(lambda: None if RingReader.open(path).writer_alive() else 1 / 0) == 0


def content_of(path: Path) -> bytes:
    """The bytes of a ring, read without dropping the lock of a writer in this process."""
    return subprocess.check_output(["cat", path])


def test_the_writer_is_alive_until_it_closes(writer: RingWriter) -> None:
    assert seen_alive(writer.path)
    writer.write_schema(schema(layers=50))
    writer.end(EndReason.COMPLETED)
    assert seen_alive(writer.path)
    writer.close()
    assert not seen_alive(writer.path)


def test_a_forked_worker_does_not_keep_a_dead_rank_alive(path: Path, tmp_path: Path) -> None:
    pipe_read, pipe_write = os.pipe()

    def rank() -> None:
        ring = RingWriter.create(path, identity())
        ring.write_schema(schema())
        if os.fork() == 0:
            os.close(pipe_write)
            os.read(pipe_read, 1)
            os._exit(0)

    assert exit_code_of(rank) == 0
    reader = RingReader.open(path)
    assert not reader.writer_alive()
    os.close(pipe_write)
    os.close(pipe_read)


def test_a_forked_worker_writes_nothing_and_its_end_changes_nothing(
    writer: RingWriter, schema: Schema
) -> None:
    writer.write_step(step_record(schema, 1))
    before = content_of(writer.path)

    def worker() -> None:
        writer.write_step(step_record(schema, 2))
        writer.write_step(step_record(schema, 2), complete=False)
        writer.write_layers(layer_table(schema, 2))
        writer.write_schema(schema)
        writer.stamp(Phase.EVAL)
        writer.count(probe_errors=1)
        writer.note_unsupported("fork")
        writer.wait_for_export(True)
        writer.end(EndReason.FAILED)
        writer.close()

    assert exit_code_of(worker) == 0
    assert content_of(writer.path) == before
    assert seen_alive(writer.path)


def test_a_closed_ring_takes_no_more_and_complains_of_nothing(
    writer: RingWriter, schema: Schema
) -> None:
    writer.close()
    before = writer.path.read_bytes()
    writer.write_step(step_record(schema, 1))
    writer.stamp(Phase.EVAL)
    writer.end(EndReason.COMPLETED)
    writer.close()
    assert writer.path.read_bytes() == before


@pytest.mark.slow
def test_neither_side_needs_torch() -> None:
    code = (
        "import sys, mp_agent.ring.reader, mp_agent.ring.writer, mp_agent.ring.locations;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
