"""What is remembered of each layer to judge its gradients."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class LayerHealthState:
    """One list per quantity, with an entry per layer. Plain data, stored in the ledger."""

    names: list[str] = field(default_factory=list)
    early_zero_shares: list[list[float]] = field(default_factory=list)
    """Of the first samples; once there are enough, only their median."""
    early_full: list[bool] = field(default_factory=list)
    underflowing: list[bool] = field(default_factory=list)
    dead_samples: list[int] = field(default_factory=list)
    """Consecutive samples in which the layer had a gradient, but next to none."""
    zero_samples: list[int] = field(default_factory=list)
    """Consecutive samples with a gradient of exactly 0, judged or not."""
    learns: list[bool] = field(default_factory=list)
    """Whether the layer ever had a nonzero gradient."""
    sparse: list[bool] = field(default_factory=list)
    """Whether the layer is not used on every step, as experts are."""
    early_abs_max: list[list[float]] = field(default_factory=list)
    """Largest magnitudes in the first samples with a gradient."""
    usual_norms: list[float] = field(default_factory=list)
    """Moving averages of the norms without exploded ones; 0 before the first."""
    exploding_samples: list[int] = field(default_factory=list)
    """Consecutive samples with a norm far above the usual one."""
    elements: list[float] = field(default_factory=list)
    flushed: list[bool] = field(default_factory=list)
    """Whether most of the gradient is below FP16's smallest number at the loss scale in force."""
    flush_known: list[bool] = field(default_factory=list)
    """Whether that was ever measured."""

    def add_layer(self, name: str, elements: float) -> None:
        """Append a layer without samples."""
        self.names.append(name)
        self.early_zero_shares.append([])
        self.early_full.append(False)
        self.underflowing.append(False)
        self.dead_samples.append(0)
        self.zero_samples.append(0)
        self.learns.append(False)
        self.sparse.append(False)
        self.early_abs_max.append([])
        self.usual_norms.append(0.0)
        self.exploding_samples.append(0)
        self.elements.append(elements)
        self.flushed.append(False)
        self.flush_known.append(False)

    def add_missing_columns(self) -> None:
        """Fill the columns that a ledger of an earlier version lacks."""
        layers = len(self.names)
        self.early_abs_max += [[] for _ in range(layers - len(self.early_abs_max))]
        for column in (self.usual_norms, self.elements):
            column += [0.0] * (layers - len(column))
        self.exploding_samples += [0] * (layers - len(self.exploding_samples))
        for flags in (self.flushed, self.flush_known):
            flags += [False] * (layers - len(flags))

    def begin_attempt(self) -> None:
        """Reset the consecutive samples; what is usual for a layer outlives a restart."""
        layers = len(self.names)
        self.dead_samples = [0] * layers
        self.zero_samples = [0] * layers
        self.underflowing = [False] * layers
        self.exploding_samples = [0] * layers
        self.flushed = [False] * layers

    def retire(self, index: int) -> None:
        """Drop the samples of a name that no longer stands for a layer."""
        self.dead_samples[index] = 0
        self.underflowing[index] = False
        self.early_zero_shares[index] = []
        self.early_full[index] = False
        self.early_abs_max[index] = []
        self.usual_norms[index] = 0.0
        self.exploding_samples[index] = 0
        self.flushed[index] = False
        self.flush_known[index] = False
