"""A pytest plugin that records what ran, for the table of docs/compatibility.md.

`make compatibility TORCH=2.6.0` runs the fast tests with it; `make generate` then writes the table.
Where there is no torch, it skips the tests that need it: `make compatibility TORCH=none`.
"""

import json
import platform
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parent.parent / "docs" / "data" / "compatibility"
NO_TORCH = "none"
_LACKING = "No module named 'torch'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How the fast tests ended with one release of Python and one of torch."""

    torch: str
    """Its version; `none` where it is not installed."""
    python: str
    date: str
    """ISO 8601."""
    passed: int
    skipped: int
    expected_failures: int
    failed: Sequence[str]
    """The tests that failed, by pytest's names, sorted."""

    @property
    def path(self) -> Path:
        """The committed file of the record; a later run with the same releases replaces it."""
        return DIRECTORY / f"python-{self.python}-torch-{self.torch}.json"


def read_records(directory: Path = DIRECTORY) -> list[Record]:
    """Return the committed records, the latest releases first."""
    texts = (path.read_text(encoding="utf-8") for path in directory.glob("*.json"))
    found = [Record(**json.loads(text)) for text in texts]
    releases = ((_numbers(record.torch), _numbers(record.python), record) for record in found)
    return [record for *_, record in sorted(releases, key=lambda one: one[:2], reverse=True)]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that cannot be imported for want of torch."""
    report = yield
    if report.outcome == "failed" and not find_spec("torch") and _LACKING in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, _LACKING)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that fails for want of torch, in a process that it starts as well."""
    report = yield
    if report.outcome == "failed" and not find_spec("torch") and _LACKING in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, _LACKING)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the record; pytest calls this in the process that has all results."""
    stats = terminalreporter.stats
    counts = Counter({outcome: len(reports) for outcome, reports in stats.items()})
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())}
    record = Record(
        torch=metadata.version("torch") if find_spec("torch") else NO_TORCH,
        python=platform.python_version(),
        date=datetime.now(UTC).date().isoformat(),
        passed=counts["passed"],
        skipped=counts["skipped"],
        expected_failures=counts["xfailed"],
        failed=sorted(failed),
    )
    record.path.parent.mkdir(parents=True, exist_ok=True)
    record.path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.partition("+")[0].split(".") if part.isdigit())
