"""`mp-agent dump` and `mp-agent postmortem`: write flight records and analyse them.

`python -m mp_agent.node.commands.flight DIRECTORY` is what the node agent runs in a separate
process, so that no analysis delays it: it writes the post-mortem of a record, at a low priority.
"""

import json
import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from mp_agent.errors import FlightError, MpAgentError, SettingError
from mp_agent.flight.postmortem.analysis import Analysis, analyse
from mp_agent.flight.record.evidence import Evidence, load, read_gpu_errors, with_assignments
from mp_agent.flight.record.store import record_name, write_report
from mp_agent.flight.report import as_json, first_line, print_analysis
from mp_agent.flight.report_page import as_html
from mp_agent.inputs.files import limit_resources, printable
from mp_agent.node.flight.job import FlightJob, evidence_of_rings, newest_sequence, read_rank_logs
from mp_agent.node.flight.replay import judged
from mp_agent.node.flight.service import DumpRequest, pop_answer, write_request
from mp_agent.output import keep_inputs, refuse
from mp_agent.records.flight import FlightRequest
from mp_agent.report.options import json_option, page_option, show
from mp_agent.ring import locations
from mp_agent.settings import Settings, load_settings

_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.05


@click.command("dump")
@click.option("--run", "name", default="", help="Name of the run; all runs here by default.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of shared memory; the setting `dir` by default.",
)
def dump_command(name: str, directory: Path | None) -> None:
    """Write a flight record of a run on this machine, now.

    The run's node agent writes it, and the agents of its other nodes write the same steps. Where
    no node agent is left, the record is written from the rings. Prints the record's file.
    """
    settings, _ = load_settings()
    base = directory or settings.dir
    run_dirs = _run_directories(base, name)
    if not run_dirs:
        what = f"no run {name!r}" if name else "no run"
        refuse("dump", f"{base}: holds {what}")
    failed = False
    for run_dir in run_dirs:
        try:
            click.echo(str(_dump(run_dir, settings)))
        except (MpAgentError, OSError) as error:
            click.echo(printable(f"mp-agent dump: {error}"), err=True)
            failed = True
    sys.exit(1 if failed else 0)


@click.command("postmortem")
@click.argument("path", type=click.Path(path_type=Path))
@json_option("analysis")
@page_option("analysis")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="A threshold or duration to judge by, as for `mp-agent rules`; by default those in the "
    "record. May be repeated.",
)
@click.option(
    "--gpu-errors",
    "error_files",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="What a machine of the run reported of its GPUs: output of `dmesg --time-format=iso` or "
    "`journalctl -k -o short-iso`, or metrics of NVIDIA's DCGM exporter. May be repeated.",
)
def postmortem_command(
    path: Path,
    as_document: bool,
    page: Path | None,
    assignments: tuple[str, ...],
    error_files: tuple[Path, ...],
) -> None:
    """Analyse how a run went wrong: what happened first, where, why, and what to do.

    PATH is a flight record (its directory, or one node's file), the directory of all records of a
    run, or the directory of a dead run in shared memory.
    """
    keep_inputs((path, *error_files), page)
    settings, _ = load_settings()
    try:
        analysis = analyse_path(path, settings, assignments, error_files)
    except (FlightError, SettingError) as error:
        refuse("postmortem", str(error))
    show(
        json=lambda: as_json(analysis),
        html=lambda: as_html(analysis),
        text=lambda console: print_analysis(analysis, console),
        as_document=as_document,
        page=page,
    )


def analyse_path(
    path: Path,
    settings: Settings,
    assignments: Iterable[str] = (),
    error_files: Iterable[Path] = (),
) -> Analysis:
    """Return the analysis of the run at a path.

    assignments: `NAME=VALUE` texts that change what it is judged by. error_files: what machines
    reported of their GPUs. Raises FlightError, naming the path, and SettingError, naming the
    assignment.
    """
    evidence = evidence_at(path, settings)
    evidence = replace(
        evidence,
        values=with_assignments(evidence.values, assignments),
        gpu_errors=tuple(error for file in error_files for error in read_gpu_errors(file)),
    )
    return analyse(evidence, judged(evidence))


def evidence_at(path: Path, settings: Settings) -> Evidence:
    """Return what is known of the run at a path: of flight records, or of rings.

    Raises FlightError, naming the path, when there is none, or when there are several.
    """
    try:
        if path.is_dir() and locations.find_rings(path):
            return evidence_of_rings(path, settings)
        runs = locations.find_runs(path) if path.is_dir() else []
    except OSError as error:
        raise FlightError(f"{path}: {error.strerror}") from error
    if any(locations.find_rings(run) for run in runs):
        names = ", ".join(run.name for run in runs)
        raise FlightError(f"{path}: holds several runs; name one of them: {names}")
    return load(path)


def _run_directories(base: Path, name: str) -> list[Path]:
    """Return the runs in `base`, including those in the directories of `mp-agent exec`."""
    bases = [base, *sorted(base.glob("exec-*"))]
    if name:
        found = [locations.run_directory(place, name) for place in bases]
    else:
        found = [run_dir for place in bases for run_dir in locations.find_runs(place)]
    return [run_dir for run_dir in found if locations.find_rings(run_dir)]


def _dump(run_dir: Path, settings: Settings) -> Path:
    """Return the file of a new record of a run. Raises MpAgentError and OSError."""
    request = DumpRequest(id=secrets.token_hex(8), requested_unix_seconds=time.time())
    if locations.agent_running(run_dir):
        write_request(run_dir, request)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and locations.agent_running(run_dir):
            if answer := pop_answer(run_dir, request):
                if answer.problem:
                    raise FlightError(f"{run_dir.name}: {answer.problem}")
                return Path(answer.path)
            time.sleep(_POLL_SECONDS)
        if locations.agent_running(run_dir):
            raise FlightError(f"{run_dir.name}: its node agent does not respond")
    return _write_here(run_dir, settings)


def _write_here(run_dir: Path, settings: Settings) -> Path:
    """Write the record from the rings, without a node agent."""
    ranks, _ = read_rank_logs(locations.find_rings(run_dir), steps=settings.flight_steps)
    last = newest_sequence(ranks)
    now_unix_seconds = time.time()
    request = FlightRequest(
        name=record_name(now_unix_seconds, "request"),
        reason="request",
        first=last - settings.flight_steps + 1,
        last=last,
        requested_unix_seconds=now_unix_seconds,
    )
    return FlightJob(request=request, run_dir=run_dir).write(settings)


CPU_SECONDS_MAX = 120
MEMORY_BYTES_MAX = 4 << 30
_NICENESS = 10
"""Below the training, but not so far that a busy machine never comes to it."""


def write_post_mortem(arguments: list[str]) -> int:
    """Write the report of the record in a directory, and print its first line; 1 if it cannot."""
    (path,) = map(Path, arguments)
    limit_resources(niceness=_NICENESS, cpu_seconds=CPU_SECONDS_MAX, memory_bytes=MEMORY_BYTES_MAX)
    try:
        analysis = analyse_path(path, Settings())
        write_report(path, as_html(analysis), as_json(analysis))
    except (FlightError, OSError, MemoryError) as error:
        print(str(error) or repr(error), file=sys.stderr)
        return 1
    print(json.dumps(first_line(analysis)))
    return 0


if __name__ == "__main__":
    sys.exit(write_post_mortem(sys.argv[1:]))
