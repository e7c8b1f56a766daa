"""What happens to a training job, as a script describes it: one event after the other."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from mp_agent.records.steps import EndReason, Phase

LAYERS = ("embed.weight", "blocks.0.mlp.weight", "blocks.1.mlp.weight", "head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of all ranks. `scale` is None without a scaler, `clip` without clipping.

    of_rank: step columns that one rank has otherwise. norm_of_rank: norms of reduced gradients, on
    ranks where they differ although they should not. of_layer: gradient columns that one layer has
    otherwise. optimizer, distribution: columns of these families that every layer has otherwise,
    per element. of_output: columns of activations that outputs of modules have otherwise.
    attention_logit, logsumexp: the largest of attention, and that of the output logits.
    router_load, router_entropy: of the most loaded expert, and of a token's choice, 0 to 1.
    fp8_range_used: smallest and largest of a layer with delayed scaling.
    fp8_flushed: share of the input that the layer's cast rounds to zero, if it casts so.
    logprob_delta: by how much trainer and sampler differ in every token, if they are compared.
    policy_entropy: mean of -log p of these tokens by the trainer.
    of_tensor: columns that watched tensors have otherwise.
    step: the trainer's own count, if it gives one.
    """

    seconds: float = 4.0
    norm: float = 1.0
    loss: float | None = 2.0
    scale: float | None = None
    skipped: bool = False
    inf_elements: float = 0.0
    nan_elements: float = 0.0
    clip: float | None = None
    learning_rate: float = 3e-4
    step: int | None = None
    of_rank: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    norm_of_rank: Mapping[int, float] = field(default_factory=dict)
    of_layer: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    optimizer: Mapping[str, float] = field(default_factory=dict)
    distribution: Mapping[str, float] = field(default_factory=dict)
    of_output: Mapping[str, float] = field(default_factory=dict)
    attention_logit: float = 15.0
    logsumexp: float = 11.0
    router_load: float = 1.3
    router_entropy: float = 0.8
    fp8_range_used: tuple[float, float] = (0.4, 1.02)
    fp8_flushed: float | None = None
    logprob_delta: float = 0.02
    policy_entropy: float = 2.0
    of_tensor: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """All ranks stand in a phase for a while."""

    phase: Phase
    seconds: float
    of_rank: Mapping[int, Phase] = field(default_factory=dict)
    """Ranks that stand in another one."""


@dataclass(frozen=True, slots=True)
class End:
    """All ranks say that they ended, and are gone; the node agent lingers and goes too."""

    reason: EndReason


@dataclass(frozen=True, slots=True)
class Kill:
    """Ranks die without a word; the rest goes on."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relaunch:
    """The launcher starts all ranks again, after a while."""

    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Count:
    """The probes count something of their own, such as probe_errors."""

    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScriptCheck:
    """The main script, of this text, is checked."""

    source: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Scrapes fail for so long, while the training goes on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CutOff:
    """A node's agent can no longer reach the others, while its ranks train on."""

    node: int


@dataclass(frozen=True, slots=True)
class Vanish:
    """The nodes are gone, with ranks, node agents and their places among the targets.

    listed: discovery does not notice, and the scrapes of their targets fail.
    """

    nodes: tuple[int, ...] = (0,)
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """Says that from now on the job is broken, so that the time to the alert can be measured."""


Event = (
    Step
    | Pause
    | End
    | Kill
    | Relaunch
    | Count
    | ScriptCheck
    | Unreachable
    | CutOff
    | Vanish
    | Fault
)
Script = Callable[[Random], Iterator[Event]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run, and what people should hear of it.

    expected: alerts that must fire, by name, with the worst severity that fires. tolerated: alerts
    that say something true as well and may fire or not, with the worst severity that is true.
    minutes: how long the run is watched.
    """

    name: str
    what: str
    script: Script
    ranks: int = 1
    nodes: int = 1
    facts: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    tolerated: Mapping[str, str] = field(default_factory=dict)
    minutes: float = 50.0
    layers: tuple[str, ...] = LAYERS
    modules: tuple[str, ...] = ()
    """Those whose outputs are measured."""
    logprobs: bool = False
    """Whether log-probabilities of trainer and sampler are compared."""
    tensors: tuple[str, ...] = ()
    """Those that the script watches."""
    good_layers: tuple[str, ...] = ()
    """Those that the good runs of its baseline trained; none: it has no baseline."""

    @property
    def healthy(self) -> bool:
        """Whether it should wake no one."""
        return not self.expected
