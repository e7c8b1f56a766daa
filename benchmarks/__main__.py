"""`make bench`: all measurements of what the probe costs, one table after the other."""

import subprocess
import sys

_BENCHMARKS = (
    ("step_overhead",),
    ("gradient_loggers",),
    ("statistics_cost",),
    ("sampled_groups",),
    ("activation_cost", "outputs", "attention", "fp8"),
    ("activation_cost", "routers", "--model", "mixture"),
    ("tensor_cost",),
    ("device_bandwidth",),
    ("ring_cost",),
    ("otlp_cost",),
)


def main() -> None:
    """Run each in a separate process: torch's thread count is a process's."""
    for name, *arguments in _BENCHMARKS:
        print(f"\n## {' '.join((name, *arguments))}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=True)


if __name__ == "__main__":
    main()
