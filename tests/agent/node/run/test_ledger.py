import errno
import os

import pytest

from mp_agent.node.accounting.incidents import IncidentTracker
from mp_agent.node.accounting.latest import LatestStep
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.windows import NormWindows
from mp_agent.node.run import ledger as ledger_module
from mp_agent.node.run.ledger import Ledger, ProbeTotals, read_ledger, write_ledger
from mp_agent.records.views import FirstNonfinite
from tests.agent.node.builders import merged_step

FULL = Ledger(
    launches=(("launcher", 1),),
    newest_unix_ns=1_700_000_000_000_000_001,
    closed_sequence=41,
    closed_layers_sequence=40,
    progress=Progress(
        latest=LatestStep(last=merged_step(41, loss=0.1), judged=merged_step(40, norm=1e-200)),
        windows=NormWindows(norms=[(14, 3.0, 0.1)]),
        incident=IncidentTracker(first=FirstNonfinite(step=3, rank="1", layer='"\n', phase="x")),
    ),
    totals=[("mp_agent.steps", (), 41.0), ("mp_agent.layer", ("ünï\\",), 1e300)],
    histograms=[("mp_agent.step.duration", (), [1.0, 0.0, 0.1])],
    assumed={"plain": [[0, 1], [2, 3]], "own": []},
    agent=ProbeTotals(probe_seconds=0.25, records_dropped=2),
)


def test_what_was_written_is_read_back_exactly(tmp_path):
    write_ledger(tmp_path / "ledger.json", FULL)

    assert read_ledger(tmp_path / "ledger.json") == FULL
    assert os.listdir(tmp_path) == ["ledger.json"]
    assert (tmp_path / "ledger.json").stat().st_mode & 0o077 == 0


def test_without_a_ledger_the_account_is_empty(tmp_path):
    assert read_ledger(tmp_path / "ledger.json") == Ledger()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"totals": 3}', b'{"format": 99}', b"\xff"]
)
def test_a_damaged_ledger_is_refused_with_a_message(tmp_path, caplog, content):
    (tmp_path / "ledger.json").write_bytes(content)

    assert read_ledger(tmp_path / "ledger.json") == Ledger()
    assert "counters start at 0" in caplog.text


def test_a_ledger_of_an_earlier_release_is_refused_by_its_format(tmp_path, caplog):
    """There the loss scale was a number, not a tracker."""
    (tmp_path / "ledger.json").write_text('{"format": 2, "progress": {"loss_scale": 65536.0}}')

    assert read_ledger(tmp_path / "ledger.json") == Ledger()
    assert "has format 2, counters start at 0" in caplog.text


def test_a_full_directory_leaves_the_ledger_that_was(tmp_path, monkeypatch):
    write_ledger(tmp_path / "ledger.json", FULL)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ledger_module, "replace_atomically", full)
    with pytest.raises(OSError, match="No space"):
        write_ledger(tmp_path / "ledger.json", Ledger())

    assert read_ledger(tmp_path / "ledger.json") == FULL


def test_a_pipe_in_place_of_the_ledger_keeps_no_agent_waiting(tmp_path):
    os.mkfifo(tmp_path / "ledger.json")
    assert read_ledger(tmp_path / "ledger.json") == Ledger()


def test_a_ledger_without_end_is_refused_before_it_is_read(tmp_path, caplog):
    path = tmp_path / "ledger.json"
    path.touch(mode=0o600)
    os.truncate(path, 1 << 40)  # no file system keeps its zeros
    assert read_ledger(path) == Ledger()
    assert "holds more than 1073741824 bytes" in caplog.text
