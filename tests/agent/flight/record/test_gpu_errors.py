"""XIDs in what a machine reports of its GPUs."""

import gzip
from pathlib import Path

import pytest

from mp_agent.errors import FlightError
from mp_agent.flight.record.evidence import GpuError, read_gpu_errors

_DMESG = """\
2026-02-21T13:45:02,123456+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.
2026-02-21T13:45:02,123456+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.
2026-02-21T14:45:03+0100 node-3 kernel: NVRM: Xid (PCI:0000:3c:00): 31, pid=4712, name=python
[12345.678901] NVRM: Xid (0000:3d:00): 48, pid='<unknown>', DBE
2026-02-21T13:45:04+00:00 node-3 kernel: usb 1-1: new device
"""  # noqa: E501
_DCGM = """\
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1",Hostname="node-3"} 0
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-2",Hostname="node-3"} 94
"""


def _read(tmp_path: Path, text: str) -> tuple[GpuError, ...]:
    path = tmp_path / "errors"
    path.write_text(text)
    return read_gpu_errors(path)


def test_xids_of_a_kernel_log_are_read_once_each_with_gpu_and_time(tmp_path: Path) -> None:
    lost, illegal, undated = _read(tmp_path, _DMESG)
    assert (lost.xid, lost.gpu, lost.of_hardware) == (79, "0000:3b:00", True)
    assert lost.time_unix_seconds == pytest.approx(1771681502.123456)
    assert (illegal.xid, illegal.of_hardware) == (31, False)
    assert illegal.time_unix_seconds == 1771681503.0
    assert (undated.xid, undated.time_unix_seconds) == (48, None)


def test_only_gpus_with_an_error_are_read_from_dcgm(tmp_path: Path) -> None:
    assert _read(tmp_path, _DCGM) == (GpuError(xid=94, gpu="1", source="DCGM"),)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FlightError, match="missing"):
        read_gpu_errors(tmp_path / "missing")
    assert _read(tmp_path, "") == ()


@pytest.mark.parametrize("content", [gzip.compress(_DMESG.encode()), bytes(4096)])
def test_a_file_that_is_no_text_is_no_machine_without_errors(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "dmesg.gz"
    path.write_bytes(content)
    with pytest.raises(FlightError, match=r"dmesg.gz: is no text"):
        read_gpu_errors(path)
    path.write_bytes(_DMESG.encode("utf-16"))
    assert {error.xid for error in read_gpu_errors(path)} == {79, 31, 48}
