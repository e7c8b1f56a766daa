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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import yaml
from aiohttp import web

from benchmarks.dashboards_at_scale import GROUP_SECONDS, binaries_of, group_seconds, rules_text
from benchmarks.machine import describe, markdown
from tools.generators.sharded import FOLDER, sharded_files
from tools.servers.victoria import VictoriaMetrics, victoria_metrics, vmagent, vmalert
from tools.synthetic_store import Size, expositions, series_of

_LAYERS = 500
"""With all that is measured of layers, an agent exports no more than `max_series`."""
_STEP = 1000
_MEASURED_INTERVALS = 4
_START_SECONDS = 900
_Servers = tuple[VictoriaMetrics, list[str]]
"""The store, and the URLs of the vmagents."""


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
    theirs.close()  # so that one that ends early is noticed
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


@contextmanager
def _scraping(addresses: list[str], options: argparse.Namespace, place: Path) -> Iterator[_Servers]:
    """Run a store and the vmagents that share these targets, until each was scraped once."""
    server, scraper = binaries_of("victoria-metrics", "vmagent")
    configuration = _configuration(addresses, options.interval_seconds, place)
    with ExitStack() as stack:
        store = stack.enter_context(victoria_metrics(server, place / "store", memory="6GB"))
        scrapers = [
            stack.enter_context(
                vmagent(
                    scraper,
                    place / f"vmagent-{shard}",
                    configuration=configuration,
                    shard=shard,
                    shards=options.shards,
                    store_url=store.url,
                )
            )
            for shard in range(options.shards)
        ]
        deadline = time.monotonic() + _START_SECONDS
        while (scraped := _scraped_well(scrapers)) < len(addresses):
            if time.monotonic() > deadline:
                raise SystemExit(f"{scraped:.0f} of {len(addresses)} targets scraped")
            time.sleep(2)
        yield store, scrapers


def measure(ranks: int, options: argparse.Namespace, place: Path) -> dict[str, str]:
    """Return a row of the table: what came, and what each server took.

    Raises SystemExit where a target is not scraped, a series is missing, or a rule fails.
    """
    (place / "rules.yaml").write_text(rules_text())
    (alerting,) = binaries_of("vmalert")
    with (
        _agents(ranks) as (addresses, series),
        _scraping(addresses, options, place) as (store, scrapers),
        vmalert(
            alerting,
            place / "vmalert",
            rules=place / "rules.yaml",
            datasource_url=store.url,
            alertmanager_url="http://127.0.0.1:9",
            interval_seconds=60,
        ) as alerts,
    ):
        servers = {"vmagents": scrapers, "VictoriaMetrics": [store.url], "vmalert": [alerts]}
        before = {name: _totals(urls) for name, urls in servers.items()}
        began = time.monotonic()
        groups = group_seconds(alerts)
        rest = _MEASURED_INTERVALS * options.interval_seconds - (time.monotonic() - began)
        time.sleep(max(rest, 0))
        seconds = time.monotonic() - began
        after = {name: _totals(urls) for name, urls in servers.items()}
        found = sum(_count(store.query(f"count({name})")) for name in sorted(_names()))
        up = _count(store.query("count(up == 1)"))
    if found != series or up != len(addresses):
        raise SystemExit(f"{found} of {series} series, {up} of {len(addresses)} targets arrived")
    rows = after["VictoriaMetrics"]["rows"] - before["VictoriaMetrics"]["rows"]
    slow = sorted(groups.items(), key=lambda group: -group[1])
    return {
        "ranks": f"{ranks:,}",
        "targets": f"{len(addresses):,}",
        "series": f"{series:,}",
        "samples/s": f"{rows / seconds:,.0f}",
        **{
            f"{name}, of a core": f"{(after[name]['cpu'] - before[name]['cpu']) / seconds:.0%}"
            for name in servers
        },
        **{f"{name}, memory": f"{after[name]['bytes'] / 2**20:,.0f} MiB" for name in servers},
        "slowest group": f"{slow[0][0]} {slow[0][1]:.2f} s",
        f"groups beyond {GROUP_SECONDS:.0f} s": str(sum(t > GROUP_SECONDS for _, t in slow)),
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


def _names() -> set[str]:
    """Return the names of all series: to count them in one query is more than a store allows."""
    size = Size(ranks=1, layers=1, hours=1, interval_seconds=60)
    return {name.partition("{")[0] for _, name in series_of(size)}


def _count(answer: Sequence[Mapping[str, Any]]) -> int:
    return int(answer[0]["value"][1]) if answer else 0


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
            rows.append(measure(ranks, options, Path(place)))
        print(rows[-1], flush=True)
    print(markdown(tuple(rows[0]), (tuple(row.values()) for row in rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
