"""Changes the code in small ways, one at a time, and counts what the tests notice.

`python -m tools.mutants` draws mutants of the packages in `PACKAGES`, as many of each, and runs for
each one the tests of its package, then wider ones, up to the first that fails. `--write` writes
tests/mutants.md: what was killed, and each mutant that survived.

mutmut has no sample of all mutants and wants the package at one path, which `.editable` links from
four; cosmic-ray changes the files of the working tree, and starts Python, and with it torch, for
each mutant. Here a copy is changed, and each run is forked from a process that has imported torch.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum
from importlib import import_module
from itertools import chain, zip_longest
from pathlib import Path
from random import Random

import torch

from benchmarks.machine import describe
from tools.mutations import Mutation, mutations_of

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "tests" / "mutants.md"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "agent/records": ("tests/agent/node/merge",),
    "agent/ring": ("tests/agent/node/collect",),
    "agent/node/merge": (),
    "agent/node/accounting": (),
    "alerting/detector": ("tests/agent/node/conditions",),
    "agent/probe/statistics": (),
}
"""Directories, with tests to run after those of the same path in `tests`."""
WIDER = ("tests/outputs",)
"""What is run for a mutant that survives these."""
_QUICK = "not (slow or e2e or gpu or alone or long)"
_COPIED = ("agent", "alerting", "exporters", "tests", "tools", ".editable", "pyproject.toml")
_WARM = ("pytest", "numpy", "torch", "hypothesis", "aiohttp", "pydantic_settings", "rich.progress")
_TIMES_LONGER = 4
_SECONDS_MORE = 20.0
_MEMORY_BYTES = 32 << 30


class Fate(Enum):
    """What became of a mutant."""

    KILLED = "killed by tests of its package"
    KILLED_LATER = "killed by wider tests"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Result:
    """A mutant and what became of it."""

    mutation: Mutation
    fate: Fate


def all_mutations(package: str, root: Path = ROOT) -> list[Mutation]:
    """Return every mutation of a directory's modules, in the order of the files."""
    paths = sorted((root / package).rglob("*.py"))
    return [
        one
        for path in paths
        for one in mutations_of(path.read_bytes(), str(path.relative_to(root)))
    ]


def sample(count: int, seed: int, packages: Iterable[str] = PACKAGES) -> list[Mutation]:
    """Return mutations, about as many of each package, which take turns; by the seed alone."""
    names = list(packages)
    drawn = []
    for place, package in enumerate(names):
        found = all_mutations(package)
        share = count // len(names) + (place < count % len(names))
        drawn.append(Random(f"{seed} {package}").sample(found, min(share, len(found))))
    return [one for one in chain.from_iterable(zip_longest(*drawn)) if one is not None]


def package_of(mutation: Mutation) -> str:
    """Return the package of a mutation's file."""
    return next(one for one in PACKAGES if mutation.path.startswith(f"{one}/"))


def tests_of(package: str) -> tuple[str, ...]:
    """Return the tests to run for mutants of a package."""
    return (f"tests/{package}", *PACKAGES[package])


class Laboratory:
    """A copy of the repository in which one mutation at a time is made and tested."""

    def __init__(self, directory: Path, root: Path = ROOT) -> None:
        self.root = directory / "copy"
        self.root.mkdir()
        for entry in root.iterdir():
            if entry.name in _COPIED and entry.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(entry, self.root / entry.name, symlinks=True, ignore=ignored)
            elif entry.name in _COPIED:
                shutil.copy(entry, self.root)
            elif not entry.name.startswith("."):
                (self.root / entry.name).symlink_to(entry)
        # By content: a mutation may have the size and the second of what it replaces.
        compiling = ("-m", "compileall", "-q", "--invalidation-mode", "checked-hash", ".")
        subprocess.run([sys.executable, *compiling], cwd=self.root, check=False)
        self.limits_seconds: Mapping[tuple[str, ...], float] = {}

    def examine(self, mutation: Mutation) -> Result:
        """Return what becomes of a mutation; the copy is afterwards as it was."""
        own = tests_of(package_of(mutation))
        path = self.root / mutation.path
        before = path.read_bytes()
        path.write_bytes(mutation.applied(before))
        try:
            for fate, tests in ((Fate.KILLED, own), (Fate.KILLED_LATER, WIDER)):
                ordered = self._ordered(mutation, tests)
                status = run_tests(self.root, ordered, self.limits_seconds[tests])
                if status != 0:
                    return Result(mutation, Fate.TIMED_OUT if status is None else fate)
            return Result(mutation, Fate.SURVIVED)
        finally:
            path.write_bytes(before)

    def limit_seconds(self, tests: tuple[str, ...]) -> float:
        """Return how long tests may take with a mutation; RuntimeError if they fail without."""
        begun = time.monotonic()
        if (status := run_tests(self.root, tests, 1_000.0)) != 0:
            raise RuntimeError(f"{' '.join(tests)}: fail without any mutation ({status})")
        return _TIMES_LONGER * (time.monotonic() - begun) + _SECONDS_MORE

    def _ordered(self, mutation: Mutation, tests: Sequence[str]) -> list[str]:
        """Begin with the test file that is named after the module."""
        name = f"test_{Path(mutation.path).stem}.py"
        own = [path for one in tests for path in (self.root / one).rglob(name)]
        return [*(str(path.relative_to(self.root)) for path in own), *tests]


