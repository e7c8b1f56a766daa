"""Reports the first fault, from consecutive readings of /metrics."""

from dataclasses import dataclass, field

from examples.demo.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that went wrong: what, at or before which step, and in which layer."""

    what: str
    step: int
    layer: str
    where: str = ""
    """What else is known of the place: rank, phase."""


@dataclass(slots=True)
class Story:
    """Collects troubles as readings come in; each kind counts once, when it is first seen."""

    troubles: dict[str, Trouble] = field(default_factory=dict)

    def add(self, reading: Reading) -> None:
        """Look at one more reading of the same run."""
        for trouble in (_explosion(reading), _nonfinite(reading), _floor(reading)):
            if trouble is not None:
                self.troubles.setdefault(trouble.what, trouble)

    @property
    def first(self) -> Trouble | None:
        """The trouble with the lowest step."""
        return min(self.troubles.values(), key=lambda trouble: trouble.step, default=None)


def _explosion(reading: Reading) -> Trouble | None:
    exceeded = reading.by("mp_agent_grad_norm_exceeded_steps_total", "bound")
    numbers = reading.by("mp_agent_grad_norm_bound", "bound")
    bounds = [numbers[bound] for bound, steps in exceeded.items() if steps > 0]
    if not bounds:
        return None
    layer = largest_gradient(reading)
    return Trouble(what=f"gradient norm above {min(bounds):g}", step=_step(reading), layer=layer)


def _nonfinite(reading: Reading) -> Trouble | None:
    for labels, _ in reading.all("mp_agent_first_nonfinite_info"):
        rank = f"rank {labels['rank']}" if labels["rank"] else "all ranks"
        return Trouble(
            what="loss NaN or Inf" if labels["phase"] == "forward" else "gradients NaN or Inf",
            step=int(labels["step"]),
            layer=labels["layer"] or largest_gradient(reading),
            where=f"{rank}, {labels['phase']}",
        )
    return None


def _floor(reading: Reading) -> Trouble | None:
    if reading.count("mp_agent_loss_scale_floor_skips_total") == 0:
        return None
    layer = largest_gradient(reading)
    return Trouble(what="loss scale at its floor", step=_step(reading), layer=layer)


def largest_gradient(reading: Reading) -> str:
    """Return the layer with the largest gradient norm on the last step that was finite."""
    norms = reading.by("mp_agent_layer_grad_norm", "layer")
    return max(norms, key=lambda layer: norms[layer], default="")


def _step(reading: Reading) -> int:
    return int(reading.value("mp_agent_step") or 0)
