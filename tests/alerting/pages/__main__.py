"""`python -m tests.alerting.pages [FAULT ...]`: write the pages of the planted faults again.

Read the differences before committing them: they are what someone reads at 3 a.m.
"""

import sys
import tempfile
from pathlib import Path

from tests.alerting.pages.faults import NAMES
from tests.alerting.pages.golden import GOLDEN, pages, text
from tools.servers import binaries


def main() -> int:
    """Return 1 when promtool or Alertmanager is not to be had."""
    found = {name: binaries.find(name) for name in ("promtool", "alertmanager")}
    promtool, alertmanager = found["promtool"], found["alertmanager"]
    if promtool is None or alertmanager is None:
        print("promtool and Alertmanager are needed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        for name, page in pages(sys.argv[1:] or NAMES, promtool, alertmanager, Path(directory)):
            (GOLDEN / f"{name}.json").write_text(text(page), encoding="utf-8")
            print("\n".join(("", f"== {name}: {page['what']}", *page["at_once"]["page"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
