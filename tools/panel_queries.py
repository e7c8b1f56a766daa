"""The panels' queries as Grafana asks them: variables filled in, over a range or at its end."""

import re
import time
import urllib.error
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grafana.boards import BOARDS
from grafana.panel import COLUMNS, Board, Panel, Query
from grafana.views import asked
from tools.servers.running import read_json

_PIXELS = 1600
"""Width of a page; Grafana asks for a point per pixel of a panel unless the panel says fewer."""


class QueryError(RuntimeError):
    """Prometheus refused an expression, or warned of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Whom to ask, which run is selected, and the time range."""

    url: str
    run: str
    other_run: str = ""
    """With which the run is compared; itself by default."""
    start_unix_seconds: float
    end_unix_seconds: float
    scrape_interval_seconds: int

    def series(self, panel: Panel, query: Query) -> list[dict[str, Any]]:
        """Return what a query answers over the whole range, even if only its end is shown.

        One that Grafana asks at the end alone is asked like that too. Raises QueryError.
        """
        if query.instant:
            self.at_end(query)
        step = self.step_seconds(panel)
        return self._range(self.filled_in(query.expression, step), step)

    def measured(self, panel: Panel) -> float:
        """Return how many seconds a panel's queries take, one after the other."""
        step = self.step_seconds(panel)
        started = time.perf_counter()
        for query in asked(panel):
            if query.instant:
                self.at_end(query)
            else:
                self._range(self.filled_in(query.expression, step), step)
        return time.perf_counter() - started

    def at_end(self, query: Query) -> list[dict[str, Any]]:
        """Return what a query answers at the end of the range."""
        expression = self.filled_in(query.expression, self.scrape_interval_seconds)
        return self._ask("query", expression, time=self.end_unix_seconds)

    def step_seconds(self, panel: Panel) -> int:
        """Return the time between two points of a panel."""
        points = panel.most_points or _PIXELS * panel.width // COLUMNS
        span = self.end_unix_seconds - self.start_unix_seconds
        return max(self.scrape_interval_seconds, int(-(-span // points)))

    def filled_in(self, expression: str, step_seconds: int) -> str:
        """Return an expression with everything for its variables."""
        scrape = self.scrape_interval_seconds
        values = {
            "$__rate_interval": f"{max(step_seconds + scrape, 4 * scrape)}s",
            "$__range": f"{int(self.end_unix_seconds - self.start_unix_seconds)}s",
            "$cluster": ".*",
            "$namespace": ".*",
            "$job": ".+",
            "$layer": ".+",
            "$run": self.run,
            "$other_run": self.other_run or self.run,
        }
        for variable, value in values.items():
            expression = expression.replace(variable, value)
        if re.search(r"\$[A-Za-z_]", expression):
            raise QueryError(f"{expression}: a variable is not known")
        return expression

    def _range(self, expression: str, step_seconds: int) -> list[dict[str, Any]]:
        start, end = self.start_unix_seconds, self.end_unix_seconds
        return self._ask("query_range", expression, start=start, end=end, step=step_seconds)

    def _ask(self, path: str, expression: str, **more: float) -> list[dict[str, Any]]:
        parameters = urllib.parse.urlencode({"query": expression, "nocache": 1, **more})
        try:
            answer = read_json(f"{self.url}/api/v1/{path}?{parameters}")
        except urllib.error.HTTPError as error:
            raise QueryError(f"{expression}: {error.read().decode()}") from error
        if found := answer.get("warnings"):
            raise QueryError(f"{expression}: {found}")
        return list(answer["data"]["result"])


def every_panel() -> Iterator[tuple[Board, Panel]]:
    """Yield all panels with their boards."""
    for board in BOARDS:
        for panel in board.panels:
            yield board, panel
