"""Ask the node agents of a run whether they live and what they lost; needs no Prometheus."""

import sys
import urllib.request

LOSSES = ("_errors_total", "_dropped_total")


def losses(text: str) -> dict[str, float]:
    """Return the error and drop counters in a scrape that are not 0."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {
        series: float(value)
        for series, value in samples
        if series.partition("{")[0].endswith(LOSSES) and float(value) > 0
    }


def losses_of(address: str) -> str:
    """Return the losses of the agent at host:port, or why it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            found = losses(answer.read().decode())
    except OSError as error:
        return f"does not answer: {error}"
    return ", ".join(f"{series} {value:g}" for series, value in found.items()) or "nothing lost"


for address in sys.argv[1:]:  # node-0:9464 node-1:9464 …
    print(f"{address}: {losses_of(address)}")

assert losses('mp_agent_probe_errors_total{run="a"} 2.0\nmp_agent_step{run="a"} 7.0\n') == {
    'mp_agent_probe_errors_total{run="a"}': 2.0
}
