"""The table of releases says what the records say, and leaves the page around it alone."""

from tools.compatibility import Record
from tools.generators.compatibility import BEGIN, END, with_table

GREEN = Record(
    torch="2.13.0+cpu",
    python="3.11.7",
    date="2026-01-02",
    passed=9,
    skipped=2,
    expected_failures=1,
    failed=(),
)
RED = Record(
    torch="2.6.0",
    python="3.11.7",
    date="2026-01-03",
    passed=7,
    skipped=0,
    expected_failures=3,
    failed=("tests/a.py::test_one", "tests/a.py::test_two[x]", "tests/b.py::test_one"),
)


def test_rows_and_failures_are_those_of_the_records():
    page = with_table(f"# Head\n{BEGIN}\nold\n{END}\ntail\n", (GREEN, RED))
    assert page.startswith("# Head\n") and page.endswith("\ntail\n") and "old" not in page
    assert "| 2.13.0+cpu | 3.11.7 | 9 | 2 | 1 | 0 | 2026-01-02 |" in page
    assert "| 2.6.0 | 3.11.7 | 7 | 0 | 3 | 3 | 2026-01-03 |" in page
    failed = "Failed with torch 2.6.0 and Python 3.11.7: `tests/a.py` (2), `tests/b.py` (1)."
    assert failed in page and page.count("Failed with") == 1


def test_writing_it_again_changes_nothing():
    once = with_table(f"{BEGIN}\n{END}\n", (RED,))
    assert with_table(once, (RED,)) == once
