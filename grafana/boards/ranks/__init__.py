"""Ranks: who lags, who is gone, who differs; the node agents, and the GPUs below."""

from grafana.boards.ranks.differences import DIFFERENCES
from grafana.boards.ranks.glance import GLANCE, NAMES
from grafana.boards.ranks.machines import AGENTS, GPUS
from grafana.boards.ranks.pace import PACE
from grafana.panel import Board

RANKS = Board(
    uid="mp-agent-ranks",
    title="mp_agent / Ranks",
    description="Ranks that lag, have ended, or differ from the others.",
    one_run=True,
    rows=(GLANCE, NAMES, PACE, DIFFERENCES, AGENTS, GPUS),
)
