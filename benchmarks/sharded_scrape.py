"""What it takes to scrape a run of many ranks in shards into one VictoriaMetrics, with all rules.

Run: python -m benchmarks.sharded_scrape [--ranks 16384 100000] [--shards 2] [--interval-seconds 60]

Real vmagents share the targets as in examples/sharded, and a real vmalert evaluates every rule. One
process answers for the agents of all nodes, each at a loopback address of its own, with values that
stay as they are.
"""

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import yaml
from aiohttp import web

from benchmarks.dashboards_at_scale import GROUP_SECONDS, binaries_of, group_seconds, rules_text
from benchmarks.machine import describe, markdown
from tools.generators.sharded import FOLDER, sharded_files
from tools.servers.victoria import victoria_metrics, vmagent, vmalert
from tools.synthetic_store import Size, expositions

_LAYERS = 500
"""With all that is measured of layers, an agent exports no more than `max_series`."""
_STEP = 1000
_MEASURED_INTERVALS = 4
_START_SECONDS = 900


def _address(node: int) -> str:
    return f"127.1.{node // 250}.{node % 250 + 1}"


def _answer(ranks: int, ready: Connection) -> None:
    """Serve what the agent of each node exports; send the port, and how many series there are."""
    size = Size(ranks=ranks, layers=_LAYERS, hours=1, interval_seconds=60)
    bodies = {_address(node): text.encode() for node, text in enumerate(expositions(size, _STEP))}

    async def metrics(request: web.Request) -> web.Response:
        assert request.transport is not None
        own, _ = request.transport.get_extra_info("sockname")
        return web.Response(body=bodies[own], content_type="text/plain")

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    listener = socket.create_server(("0.0.0.0", 0), backlog=4096)
    series = sum(body.count(b"\n") for body in bodies.values())
    ready.send((listener.getsockname()[1], series))
    web.run_app(application, sock=listener, print=None, access_log=None)


@contextmanager
def _agents(ranks: int) -> Iterator[tuple[list[str], int]]:
    """Yield the addresses of the agents of all nodes, and how many series they have in all."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(ranks, theirs))
    process.start()
    try:
        port, series = ours.recv()
        yield [f"{_address(node)}:{port}" for node in range(-(-ranks // 8))], series
    finally:
        process.terminate()
        process.join()


def _configuration(addresses: list[str], interval_seconds: int, directory: Path) -> Path:
    """Write the example's configuration for these targets, whatever their port."""
    targets = directory / "targets.json"
    targets.write_text(json.dumps([{"targets": addresses}]))
    example = yaml.safe_load(sharded_files()[f"{FOLDER}/victoriametrics/vmagent.yml"])
    (job,) = example["scrape_configs"]
    job["file_sd_configs"] = [{"files": [str(targets)]}]
    job["relabel_configs"] = [
        each for each in job["relabel_configs"] if each.get("source_labels") != ["__address__"]
    ]
    example["global"]["scrape_interval"] = f"{interval_seconds}s"
    path = directory / "configuration.yml"
    path.write_text(yaml.safe_dump(example))
    return path


def _own_metrics(url: str) -> Mapping[str, float]:
    """Return what a server says of itself, by name with labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _scraped_well(urls: list[str]) -> float:
    """Return how many targets answered their last scrape."""
    return sum(
        value
        for url in urls
        for name, value in _own_metrics(url).items()
        if name.startswith("vm_promscrape_targets{") and 'status="up"' in name
    )


def measure(ranks: int, shards: int, interval_seconds: int, directory: Path) -> dict[str, str]:
    """Return a row of the table: what came, and what each server took. Raises SystemExit."""
    server, scraper, alerting = binaries_of("victoria-metrics", "vmagent", "vmalert")
    rules = directory / "rules.yaml"
    rules.write_text(rules_text())
    with ExitStack() as stack:
        addresses, series = stack.enter_context(_agents(ranks))
        store = stack.enter_context(victoria_metrics(server, directory / "store", memory="6GB"))
        configuration = _configuration(addresses, interval_seconds, directory)
        scrapers = [
            stack.enter_context(
                vmagent(
                    scraper,
                    directory / f"vmagent-{shard}",
                    configuration=configuration,
                    shard=shard,
                    shards=shards,
                    store_url=store.url,
                )
            )
            for shard in range(shards)
        ]
        deadline = time.monotonic() + _START_SECONDS
        while _scraped_well(scrapers) < len(addresses):
            if time.monotonic() > deadline:
                raise SystemExit(f"{_scraped_well(scrapers)} of {len(addresses)} targets scraped")
            time.sleep(2)
        alerts = stack.enter_context(
            vmalert(
                alerting,
                directory / "vmalert",
                rules=rules,
                datasource_url=store.url,
                alertmanager_url="http://127.0.0.1:9",
                interval_seconds=60,
            )
        )
        of_servers = {"vmagents": scrapers, "VictoriaMetrics": [store.url], "vmalert": [alerts]}
        before = {name: _totals(urls) for name, urls in of_servers.items()}
        began = time.monotonic()
        groups = group_seconds(alerts)
        time.sleep(max(_MEASURED_INTERVALS * interval_seconds - (time.monotonic() - began), 0))
        seconds = time.monotonic() - began
        after = {name: _totals(urls) for name, urls in of_servers.items()}
        found = _count(store.query("sum(scrape_samples_post_metric_relabeling)"))
        up = _count(store.query("count(up == 1)"))
    if found != series or up != len(addresses):
        raise SystemExit(f"{found} of {series} series, {up} of {len(addresses)} targets arrived")
    slow = sorted(groups.items(), key=lambda group: -group[1])
    rows = after["VictoriaMetrics"]["rows"] - before["VictoriaMetrics"]["rows"]
    return {
        "ranks": f"{ranks:,}",
        "targets": f"{len(addresses):,}",
        "series": f"{series:,}",
        "samples/s": f"{rows / seconds:,.0f}",
        **{
            f"{name}, of a core": f"{(after[name]['cpu'] - before[name]['cpu']) / seconds:.0%}"
            for name in of_servers
        },
        **{f"{name}, memory": f"{after[name]['bytes'] / 2**20:,.0f} MiB" for name in of_servers},
        f"groups beyond {GROUP_SECONDS:.0f} s": ", ".join(
            f"{name.removeprefix('mp-agent.')} {took:.2f} s"
            for name, took in slow
            if took > GROUP_SECONDS
        ),
        "slowest group": f"{slow[0][1]:.2f} s",
    }


def _totals(urls: list[str]) -> dict[str, float]:
    """Return processor seconds, memory and rows inserted of some servers together."""
    totals = dict.fromkeys(("cpu", "bytes", "rows"), 0.0)
    for url in urls:
        own = _own_metrics(url)
        totals["cpu"] += own["process_cpu_seconds_total"]
        totals["bytes"] += own["process_resident_memory_bytes"]
        totals["rows"] += sum(v for k, v in own.items() if k.startswith("vm_rows_inserted_total"))
    return totals


def _count(answer: list[dict[str, object]]) -> int:
    (one,) = answer
    value = one["value"]
    assert isinstance(value, list)
    return int(value[1])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16_384])
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--interval-seconds", type=int, default=60)
    options = parser.parse_args()
    print(describe(torch.device("cpu")), flush=True)
    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="mp_agent-scrape-") as place:
            rows.append(measure(ranks, options.shards, options.interval_seconds, Path(place)))
        print(rows[-1], flush=True)
    print(markdown(tuple(rows[0]), (tuple(row.values()) for row in rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
