"""What a run over many nodes costs its root agent, as Markdown tables.

Run: python -m benchmarks.many_nodes [--nodes 8 64 512 1250] [--placements ddp fsdp] [--stretch 1]
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import date
from statistics import median

from benchmarks.many_nodes.live import LiveResult, Load, measure
from benchmarks.many_nodes.model import Model
from benchmarks.many_nodes.stages import (
    Rendering,
    Stages,
    measure_rendering,
    measure_stages,
)

_NODES = (8, 64, 512, 1250)
_PLACEMENTS = ("ddp", "fsdp")
_LAYERS = (300, 1000, 4000, 10_000)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    options = _parse(arguments)
    load = Load(
        stretch=options.stretch,
        warm_up_steps=options.warm_up_steps,
        steady_steps=options.steady_steps,
        table_steps=options.table_steps,
        step_seconds=options.step_seconds,
        start_seconds=options.start_seconds,
        trouble_steps=options.trouble_steps,
        drain_seconds=options.drain_seconds,
    )
    models = [
        Model(nodes, placement, nan_steps=options.nan_steps)
        for placement in options.placements
        for nodes in options.nodes
    ]
    lives, stages = [], []
    for model in models if "live" in options.parts else ():
        _say(f"{model.nodes} nodes, {model.placement}: live")
        lives.append(measure(model, load))
    for model in models if "stages" in options.parts else ():
        _say(f"{model.nodes} nodes, {model.placement}: stages")
        stages.append((model, measure_stages(model)))
    renderings = []
    if "scrape" in options.parts:
        renderings = [measure_rendering(layers) for layers in _LAYERS]
    # Only now: it imports torch, which would be most of this process's memory.
    from torch import device

    from benchmarks.machine import describe, markdown

    print(f"{date.today()}, {describe(device('cpu'))}; {_load()}\n")
    if lives:
        print(f"## Live\n\n{markdown(_LIVE_HEADER, map(_live_row, lives))}\n")
        print(f"{markdown(_NODE_HEADER, map(_node_row, lives))}\n")
        print("\n".join(filter(None, map(_remark, lives))) or "All figures are exact, none lost.")
        print("\n".join(filter(None, map(_nan_remark, lives))))
    if stages:
        print(f"\n## Stages\n\n{markdown(_STAGE_HEADER, (_stage_row(*s) for s in stages))}")
    if renderings:
        print(f"\n## Scrapes\n\n{markdown(_SCRAPE_HEADER, map(_scrape_row, renderings))}")


_LIVE_HEADER = (
    "nodes",
    "placement",
    "requests/s",
    "body bytes/s",
    "+ layers",
    "core share",
    "+ layers",
    "slowdown",
    "at full speed",
    "memory",
    "/metrics",
    "its cost",
    "answer p50, p99",
)
_NODE_HEADER = ("nodes", "placement", "bytes/s per node", "bytes of a layer table per node")
_STAGE_HEADER = (
    "nodes",
    "placement",
    "node: make a report",
    "a request",
    "of that: unpack",
    "receive",
    "merge a step",
    "account a step",
    "take a table",
    "merge a table",
    "look",
    "judge",
    "core share, computed",
)
_SCRAPE_HEADER = (
    "layers",
    "series",
    "size",
    "snapshot after a layer table",
    "snapshot else",
    "render",
)


def _live_row(result: LiveResult) -> tuple[str, ...]:
    modelled = "" if result.load.stretch == 1 else " *"
    return (
        f"{result.model.nodes}",
        result.model.placement,
        f"{result.requests_per_second:.1f}",
        f"{result.bytes_per_second / 1e3:.1f} kB",
        f"{result.bytes_with_tables / 1e3:.1f} kB",
        f"{result.processor_share:.1%}{modelled}",
        f"{result.share_with_tables:.1%}{modelled}",
        f"{result.slowdown:.2f}",
        f"{result.share_with_tables / result.slowdown:.1%}{modelled}",
        f"{result.memory_peak_mib:.0f} MiB",
        f"{result.final.size_bytes / 1e6:.2f} MB",
        f"{result.scrape_processor_seconds:.3f} s",
        f"{result.latency_p50_seconds * 1e3:.0f} ms, {result.latency_p99_seconds * 1e3:.0f} ms",
    )


def _node_row(result: LiveResult) -> tuple[str, ...]:
    others = max(result.model.nodes - 1, 1)
    return (
        f"{result.model.nodes}",
        result.model.placement,
        f"{result.bytes_per_second / others:.0f}",
        f"{result.table_bytes / others:.0f}",
    )


def _stage_row(model: Model, stages: Stages) -> tuple[str, ...]:
    return (
        f"{model.nodes}",
        model.placement,
        *(
            f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
            for seconds in (
                stages.make_report,
                stages.serve_request,
                stages.unpack_report,
                stages.receive_report,
                stages.merge_step,
                stages.fold_step,
                max(stages.take_table, 0.0),
                stages.merge_table,
                stages.look,
                stages.judge,
            )
        ),
        f"{stages.processor_share():.1%}",
    )


def _scrape_row(rendering: Rendering) -> tuple[str, ...]:
    return (
        f"{rendering.layers}",
        f"{rendering.series}",
        f"{rendering.size_bytes / 1e6:.2f} MB",
        f"{rendering.reselected_snapshot_seconds:.3f} s",
        f"{rendering.snapshot_seconds:.3f} s",
        f"{rendering.render_seconds:.3f} s",
    )


def _remark(result: LiveResult) -> str:
    """Return what speaks against a result; nothing when all was exact and in time."""
    wrong = list(result.mistakes())
    if result.late_seconds > result.load.push_interval_seconds / 2:
        wrong.append(f"the nodes fell {result.late_seconds:.1f} s behind: the machine is too small")
    if result.failures:
        wrong.append(f"{result.failures} requests failed: {result.reasons}")
    return f"{result.model.nodes} nodes, {result.model.placement}: {'; '.join(wrong)}" * bool(wrong)


def _nan_remark(result: LiveResult) -> str:
    times = result.nan_seconds
    if not times:
        return ""
    return (
        f"{result.model.nodes} nodes, {result.model.placement}: the root knew of {len(times)} NaN "
        f"after {median(times):.1f} s (median), {times[int(0.99 * (len(times) - 1))]:.1f} s (p99), "
        f"{times[-1]:.1f} s (longest), and of all nodes {result.start_seconds:.0f} s after the "
        "first agent began"
    )


def _load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}, {_load()}", file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=_NODES)
    parser.add_argument("--placements", nargs="+", default=_PLACEMENTS, choices=_choices())
    parser.add_argument("--parts", nargs="+", default=("live", "stages", "scrape"))
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        help="slow the run's clock down by so much, on a machine that cannot hold it; the share "
        "of a core is then computed for the clock as it is",
    )
    parser.add_argument(
        "--nan-steps",
        type=int,
        default=0,
        help="of a live run: plant a NaN every so many steps, and measure how soon the root knows",
    )
    parser.add_argument("--step-seconds", type=float, default=Load().step_seconds)
    parser.add_argument("--start-seconds", type=float, default=Load().start_seconds)
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=Load().drain_seconds,
        help="of a live run: let the nodes push so long what they still have; take the pace",
    )
    parser.add_argument(
        "--trouble-steps",
        type=int,
        default=Load().trouble_steps,
        help="of a live run, after what is measured: kill the root, and silence every tenth node",
    )
    for name in ("warm_up_steps", "steady_steps", "table_steps"):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(Load(), name),
            help="of a live run; take 60 each where the root asks for a longer pace",
        )
    return parser.parse_args(arguments)


def _choices() -> Iterable[str]:
    return ("ddp", "fsdp", "hsdp")


if __name__ == "__main__":
    main()