def run_tests(root: Path, tests: Sequence[str], limit_seconds: float) -> int | None:
    """Return the exit status of pytest in a forked process; None after `limit_seconds`."""
    child = os.fork()
    if child == 0:
        _become_pytest(root, tests)
    deadline = time.monotonic() + limit_seconds
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        _end_group(child)


def _end_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)  # what it has started, too
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _become_pytest(root: Path, tests: Sequence[str]) -> None:
    status = 70
    try:
        os.setsid()
        os.chdir(root)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        # What this process knows of the repository itself would be found before the copy.
        sys.path[:] = [one for one in sys.path if one not in ("", str(ROOT))]
        for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
            del sys.modules[name]
        os.environ["PYTHONPATH"] = os.pathsep.join((str(root / ".editable"), str(root)))
        marked = [] if tuple(tests) == WIDER else ["-m", _QUICK]
        imported = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis already is
        plain = ["-x", "-q", "-p", "no:cacheprovider", "-W", imported]
        plain.append(f"--basetemp={root.parent / 'pytest'}")
        status = import_module("pytest").main([*plain, *marked, *tests])
    finally:
        os._exit(int(status))


_laboratory: list[Laboratory] = []
"""That of this worker."""


def _open_laboratory(directory: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # what has begun is ended on the way out
    place = Path(directory) / str(os.getpid())
    place.mkdir()
    _laboratory.append(Laboratory(place))


def _limit_seconds(tests: tuple[str, ...]) -> float:
    return _laboratory[0].limit_seconds(tests)


def _examine(task: tuple[Mutation, Mapping[tuple[str, ...], float]]) -> Result:
    mutation, _laboratory[0].limits_seconds = task
    return _laboratory[0].examine(mutation)


def examine_all(mutations: Sequence[Mutation], workers: int) -> Iterator[Result]:
    """Yield what becomes of mutations, in their order."""
    for name in _WARM:
        import_module(name)
    torch.set_num_threads(1)
    suites = [WIDER, *sorted({tests_of(package_of(one)) for one in mutations})]
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("fork")
        with context.Pool(workers, _open_laboratory, (directory,)) as pool:
            limits = dict(zip(suites, pool.map(_limit_seconds, suites, chunksize=1), strict=True))
            yield from pool.imap(_examine, [(one, limits) for one in mutations])


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table: how many mutants of each package had which fate."""
    yield f"| package | mutants | {' | '.join(fate.value for fate in Fate)} |"
    yield f"| --- | ---: |{' ---: |' * len(Fate)}"
    counts = {
        package: [one.fate for one in results if package_of(one.mutation) == package]
        for package in PACKAGES
    }
    for name, fates in {**counts, "all": [one.fate for one in results]}.items():
        cells = [len(fates), *(fates.count(fate) for fate in Fate)]
        yield f"| {name} | {' | '.join(map(str, cells))} |"


def report(results: Sequence[Result], asked: int, seed: int) -> str:
    """Return the page of tests/mutants.md."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    survivors = sorted(
        str(one.mutation) for one in results if one.fate in (Fate.SURVIVED, Fate.TIMED_OUT)
    )
    return "\n".join(
        [
            "# Mutants",
            "",
            "Written by `python -m tools.mutants --write`: small changes of the code, one at a "
            "time, and whether a test fails. Tests marked slow or long are not among them, nor "
            "with them those of the Triton kernels: they may notice what survives there.",
            "",
            f"{date.today()}, commit {commit}, {describe(torch.device('cpu'))}. Seed {seed}: "
            f"{len(results)} of {asked} mutants examined.",
            "",
            *table(results),
            "",
            "Survived or timed out:",
            "",
            *(f"* {one}" for one in survivors),
            "",
        ]
    )


def main() -> None:
    """Examine a sample; an interrupt ends it, and what is known by then is shown."""
    parser = argparse.ArgumentParser(description="Counts which small changes the tests notice.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name}")
    options = parser.parse_args()
    # A shell starts what runs in its background with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    mutations = sample(options.count, options.seed)
    results: list[Result] = []
    try:
        for result in examine_all(mutations, options.workers):
            results.append(result)
            print(f"{len(results)} {result.fate.value}: {result.mutation}", flush=True)
    except KeyboardInterrupt:
        pass
    print("\n".join(table(results)))
    if options.write:
        REPORT.write_text(report(results, len(mutations), options.seed), "utf-8")


if __name__ == "__main__":
    main()
