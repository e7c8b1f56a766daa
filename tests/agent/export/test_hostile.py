"""Names that are paths, formulas or no UTF-8; places that change or fill during the export."""

import csv
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mp_agent.export import FORMATS, ExportedNumber
from mp_agent.output import UnwritableError, new_file

HOSTILE = ("../../escaped", "/escaped", "..", "a\x00b", "=cmd|'/c calc'!A1", "x" * 5000, "\udcff")


def samples(*runs: str, count: int = 1) -> Iterator[ExportedNumber]:
    for run in runs:
        for step in range(count):
            yield ExportedNumber(run, step, 1.0, "loss", "@layer", "", -1.0)


def test_runs_whose_names_are_paths_are_written_below_the_directory(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    output = tmp_path / "deep" / "events"
    output.parent.mkdir()
    with new_file(output) as partial:
        assert FORMATS["tensorboard"](partial, samples(*HOSTILE, "bf16")) == len(HOSTILE) + 1
    assert os.listdir(tmp_path) == ["deep"] and os.listdir(output.parent) == ["events"]
    assert len(os.listdir(output)) == len(HOSTILE) + 1
    assert (output / "bf16").is_dir()


def test_a_spreadsheet_gets_no_formula_and_numbers_stay_numbers(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    formulas = ("=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1")
    FORMATS["csv"](path, samples(*formulas, "plain", "\udcff"))
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows[:6]] == [f"'{formula}" for formula in formulas]
    assert [row["run"] for row in rows[6:]] == ["plain", r"\udcff"]
    assert {(row["layer"], row["value"]) for row in rows} == {("'@layer", "-1.0")}


def test_a_name_that_is_no_utf_8_does_not_prevent_parquet(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    assert FORMATS["parquet"](path, samples(*HOSTILE)) == len(HOSTILE)
    runs = pq.read_table(path).column("run").to_pylist()
    assert runs[:6] == list(HOSTILE[:6]) and runs[6] == "?"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_link_that_is_planted_is_not_written_through(form: str, tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("kept")
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        FORMATS[form](link, samples("a"))
    assert victim.read_text() == "kept"


FULL = """
import sys
from pathlib import Path
from mp_agent.export import FORMATS
from mp_agent.output import UnwritableError, new_file
from tests.agent.export.test_hostile import samples
try:
    with new_file(Path(sys.argv[2])) as partial:
        FORMATS[sys.argv[1]](partial, samples("a", count=20_000))
except UnwritableError as error:
    print(error.message, error.exit_code)
"""


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_disk_that_fills_leaves_nothing_half_written(form: str, tmp_path: Path) -> None:
    def limit() -> None:
        # As a full disk does, it lets a write fail in the middle of the file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    path = tmp_path / f"runs.{form}"
    done = subprocess.run(
        [sys.executable, "-c", FULL, form, str(path)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        cwd=Path(__file__).parents[3],
        # A compiled module that was cut off would break every later program.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert f"{path} cannot be written: " in done.stdout, done.stderr
    assert done.stdout.strip().endswith(" 2")
    assert os.listdir(tmp_path) == []


def test_what_came_to_be_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(UnwritableError, match="File exists"), new_file(path) as partial:
        FORMATS["csv"](partial, samples("a"))
        path.write_text("theirs")
    assert path.read_text() == "theirs"
