"""`python -m examples.demo`: watch a real training job go wrong, and the alerts arrive."""

import argparse
import signal
import sys

from rich.console import Console

from examples.demo.run import run_demo
from examples.demo.scenarios import BY_NAME, SCENARIOS
from tools.host_name import host_name_problem


def main() -> int:
    """Run the demo; 1 when a job could not be watched, or a mistake brought no alert."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--scenario", choices=BY_NAME, help="run this one alone")
    chosen = parser.parse_args().scenario
    if problem := host_name_problem():
        print(problem, file=sys.stderr)
        return 1
    scenarios = (BY_NAME[chosen],) if chosen else SCENARIOS
    # Only as an exception does a signal end the servers and jobs as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    outcomes = run_demo(scenarios, Console())
    expected = [outcome for outcome in outcomes if outcome.scenario in SCENARIOS]
    return int(not all(outcome.alerts for outcome in expected))


if __name__ == "__main__":
    sys.exit(main())
