"""One module per dashboard: its rows, and in them its panels, as data."""

from grafana.boards.compare import COMPARE
from grafana.boards.fleet import FLEET
from grafana.boards.layers import LAYERS
from grafana.boards.others import MORE, with_unplaced_metrics
from grafana.boards.ranks import RANKS
from grafana.boards.run import RUN
from grafana.boards.telemetry import TELEMETRY

BOARDS = with_unplaced_metrics((FLEET, RUN, LAYERS, RANKS, COMPARE, MORE, TELEMETRY))
"""All dashboards. A metric that no panel shows yet gets one of its own at the end of its board."""
