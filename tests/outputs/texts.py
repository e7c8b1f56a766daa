"""The texts of the canonical runs that users and programs read, one for each surface.

`mp-agent recommend` and `mp-agent compare` of a model compute with torch: their model is one whose
arithmetic is exact, so that neither the processor nor its threads matter, and what they say of the
machine is left out. What measures time is not here: `mp-agent evaluate`, `doctor` and `top`, whose
numbers are those of the status report.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import chdir, closing
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource

from mp_agent.catalog.metric import Family, Snapshot
from mp_agent.catalog.thresholds import resolve
from mp_agent.cli import main
from mp_agent.exporters.otlp.events import Times, batches, log_records, unix_ns
from mp_agent.exporters.prometheus import render
from mp_agent.exporters.status_page.report import snapshot_report
from mp_agent.node.series.snapshot_builder import SnapshotBuilder
from mp_agent.records.columns import GRADIENTS, step_columns
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.schema import Layer, Schema, Share, family_columns
from mp_agent.records.steps import LayerTable, StepRecord
from mp_agent.ring.writer import RingWriter
from mp_agent.version import __version__
from tests.agent.node.builders import make_identity
from tests.outputs.runs import Clock, Player
from tests.outputs.scripts import exports, played

SCRIPT = Path(__file__).parent / "script.txt"
MODEL = Path(__file__).parent / "exact_model.py"
_SERIES_PUSHED = 1
"""Of each metric; tests of the exporter compare all of a push with a scrape."""
_BYTES_PER_LINE = 16
_TERMINAL = {"COLUMNS": "80", "FORCE_COLOR": None, "TTY_COMPATIBLE": None}


def texts(directory: Path) -> tuple[dict[str, str], Snapshot]:
    """Return the texts by the names of their files, and the snapshot that they show."""
    with played(directory) as (clock, players):
        views = exports(clock, players)
        snapshot = SnapshotBuilder(resolve({}), 20_000).build(views, clock.unix_seconds)
        report = snapshot_report(views, resolve({}), clock.unix_seconds)
        reported = {
            "metrics.txt": render(snapshot)[0].decode(),
            "otlp.jsonl": _lines(_pushed(snapshot)),
            "events.jsonl": _lines(_events(players)),
            "status.json": json.dumps(report, indent=1) + "\n",
            "history.jsonl": _lines(_history(players)),
            "ring.hex": "".join(_ring(directory, clock)),
            **_commands(directory, players),
        }
    return {name: _without_place(text, directory) for name, text in reported.items()}, snapshot


def _without_place(text: str, directory: Path) -> str:
    """Return a text without what every release and every machine has otherwise."""
    named = text.replace(f'"{__version__}"', '"VERSION"')
    return named.replace(str(directory), "DIRECTORY").replace(str(SCRIPT.parent), "HERE")


def _lines(values: Iterator[Any]) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


def _pushed(snapshot: Snapshot) -> Iterator[Any]:
    """Yield each metric as it is pushed, with its first series, if it has several."""
    families = tuple(
        Family(family.metric, tuple(family.samples)[:_SERIES_PUSHED]) for family in snapshot
    )
    few = Snapshot(families, snapshot.time_unix_seconds)
    born = unix_ns(snapshot.time_unix_seconds) - 10**9
    runs = {sample.labels[0]: born for family in few for sample in family.samples}
    times = Times(unix_ns(few.time_unix_seconds), runs, {})
    for request in batches(few, times, Resource({"service.name": "mp-agent"})):
        pushed = MessageToDict(encode_metrics(request))
        for resource in pushed["resourceMetrics"]:
            for scope in resource["scopeMetrics"]:
                metrics = scope.pop("metrics")
                yield {**resource, "scopeMetrics": [scope]}
                yield from metrics


def _events(players: Mapping[str, Player]) -> Iterator[Any]:
    """Yield what is pushed of the conditions in force."""
    for player in players.values():
        for condition in player.runs[0].conditions.active:
            event = StoredConditionEvent(
                state="firing", condition=condition, step=1, time_unix_seconds=1.5
            )
            sent = MessageToDict(encode_logs(log_records([event], Resource({}))))
            (record,) = sent["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
            del record["observedTimeUnixNano"]  # of the SDK's own clock
            yield record


def _history(players: Mapping[str, Player]) -> Iterator[Any]:
    for name, player in players.items():
        if name != "long":
            for column, values in player.runs[0].history.columns().items():
                yield {"run": name, column: values}


def _ring(directory: Path, clock: Clock) -> Iterator[str]:
    """Yield the bytes of a small ring that are not zero, by their place in the file."""
    identity = make_identity(run="ring", created_unix_ns=clock.unix_ns())
    schema = Schema(
        step_columns=step_columns(guarded=False)[:3],
        families=family_columns((GRADIENTS,)),
        shares=(Share(group="main"),),
        layers=(Layer(name="weight", share=0, elements=4),),
        facts=(("precision", "bf16"),),
    )
    row = np.arange(len(GRADIENTS.columns), dtype=np.float64).reshape(1, -1)
    path = directory / "ring"
    with closing(RingWriter.create(path, identity)) as ring:
        ring.write_schema(schema)
        ring.write_step(
            StepRecord(
                sequence=1,
                step=7,
                time_unix_ns=clock.unix_ns(),
                values=np.array([2.0, 0.0, 1024.0]),
                families={GRADIENTS.name: row},
            )
        )
        ring.write_layers(LayerTable(sequence=1, families={GRADIENTS.name: row + 0.5}))
    content = path.read_bytes()
    yield f"{len(content)} bytes\n"
    for place in range(0, len(content), _BYTES_PER_LINE):
        line = content[place : place + _BYTES_PER_LINE]
        if any(line):
            yield f"{place:08x} {line.hex(' ', 4)}\n"


def _commands(directory: Path, players: Mapping[str, Player]) -> dict[str, str]:
    trouble, healthy = players["trouble"], players["everything-measured"]
    log = directory / "logged-run" / "log.csv"
    log.parent.mkdir()
    log.write_text("".join(_log()))
    with chdir(trouble.run_dirs[0].parent):  # a short path, which no terminal wraps
        shown = _output("postmortem", trouble.run_dirs[0].name)
    one, other = str(trouble.run_dirs[0]), str(healthy.run_dirs[0])
    target = f"{MODEL}:make_model"
    return {
        "check.json": _output("check", str(SCRIPT), "--format", "json"),
        "backtest.json": _output("backtest", str(log), "--json", "--processes", "1"),
        "postmortem.json": _output("postmortem", one, "--json"),
        "postmortem.txt": shown,
        "compare-runs.json": _output("compare", one, other, "--json"),
        "compare.json": _without_machine(
            _output("compare", target, "--json", "--dtype", "fp16-autocast")
        ),
        "recommend.json": _without_machine(
            _output("recommend", target, "--json", "--capability", "8.0", "--steps", "1")
        ),
    }


def _output(*arguments: str) -> str:
    result = CliRunner(env=_TERMINAL).invoke(main, arguments)
    assert isinstance(result.exception, SystemExit | None), result.output
    return result.stdout


def _without_machine(document: str) -> str:
    """Return a document without the machine, and numbers to nine digits."""
    found = json.loads(document, parse_float=lambda text: float(f"{float(text):.9g}"))
    return json.dumps({**found, "environment": {}}, indent=1) + "\n"


def _log() -> Iterator[str]:
    yield "step,loss,grad_norm,learning_rate,loss_scale\n"
    for step in range(1, 301):
        loss = "nan" if step > 280 else f"{2 + step * 5 % 8 / 16}"
        norm = "nan" if step > 290 else f"{(2000 if step > 260 else 1) + step * 3 % 8 / 16}"
        yield f"{step},{loss},{norm},0.0625,1024\n"
