"""What the class and the options of a loss decide about all of its calls: once, and again when an option has changed.

A plan holds rules, not outcomes. Counts of rows, and the dtypes of other ranks' rows, are known only after the ranks have met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.losses import pml_registry
from lightning_ddp_losses.losses.gathered_call import ArgumentRules
from lightning_ddp_losses.losses.pml_registry import LossFacts, Mode, facts_of, is_pml_loss, labelled_loss
from lightning_ddp_losses.losses.tiled import TiledPlan, tiled_plan


def exact_modes(loss: nn.Module, backward: str) -> tuple[Mode, ...]:
    """Return the modes that are exact for a loss as it is configured now, cheapest first."""
    if backward == "sum":  # a share of the loss has no meaning of its own when ranks weigh it differently
        return ("replicated",)
    labelled = labelled_loss(loss)
    allowed = pml_registry.allowed_modes(labelled)
    if not is_pml_loss(loss):
        return allowed
    return tuple(mode for mode in allowed if mode == "replicated" or pml_registry.is_separable(labelled, mode))


@dataclass(frozen=True)
class LossPlan:
    """Rules for the calls of one loss. ``print`` shows them.

    Attributes:
        modes: The modes that are exact, cheapest first.
        is_pml: True if it is called as the losses of pytorch-metric-learning are.
        facts: Facts of its class.
        arguments: What its arguments may be.
        takes_views: True if it takes two views without labels, which the loss inside it compares.
        stacks_views: True if both views are compared as one batch.
        tiles: Evaluation in tiles. None: it has none.
        few_rows: With at most so many rows over all ranks every rank computes the full loss.
        splits_pairs: True if the pairs that a miner names may be divided among the ranks.
        draws: True if it may draw random numbers.
        writes_distances: True if it writes into its distances, which backward needs.
        configuration: Its options, which ranks compare.
    """

    modes: tuple[Mode, ...]
    is_pml: bool
    facts: LossFacts
    arguments: ArgumentRules
    takes_views: bool
    stacks_views: bool
    tiles: TiledPlan | None
    few_rows: int
    splits_pairs: bool
    draws: bool
    writes_distances: bool
    configuration: str

    @classmethod
    def of(cls, loss: nn.Module, backward: str, configuration: str) -> LossPlan:
        """Make the plan of a loss as it is configured now."""
        labelled, facts, is_pml = labelled_loss(loss), facts_of(loss), is_pml_loss(loss)
        return cls(
            modes=exact_modes(loss, backward),
            is_pml=is_pml,
            facts=facts,
            arguments=ArgumentRules.of(loss, facts.arguments),
            takes_views=labelled is not loss,
            stacks_views=pml_registry.stacks_views(loss),
            tiles=tiled_plan(labelled) if is_pml else None,
            few_rows=facts_of(labelled).few_rows,
            # per anchor, PML counts a pair that a miner names twice once
            splits_pairs=is_pml and not pml_registry.has_per_anchor(getattr(labelled, "reducer", None)),
            draws=pml_registry.may_draw(labelled),
            writes_distances=facts_of(labelled).writes_distances,
            configuration=configuration,
        )

    def __str__(self) -> str:
        evaluation = self.modes[0]
        sent = {"elements": "sums and divisors", "moments": "sums of D x D products"}.get(evaluation, "all rows")
        lines = [f"evaluation: {evaluation}, cheapest of the exact ones ({', '.join(self.modes)})"]
        if evaluation == "rows":
            tiles = "by pytorch-metric-learning's formula, some anchors at a time"
            if self.tiles is not None:
                tiles = f"in tiles{' of a symmetric matrix' if self.tiles.symmetric else ''}"
            lines.append(f"    {tiles}; up to {self.few_rows} rows over all ranks: replicated")
        return "\n".join([*lines, f"sent: {sent}", f"compared: {self.configuration}"])


class LossPlans:
    """The plan of a loss, made anew when something that it follows from has changed."""

    def __init__(self) -> None:
        self.configuration = Configuration()
        self._plan: LossPlan | None = None
        self._source: tuple[Any, ...] = ()

    def current(self, loss: nn.Module, backward: str) -> LossPlan:
        """Return the plan of the next call. It is the same object as long as nothing has changed."""
        configuration = self.configuration.read(loss)
        source = (self.configuration.walks, pml_registry.registrations(), backward)
        if self._plan is None or source != self._source:
            self._plan, self._source = LossPlan.of(loss, backward, configuration), source
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        return {"configuration": self.configuration, "_plan": None, "_source": ()}
