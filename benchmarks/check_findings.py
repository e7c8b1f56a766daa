"""Count what `mp-agent check` finds in packages, by rule, and how long it takes.

Give folders; every finding is listed in FINDINGS for review by hand. The table of docs/check.md
comes from it.
"""

import argparse
import os
import time
from pathlib import Path

from mp_agent.lint.runner import check_paths


def main() -> None:
    """Print one row per folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--findings", type=Path, help="write every finding to this file")
    arguments = parser.parse_args()
    if arguments.findings is not None:
        arguments.findings.write_text("", encoding="utf-8")
    print("| package | files | findings | by rule | not checked | errors | s per 1000 files |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for folder in arguments.folders:
        start = time.perf_counter()
        report = check_paths(folder, jobs=arguments.jobs)
        seconds = (time.perf_counter() - start) / max(1, report.files) * 1000
        rules = ", ".join(f"{code} {count}" for code, count in report.counts().items())
        print(
            f"| {folder.name} | {report.files} | {len(report.findings)} | {rules} "
            f"| {len(report.skipped)} | {len(report.errors)} | {seconds:.1f} |",
            flush=True,
        )
        if arguments.findings is not None:
            with arguments.findings.open("a", encoding="utf-8") as file:
                file.writelines(
                    f"{one.path}:{one.span.line}: {one.code} {one.message}\n"
                    for one in report.findings
                )


if __name__ == "__main__":
    main()
