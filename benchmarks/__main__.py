"""`make bench`: all measurements of what the probe costs, one table after the other."""

import subprocess
import sys

_BENCHMARKS = (
    "step_overhead",
    "gradient_loggers",
    "statistics_cost",
    "sampled_groups",
    "device_bandwidth",
    "ring_cost",
    "otlp_cost",
)


def main() -> None:
    """Run each in a process of its own: torch's thread count is a process's."""
    for name in _BENCHMARKS:
        print(f"\n## {name}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
