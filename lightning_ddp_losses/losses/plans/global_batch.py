"""Rules that are determined once for many calls: by a loss's class and options (``LossPlan``), or by a call's signature (``CallPlan``).

A plan contains rules, not results. Numbers of rows, and the dtypes of other ranks' rows, are only available after the handshake.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.autograd_graph import FullPrecisionPlan
from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.core.signature import Plans
from lightning_ddp_losses.core.torch_compat import TORCH_LOSS_TYPES
from lightning_ddp_losses.distributed.gathered_batch import BatchLayout
from lightning_ddp_losses.distributed.messages import Agreement
from lightning_ddp_losses.losses import pml_registry
from lightning_ddp_losses.losses.gathered_call import ArgumentRules
from lightning_ddp_losses.losses.pml_registry import LossFacts, Mode, facts_of, is_pml_loss, labelled_loss
from lightning_ddp_losses.losses.products.forms import ProductForm
from lightning_ddp_losses.losses.tiled import TiledPlan, tiled_plan


def exact_modes(loss: nn.Module, backward: str) -> tuple[Mode, ...]:
    """Return the modes that are exact for a loss in its current configuration, cheapest first."""
    if backward == "sum":  # if ranks use different factors, splitting the loss into shares is not exact
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
        is_pml: True if it is called like the losses of pytorch-metric-learning.
        facts: Facts of its class.
        inner_facts: Facts of the class of the loss that compares rows by labels, which for a loss of two views is the wrapped loss.
        arguments: Rules for its arguments.
        takes_views: True if it takes two views without labels, which its wrapped loss compares.
        stacks_views: True if both views are compared as one batch.
        tiles: Evaluation in tiles. None if it cannot be evaluated in tiles.
        num_classes: Number of classes against which labels are checked. If None, they are not checked.
        splits_pairs: True if the pairs that a miner selects may be divided among the ranks.
        draws: True if it may draw random numbers.
        records: True if its reducers record numbers of elements, which are then sent through the hosts.
        is_torchs: True if it is a loss of torch, whose buffers (class weights) are options.
        configuration: Its options, which ranks compare.
        unread: Paths of its attributes that cannot be read. Ranks compare them only through the value of the loss, in ``replicated``.
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
        """Return the plan of a loss in its current configuration."""
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
            # when averaging per anchor, PML counts a pair once even if a miner selects it twice
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
        mode: The evaluation to use if there are enough rows.
        names: Names of the arguments of a loss of pytorch-metric-learning, in order.
        precision: How the loss computes in full precision.
        narrow_dtype: bfloat16 or float16 if all rows have this dtype. They are then sent in it.
        products: Form of the products of rows.
        num_classes: Number of classes against which labels are checked. If None, they are not checked.
        has_label_rows: True if labels are 2-dim, in which case their values determine whether they are one-hot rows.
        layout: Layout of the gathered rows. None until a call has gathered.
        sums: Values that must match when sums are exchanged. None until a call has exchanged sums.
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
        arguments: Rules for its arguments.
        names: Names of the arguments, in order.
        facts: Facts of its class.
        precision: How the miner computes in full precision.
        narrow_dtype: bfloat16 or float16 if all rows have this dtype. They are then sent in it.
        has_label_rows: True if labels are 2-dim.
        layout: Layout of the gathered rows. None until a call has gathered.
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

    They are created again when something that they depend on has changed. Copies and pickles do not contain plans.
    """

    def __init__(self) -> None:
        self.configuration = Configuration()
        self.of_calls: Plans[CallPlan] = Plans()
        self._plan: LossPlan | None = None
        self._source: tuple[Any, ...] = ()

    def current(self, loss: nn.Module, backward: str, *others: object) -> LossPlan:
        """Return the plan of the next call, which is the same object until something changes.

        Args:
            loss: The loss.
            backward: Option ``backward`` of ``GlobalBatchLoss``.
            others: Further values on which plans of calls depend.
        """
        configuration = self.configuration.read(loss)
        source = (self.configuration.changes, pml_registry.registrations(), backward, others)
        if self._plan is None or source != self._source:
            plan = LossPlan.of(loss, backward, configuration, self.configuration.unread)
            # plans of calls remain valid if the changed option does not affect any rule
            if plan != self._plan or source[1:] != self._source[1:]:
                self.of_calls.clear()
            self._plan, self._source = plan, source
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        return {"configuration": self.configuration, "of_calls": Plans(), "_plan": None, "_source": ()}
