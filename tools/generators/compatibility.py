"""The table of releases in docs/compatibility.md, from the records of what ran."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.compatibility import Record, read_records

PATH = Path("docs/compatibility.md")
BEGIN, END = "<!-- generated: releases -->", "<!-- generated: end -->"
_ROOT = Path(__file__).parent.parent.parent
_HEAD = """\
| torch | Python | passed | skipped | cannot work there | failed | run on |
| --- | --- | --- | --- | --- | --- | --- |
"""


def compatibility_files() -> Mapping[Path, str]:
    """Return the text of the page, with its table written again, by its path."""
    return {PATH: with_table((_ROOT / PATH).read_text(encoding="utf-8"), read_records())}


def with_table(page: str, records: Sequence[Record]) -> str:
    """Return the page with a table of the records between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    failures = "".join(map(_failures, records))
    return f"{before}{BEGIN}\n\n{_HEAD}{''.join(map(_row, records))}{failures}\n{END}{after}"


def _row(record: Record) -> str:
    cells = (
        record.torch,
        record.python,
        record.passed,
        record.skipped,
        record.expected_failures,
        len(record.failed),
        record.date,
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def _failures(record: Record) -> str:
    if not record.failed:
        return ""
    files = Counter(name.partition("::")[0] for name in record.failed)
    listed = ", ".join(f"`{file}` ({count})" for file, count in sorted(files.items()))
    return f"\nFailed with torch {record.torch} and Python {record.python}: {listed}.\n"
