"""Gradient clipping: gradients are measured before it; its limit and norm are recorded."""

import torch

from mp_agent.probe.optimizers.watched import Role, WatchedOptimizer
from mp_agent.probe.scalars import snapshot_of
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.measuring import GradientMeasuring


class ClippingTracking:
    """Follows torch's clipping functions."""

    def __init__(self, context: TrackerContext, measuring: GradientMeasuring) -> None:
        self._context = context
        self._measuring = measuring

    def begins(self, parameters: list[torch.Tensor]) -> None:
        """Measure the gradients before they are clipped; they may still be scaled."""
        context = self._context
        holding = context.registry.holding(parameters)
        clipped = [watched for watched in holding if not watched.managed]
        for watched in clipped:
            self._measuring.measure(watched, "clip", context.inverse_scale(watched))
        context.thread.clipped = [
            watched
            for watched in clipped
            if watched.label not in context.boundaries.of(watched).settled
        ]

    def norm_known(self, max_norm: object, total_norm: object) -> None:
        """Record the limit and the norm of the clipping under way."""
        limit, norm = snapshot_of(max_norm), snapshot_of(total_norm)
        if limit is None or norm is None:
            return
        clipped: list[WatchedOptimizer] = self._context.thread.clipped
        of_run = [watched for watched in clipped if watched.role is not Role.SEPARATE]
        if of_run:
            step = self._context.boundaries.of(of_run[0])
            step.add_clipping({watched.label for watched in of_run}, limit, norm)
        else:
            for watched in clipped:
                watched.scalars.update(clip_max_norm=limit, clip_norm=norm)

    def compiled(self) -> None:
        """Measure after every backward from now on, since compiled clipping calls no hook."""
        context = self._context
        context.clipping_is_compiled = True
        context.note_unsupported("limit and coefficient of clipping, which is compiled")
        context.traits.measuring_point = "backward"
