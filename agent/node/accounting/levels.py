"""Finds levels that change early in a run, before its long windows hold anything to compare.

A loss that falls back to where it began and stays there, and a usual gradient norm that grows many
times over while the learning rate does not. Both are judged by blocks of a few steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mp_agent.node.accounting.gradients import judged_norms
from mp_agent.node.accounting.tracker import AccountContext, ModelTracker
from mp_agent.node.accounting.windows import MAIN, median
from mp_agent.records.health import NormGrowth
from mp_agent.records.merged import MergedStep

_BLOCK_STEPS = 8
_LOST_BLOCKS = 4
"""Blocks in a row at the initial level."""
_JUMP_BLOCKS = 3
"""Blocks at most between the learned level and the initial one: what rises slowly may do so by
design, as in adversarial training."""
_SETTLED_BLOCKS = 3
"""Blocks at the learned level before that."""
_INITIAL_SHARE = 0.9
_LEARNED_SHARE = 0.25
"""Shares of the way from the best level to the initial one: from the one on the loss is back, up to
the other it is at the level learned."""


@dataclass(slots=True, kw_only=True)
class RelapseTracker(ModelTracker):
    """Follows the loss in blocks. Bounded plain data, stored in the ledger."""

    block: list[float] = field(default_factory=list)
    initial: float | None = None
    """Median of the first block."""
    best: float | None = None
    """The lowest median of any."""
    learned_blocks: int = 0
    """Blocks so far at the learned level."""
    blocks_since: int = 0
    """Blocks since the last one at that level."""
    jumped: bool = False
    """Whether the loss came back to the initial level quickly."""
    back_blocks: int = 0
    """Blocks in a row at the initial level."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step; none of a loss that may rise by design, or after a restart."""
        losses, loss = context.progress.losses, step.get("loss")
        if loss is None or step.skipped or step.flag("loss_nonfinite"):
            return
        by_design = losses.reference.other_models or losses.multiplies
        if by_design or context.progress.misreadings.scaled or losses.explained:
            self.block, self.back_blocks = [], 0
            return
        self.block = [*self.block, loss]
        if len(self.block) == _BLOCK_STEPS:
            self._fold_block(self.block, context.thresholds["loss_growth"])
            self.block = []

    @property
    def steps(self) -> int:
        """Steps for which the loss has been back at its initial level, once that is sure."""
        sure = self.jumped and self.back_blocks >= _LOST_BLOCKS
        return self.back_blocks * _BLOCK_STEPS if sure else 0

    def _fold_block(self, block: Sequence[float], growth: float) -> None:
        level = median(block)
        if self.initial is None or self.best is None:
            self.initial = self.best = level
            return
        way = self.initial - self.best
        learned = self.best > 0.0 and self.initial >= growth * self.best
        if learned and min(block) >= self.best + _INITIAL_SHARE * way:
            if not self.back_blocks:
                settled = self.learned_blocks >= _SETTLED_BLOCKS
                self.jumped = settled and self.blocks_since < _JUMP_BLOCKS
            self.back_blocks += 1
            return
        self.back_blocks = 0
        self.best = min(self.best, level)
        near = level <= self.best + _LEARNED_SHARE * (self.initial - self.best)
        self.learned_blocks += near
        self.blocks_since = 0 if near else self.blocks_since + 1


_NORM_BLOCK_STEPS = 16
_LEVEL_BLOCKS = 4
"""Blocks whose median is a level: that of two could be low by chance."""
_ABOVE_INITIAL = 3.0
"""Factor above the first level from which a norm has not only come back from a low one."""
_RATE_GROWTH = 2.0
"""Growth of the learning rate that may explain any of the norm's."""


@dataclass(slots=True, kw_only=True)
class NormGrowthTracker(ModelTracker):
    """Follows the gradient norm of the run in blocks, those with explosions included."""

    block: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)
    """Medians of the last blocks."""
    initial: float | None = None
    lowest: float | None = None
    """The lowest level so far."""
    rate: float | None = None
    """The learning rate at that level."""
    unexploded_steps: int = 0
    """Steps since the last that counts as an explosion, which has an alert of its own."""
    growth: float = 0.0
    """The lower of the last two medians, divided by the lowest level; 0 where not comparable."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add the norm of a closed step; none that clipping made, or that grows by design."""
        progress = context.progress
        norm = dict(judged_norms(step)).get(MAIN, 0.0)
        explosion = progress.norms.exploded.get(MAIN, 0.0) > context.thresholds["grad_norm_high"]
        self.unexploded_steps = 0 if explosion else self.unexploded_steps + 1
        by_design = progress.losses.reference.other_models or progress.losses.multiplies
        if progress.misreadings.clipped or by_design:
            self.growth = 0.0
        elif norm > 0.0:
            self.block = [*self.block, norm]
            if len(self.block) == _NORM_BLOCK_STEPS:
                self._fold_block(median(self.block), step.get("learning_rate"))
                self.block = []

    def view(self) -> NormGrowth | None:
        """Return the growth; None before there is a level to compare with."""
        if self.lowest is None:
            return None
        usual = min(self.levels[-2:])
        return NormGrowth(growth=self.growth, lowest=self.lowest, usual=usual)

    def _fold_block(self, level: float, rate: float | None) -> None:
        self.levels = [*self.levels[1 - _LEVEL_BLOCKS :], level]
        if len(self.levels) < _LEVEL_BLOCKS:
            return
        settled = median(self.levels)
        if self.initial is None:
            self.initial = settled
        if self.lowest is None or settled < self.lowest:
            self.lowest, self.rate = settled, rate
        now = min(self.levels[-2:])
        comparable = rate is None or self.rate is None or rate <= _RATE_GROWTH * self.rate
        above = now >= _ABOVE_INITIAL * self.initial
        comparable &= self.unexploded_steps >= 2 * _NORM_BLOCK_STEPS
        self.growth = now / self.lowest if comparable and above else 0.0
