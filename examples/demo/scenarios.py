"""What goes wrong in the demo: mistakes that people make, none of them a faked metric."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One training job: its mistake in words, and the settings that make it."""

    name: str
    title: str
    mistake: str
    learning_rate: float = 0.02
    normalised_inputs: bool = True
    normalised_branches: bool = True
    steps: int = 140


SCENARIOS = (
    Scenario(
        name="residual",
        title="Residual branches without normalisation",
        mistake="the LayerNorm before attention and feed-forward was left out",
        normalised_branches=False,
        steps=170,
    ),
    Scenario(
        name="learning-rate",
        title="A learning rate far too high",
        mistake="the warm-up leads to 2.0 instead of 0.02",
        learning_rate=2.0,
        steps=80,
    ),
    Scenario(
        name="inputs",
        title="Un-normalised inputs",
        mistake="each character's offset in the text enters the model as it is; FP16 ends at 65504",
        normalised_inputs=False,
        steps=110,
    ),
)

HEALTHY = Scenario(name="healthy", title="A healthy job", mistake="none", steps=80)

BY_NAME: Mapping[str, Scenario] = {scenario.name: scenario for scenario in (*SCENARIOS, HEALTHY)}
