"""Whether the post-mortem of a small training names its planted cause first.

    python -m benchmarks.postmortem [NAME ...] [--write docs/postmortem-causes.md]

The trainings are real, on the CPU, through the probe, rings and merge; NVIDIA's errors are lines of
a kernel log. The judge is that of `mp-agent postmortem`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.machine import describe, markdown
from benchmarks.postmortem.trainings import PLANTED_STEP, TRAININGS
from mp_agent.errors import FlightError
from mp_agent.flight.postmortem.analysis import Analysis, analyse
from mp_agent.flight.record.evidence import Evidence, read_gpu_errors, with_assignments
from mp_agent.node.flight.job import evidence_of_rings, newest_sequence
from mp_agent.node.flight.replay import judged, replay
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tools.jobs import torchrun_job

JOB = Path(__file__).parent / "trainings.py"
HEADER = ("planted", "first cause", "step", "rank", "score", "right", "evidence")
_ENDS_LATE = ("killed", "exception", "stalled")
"""Trainings after which the job is over."""
_JOB_SECONDS = 400.0
_STALLED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Planted:
    """A cause: which training has it, what must be named first, what the kernel log says."""

    name: str
    training: str
    cause: str
    kernel_log: str = ""


_ECC = "NVRM: Xid (PCI:0000:3b:00): 94, pid=4711, name=python, Contained: SM (0x1)"
_LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."
_CAUSES = {
    "nan-in-data-of-one-rank": "nonfinite_forward_one_rank",
    "nan-in-data-of-all": "nonfinite_forward",
    "nan-in-backward": "nonfinite_backward",
    "inf-in-backward": "nonfinite_backward",
    "rate-jump": "learning_rate_jump",
    "rate-in-wrong-unit": "learning_rate_jump",
    "rate-zero": "learning_rate_zero",
    "rate-too-high": "gradient_explosion",
    "growing-weights": "gradient_explosion",
    "bad-batch": "unusual_batch",
    "bad-batch-of-one-rank": "unusual_batch",
    "masked-labels": "zero_gradients",
    "vanishing": "gradient_vanishing",
    "overflow-of-inputs": "loss_scale_collapse",
    "underflow": "gradient_underflow",
    "rising-loss": "loss_diverging",
    "different-weights": "replica_divergence",
    "never-reduced": "gradients_not_reduced",
    "no-longer-reduced": "gradients_not_reduced",
    "never-left-no-sync": "gradients_not_reduced",
    "optimizer-of-a-copy": "optimizer_without_gradients",
    "nan-of-one-rank-under-scaler": "nonfinite_forward_one_rank",
    "nan-in-backward-of-one-rank-under-scaler": "nonfinite_backward_one_rank",
    "large-gradient-of-one-rank": "one_rank_off",
    "killed": "rank_killed",
    "exception": "rank_failed",
    "stalled": "rank_stalled",
}
PLANTED = (
    *(Planted(name, name, cause) for name, cause in _CAUSES.items()),
    Planted("nan-after-memory-error", "nan-in-data-of-one-rank", "gpu_error", _ECC),
    Planted("killed-after-bus-error", "killed", "gpu_error", _LOST),
)


def analyses(planted: Sequence[Planted], directory: Path) -> Iterator[tuple[Planted, Analysis]]:
    """Run the trainings that the causes need, and yield what a post-mortem finds."""
    needed = [name for name in TRAININGS if any(p.training == name for p in planted)]
    lots = [
        [name for name in needed if name not in _ENDS_LATE],
        *([name] for name in _ENDS_LATE if name in needed),
    ]
    for number, lot in enumerate(filter(None, lots)):
        shared = directory / f"shm-{number}"
        for name, evidence in _evidence(lot, shared, directory):
            for cause in (p for p in planted if p.training == name):
                found = _with_kernel_log(evidence, cause, directory)
                analysis = analyse(found, judged(found))
                print(" ".join(row(cause, analysis)[:6]), file=sys.stderr)
                yield cause, analysis


def _evidence(lot: Sequence[str], shared: Path, directory: Path) -> Iterator[tuple[str, Evidence]]:
    with torchrun_job(
        [str(JOB), *lot],
        run="unused",
        log_file=directory / f"{lot[0]}.log",
        directory=shared,
        environment={"MP_AGENT_NODE_AGENT": "none"},
    ) as job:
        settings = Settings(dir=shared, flight_dir=directory / "flight")
        stalls = lot == ["stalled"]
        if stalls:
            _await_stall(shared, settings)
        else:
            try:
                job.process.wait(_JOB_SECONDS)
            except subprocess.TimeoutExpired:
                raise SystemExit(f"the trainings do not end:\n{job.log_tail()}") from None
        for name in lot:
            evidence = evidence_of_rings(locations.run_directory(shared, name), settings)
            limits = [f"rank_stall_window={_STALLED_SECONDS:g}"] if stalls else []
            yield name, replace(evidence, values=with_assignments(evidence.values, limits))


def _await_stall(shared: Path, settings: Settings) -> None:
    """Wait until the training has stopped, and longer than the judge allows."""
    deadline = time.monotonic() + _JOB_SECONDS
    while time.monotonic() < deadline:
        try:
            evidence = evidence_of_rings(locations.run_directory(shared, "stalled"), settings)
        except FlightError:
            evidence = None
        if evidence and newest_sequence(evidence.ranks) >= PLANTED_STEP - 1:
            break
        time.sleep(0.5)
    time.sleep(2 * _STALLED_SECONDS)


def _with_kernel_log(evidence: Evidence, planted: Planted, directory: Path) -> Evidence:
    """Return the evidence with a kernel log in which a GPU fails shortly before the step."""
    if not planted.kernel_log:
        return evidence
    steps = replay(evidence.ranks).steps
    bad = next((s for s in steps if s.nonfinite_loss_ranks), steps[-1])
    moment = datetime.fromtimestamp(bad.time_unix_seconds - 1e-3, UTC)
    path = directory / f"{planted.name}.dmesg"
    path.write_text(f"{moment.isoformat()} host kernel: {planted.kernel_log}\n")
    return replace(evidence, gpu_errors=read_gpu_errors(path))


def row(planted: Planted, analysis: Analysis) -> tuple[str, ...]:
    """Return one row of the table."""
    first = analysis.first_bad
    if first is None:
        return (planted.name, "nothing", "", "", "", "no", "")
    evidence = [f"+ {a.text}" for a in first.arguments_for]
    evidence += [f"− {a.text}" for a in first.arguments_against]
    right = "yes" if first.cause.name == planted.cause else f"no: {planted.cause}"
    return (
        planted.name,
        first.cause.name,
        str(first.step),
        first.rank,
        str(first.score),
        right,
        "<br>".join(evidence).replace("|", "\\|"),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.postmortem", description=__doc__)
    parser.add_argument("names", nargs="*", help="of planted causes; all without one")
    parser.add_argument("--write", type=Path, help="also write the table to this page")
    options = parser.parse_args()
    known = {planted.name: planted for planted in PLANTED}
    if unknown := set(options.names) - set(known):
        parser.error(f"no cause is named {', '.join(sorted(unknown))}; one of {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(PLANTED)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = dict(analyses(chosen, Path(directory)))
    rows = [row(planted, found[planted]) for planted in chosen]
    right = sum(cells[5] == "yes" for cells in rows)
    print(f"{describe(torch.device('cpu'))}; {time.monotonic() - began:.0f} s\n")
    text = f"The planted cause was named first in {right} of {len(rows)} trainings.\n\n"
    text += markdown(HEADER, rows)
    print(text)
    if options.write:
        _write(options.write, text)


def _write(page: Path, table: str) -> None:
    """Replace the page's table; what is above the mark stays."""
    mark = "<!-- measured -->"
    head, _, _ = page.read_text(encoding="utf-8").partition(mark)
    page.write_text(f"{head}{mark}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
