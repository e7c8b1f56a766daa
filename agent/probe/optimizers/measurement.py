"""Statistics of the gradients and weights of a plan, by the means of the device they lie on."""

from collections.abc import Sequence

import torch

from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.statistics import GradientStatistics, for_device


class Measurement:
    """Keeps the working memory of each device's statistics."""

    def __init__(self) -> None:
        self._statistics: dict[torch.device, GradientStatistics] = {}

    def layers(
        self, plan: MeasurementPlan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [L, C] of each layer, on the gradients' device."""
        return self._statistics_on(plan.device).layers(gradients, inverse_scale)

    def totals(
        self, plan: MeasurementPlan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [G, C] of each share, on the gradients' device."""
        return self._statistics_on(plan.device).totals(plan.by_share(gradients), inverse_scale)

    def alone(self, plan: MeasurementPlan, gradient: torch.Tensor) -> None:
        """Measure one gradient in both ways, for what that raises."""
        statistics = self._statistics_on(plan.device)
        statistics.layers([gradient], 1.0)
        statistics.totals([[gradient]], 1.0)

    def weight_digest(self, plans: Sequence[MeasurementPlan]) -> Scalar | None:
        """Return the digest of all local weights, left on their device."""
        weights = [weight for plan in plans for weight in plan.weights()]
        if not weights:
            return None
        return scalar_of(self._statistics_on(plans[0].device).digest(weights))

    def _statistics_on(self, device: torch.device) -> GradientStatistics:
        if device not in self._statistics:
            self._statistics[device] = for_device(device)
        return self._statistics[device]
