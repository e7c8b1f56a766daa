"""Writes the post-mortem of a flight record: `python -m mp_agent.node.commands.analysis DIRECTORY`.

The node agent runs it in a separate process, so that no analysis delays it. Prints the first line.
"""

import json
import sys
from pathlib import Path

from mp_agent.errors import FlightError
from mp_agent.flight.record.store import write_report
from mp_agent.flight.report.document import as_json
from mp_agent.flight.report.page import as_html
from mp_agent.flight.report.text import first_line
from mp_agent.inputs.limits import limit_resources
from mp_agent.node.commands.flight import analyse_path
from mp_agent.settings import Settings

CPU_SECONDS_MAX = 120
MEMORY_BYTES_MAX = 4 << 30
_NICENESS = 10
"""Below the training, but not so far that a busy machine never comes to it."""


def main(arguments: list[str]) -> int:
    """Write the report of the record in a directory; 1 if it cannot be read or written."""
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
    sys.exit(main(sys.argv[1:]))
