"""What is decided once for many calls of a loss: by its class and options (``LossPlan``), and by the signature of a call (``CallPlan``).

A plan holds rules, not outcomes. Counts of rows, and the dtypes of other ranks' rows, are known only after the ranks have met.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.autograd_graph import FullPrecisionPlan
from lightning_ddp_losses.core.compat import TORCH_LOSS_TYPES
from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.core.signature import Plans
from lightning_ddp_losses.distributed.gathered_batch import BatchLayout
from lightning_ddp_losses.distributed.messages import Agreement
from lightning_ddp_losses.losses import pml_registry
from lightning_ddp_losses.losses.gathered_call import ArgumentRules
from lightning_ddp_losses.losses.pml_registry import LossFacts, Mode, facts_of, is_pml_loss, labelled_loss
from lightning_ddp_losses.losses.products import ProductForm
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
        inner_facts: Facts of the class of the loss that compares rows by labels: the one inside a loss of two views.
        arguments: What its arguments may be.
        takes_views: True if it takes two views without labels, which the loss inside it compares.
        stacks_views: True if both views are compared as one batch.
        tiles: Evaluation in tiles. None: it has none.
        num_classes: Number of classes that labels are checked against. None: they are not.
        splits_pairs: True if the pairs that a miner names may be divided among the ranks.
        draws: True if it may draw random numbers.
        records: True if its reducers record numbers of elements, which are then sent through the hosts.
        is_torchs: True if it is one of torch's own, whose buffers are options: class weights.
        configuration: Its options, which ranks compare.
        unread: Paths of its attributes that cannot be read. Ranks compare them only by the value of the loss, in ``replicated``.
    """

    modes: tuple[Mode, ...]
    is_pml: bool
    facts: LossFacts
    inner_facts: LossFacts
    arguments: ArgumentRules
    takes_views: bool
    stacks_views: bool
    tiles: TiledPlan | None
    num_classes: int | None
    splits_pairs: bool
    draws: bool
    records: bool
    is_torchs: bool
    configuration: str = field(compare=False)
    unread: tuple[str, ...] = field(compare=False)

    @classmethod
    def of(cls, loss: nn.Module, backward: str, configuration: str, unread: tuple[str, ...]) -> LossPlan:
        """Make the plan of a loss as it is configured now."""
        labelled, facts, is_pml = labelled_loss(loss), facts_of(loss), is_pml_loss(loss)
        return cls(
            modes=exact_modes(loss, backward),
            is_pml=is_pml,
            facts=facts,
            inner_facts=facts_of(labelled),
            arguments=ArgumentRules.of(loss, facts.arguments),
            takes_views=labelled is not loss,
            stacks_views=pml_registry.stacks_views(loss),
            tiles=tiled_plan(labelled) if is_pml else None,
            num_classes=inputs.classes_of(loss),
            # per anchor, PML counts a pair that a miner names twice once
            splits_pairs=is_pml and not pml_registry.has_per_anchor(getattr(labelled, "reducer", None)),
            draws=pml_registry.may_draw(labelled),
            records=pml_registry.collects_counts(labelled),
            is_torchs=isinstance(loss, TORCH_LOSS_TYPES),
            configuration=configuration,
            unread=unread,
        )

    def __str__(self) -> str:
        evaluation = self.modes[0]
        sent = {"elements": "sums and divisors", "moments": "sums of D x D products"}.get(evaluation, "all rows")
        lines = [f"evaluation: {evaluation}, cheapest of the exact ones ({', '.join(self.modes)})"]
        if evaluation == "rows" and not self.is_pml:
            sent = "sums over rows, and the rows that an operator needs of all ranks"
            lines.append("    operator by operator, as global_rows")
        elif evaluation == "rows":
            tiles = "by pytorch-metric-learning's formula, some anchors at a time"
            if self.tiles is not None:
                tiles = f"in tiles{' of a symmetric matrix' if self.tiles.symmetric else ''}"
            lines.append(f"    {tiles}; up to {self.inner_facts.few_rows} rows over all ranks: replicated")
        lines += [f"sent: {sent}", f"compared: {self.configuration}"]
        if self.unread:
            lines.append(f"not read: {', '.join(sorted(self.unread))}")
        return "\n".join(lines)


@dataclass
class CallPlan:
    """Rules for the calls of one loss with one signature.

    Attributes:
        mode: The evaluation, if there are enough rows for it.
        names: Names of the arguments of a loss of pytorch-metric-learning, in order.
        precision: How the loss computes in full precision.
        narrow_dtype: bfloat16 or float16 if all rows have it. They travel in it.
        products: Form of the products of rows.
        num_classes: Number of classes that labels are checked against. None: they are not.
        has_label_rows: True if labels have several columns. Whether they are one-hot rows depends on their values.
        layout: Layout of the rows that are gathered. None: no call has gathered yet.
        sums: What must match where sums are exchanged. None: no call has exchanged them yet.
    """

    mode: Mode
    names: tuple[str, ...]
    precision: FullPrecisionPlan
    narrow_dtype: torch.dtype | None
    products: ProductForm
    num_classes: int | None
    has_label_rows: bool
    layout: BatchLayout | None = None
    sums: Agreement | None = None


@dataclass
class MinerPlan:
    """Rules for the calls of one miner with one signature.

    Attributes:
        arguments: What its arguments may be.
        names: Names of the arguments, in order.
        facts: Facts of its class.
        precision: How the miner computes in full precision.
        narrow_dtype: bfloat16 or float16 if all rows have it. They travel in it.
        has_label_rows: True if labels have several columns.
        layout: Layout of the rows that are gathered. None: no call has gathered yet.
    """

    arguments: ArgumentRules
    names: tuple[str, ...]
    facts: LossFacts
    precision: FullPrecisionPlan
    narrow_dtype: torch.dtype | None
    has_label_rows: bool
    layout: BatchLayout | None = None


class LossPlans:
    """The plans of a loss: one for all of its calls, and one for each signature of a call.

    They are made anew when something that they follow from has changed. A copy or a pickle has none.
    """

    def __init__(self) -> None:
        self.configuration = Configuration()
        self.of_calls: Plans[CallPlan] = Plans()
        self._plan: LossPlan | None = None
        self._source: tuple[Any, ...] = ()

    def current(self, loss: nn.Module, backward: str, *others: object) -> LossPlan:
        """Return the plan of the next call. It is the same object as long as nothing has changed.

        Args:
            loss: The loss.
            backward: Option ``backward`` of ``GlobalBatchLoss``.
            others: Further values that plans of calls follow from.
        """
        configuration = self.configuration.read(loss)
        source = (self.configuration.changes, pml_registry.registrations(), backward, others)
        if self._plan is None or source != self._source:
            plan = LossPlan.of(loss, backward, configuration, self.configuration.unread)
            # an option that no rule follows from leaves the plans of calls
            if plan != self._plan or source[1:] != self._source[1:]:
                self.of_calls.clear()
            self._plan, self._source = plan, source
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        return {"configuration": self.configuration, "of_calls": Plans(), "_plan": None, "_source": ()}
