"""`python -m tests.alerting.noise`: print the table of precision, recall and time to alert.

With --write it is also kept in the docs' sources, from where `make generate` takes it.
"""

import argparse
import sys
from pathlib import Path

from tests.alerting.noise.table import summary, table, verdicts
from tools.servers import binaries

MEASURED = Path(__file__).parents[3] / "alerting" / "pages" / "noise.md"


def main() -> int:
    """Return 1 when a fault was missed or a healthy run brought an alert."""
    parser = argparse.ArgumentParser(prog="python -m tests.alerting.noise", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {MEASURED.name} as well")
    write = parser.parse_args().write
    promtool = binaries.find("promtool")
    if promtool is None:
        print("promtool is needed, and is not to be had here", file=sys.stderr)
        return 1
    found = verdicts(promtool)
    text = f"{summary(found)}\n\n{table(found)}\n"
    print(text)
    for verdict in found:
        for kind, alerts in (("missed", verdict.missed), ("false alarm", verdict.surprises)):
            if alerts:
                print(f"{verdict.scenario.name}: {kind}: {alerts}")
    if write:
        MEASURED.write_text(text, encoding="utf-8")
    return int(any(verdict.missed or verdict.surprises for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
