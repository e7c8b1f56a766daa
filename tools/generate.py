"""Write, or check, the committed files that come from the catalogs."""

import argparse
import difflib
import sys
from pathlib import Path

from grafana.render import rendered_dashboards
from mp_agent.alerting.rules import rendered_files
from tools.generators.api_reference import api_reference_files
from tools.generators.chart import chart_files
from tools.generators.check_reference import check_reference_files
from tools.generators.compatibility import compatibility_files
from tools.generators.guard_reference import guard_files
from tools.generators.metrics_reference import reference_files
from tools.generators.settings_reference import settings_files
from tools.generators.sharded import sharded_files

ROOT = Path(__file__).parent.parent


def generated_files() -> dict[Path, str]:
    """Return every generated file with the text that it should have."""
    files: dict[Path, str] = {}
    for rendered in (
        rendered_files(),
        rendered_dashboards(),
        chart_files(),
        reference_files(),
        settings_files(),
        api_reference_files(),
        check_reference_files(),
        guard_files(),
        compatibility_files(),
        sharded_files(),
    ):
        files.update({ROOT / path: text for path, text in rendered.items()})
    return files


def main() -> int:
    """Write the files, or with --check print what differs and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="report files that are out of date, write nothing"
    )
    check = parser.parse_args().check
    stale = {path: text for path, text in generated_files().items() if _read(path) != text}
    for path, text in stale.items():
        if check:
            _print_difference(path, text)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if check and stale:
        print("out of date: run `make generate`", file=sys.stderr)
    return int(check and bool(stale))


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _print_difference(path: Path, text: str) -> None:
    name = str(path.relative_to(ROOT))
    old = (_read(path) or "").splitlines()
    print("\n".join(difflib.unified_diff(old, text.splitlines(), name, "generated", lineterm="")))


if __name__ == "__main__":
    sys.exit(main())
