"""Run: the story of one run from top to bottom, a module for each of its rows."""

from grafana.boards.run.activations import ACTIVATIONS
from grafana.boards.run.glance import HEALTH
from grafana.boards.run.gradients import GRADIENTS
from grafana.boards.run.loss import LOSS
from grafana.boards.run.optimizer import OPTIMIZER
from grafana.boards.run.pace import PACE
from grafana.boards.run.reinforcement import REINFORCEMENT
from grafana.boards.run.tensors import TENSORS
from grafana.boards.run.trouble import TROUBLE
from grafana.panel import Board

RUN = Board(
    uid="mp-agent-run",
    title="mp_agent / Run",
    description="State of one run: is it healthy, what is wrong, and since when.",
    one_run=True,
    rows=(HEALTH, TROUBLE, LOSS, GRADIENTS, OPTIMIZER, PACE, ACTIVATIONS, REINFORCEMENT, TENSORS),
)
