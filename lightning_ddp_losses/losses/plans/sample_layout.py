"""The layout of samples in a loss's arguments: the dimension of the samples, and the number of views if rows are consecutive views.

The rows of all ranks are gathered rank by rank. A loss that pairs rows by index (row ``i`` with row ``B + i``, as after
``torch.cat([view1, view2])``) would then pair the wrong rows, because the views of each rank are consecutive instead of the views of the
global batch. Such rows are therefore gathered as (B, views, ...), each sample with its views, and then rearranged as views times batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.losses.pml_registry import is_pml_loss, name_in_lightly

Argument: TypeAlias = int | str
"""An argument of a call, by position or name."""

_LABELS = (1, "labels", "label", "targets", "target", "y")
"""Arguments that may be labels, one for each sample."""


class SampleLayout(NamedTuple):
    """The layout of each argument.

    Attributes:
        batch_dims: Dimension of the samples (default 0). None marks an argument that is not a batch.
        views: Number of views of each sample, where rows are consecutive views (default 1).
        first_views: Number of views of the first argument of a call. If None, ``views`` applies to it.
        counting: Arguments of any kind that have one row per sample. For other losses, labels serve this purpose.
    """

    batch_dims: Mapping[Argument, int | None] = {}
    views: Mapping[Argument, int] = {}
    first_views: int | None = None
    counting: tuple[Argument, ...] = ()

    @classmethod
    def of(
        cls,
        loss: nn.Module,
        batch_dims: Mapping[Argument, int | None] | None,
        views: int | Mapping[Argument, int] | None,
        title: str,
    ) -> SampleLayout:
        """Return the layout that the user specifies, combined with the known layout of lightly's losses.

        Args:
            loss: The loss.
            batch_dims: As the attribute.
            views: As the attribute. A number applies to the first argument.
            title: Name of the loss in errors.

        Raises:
            ConfigurationError: for numbers of views below 1, and for losses of pytorch-metric-learning, which find pairs by labels.
        """
        known = _of_lightly(loss)
        by_argument: Mapping[Argument, int] = views if isinstance(views, Mapping) else {}
        of_first = known.first_views if views is None or isinstance(views, Mapping) else views
        for name, number in [("first", of_first), *by_argument.items()]:
            is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 1
            what = f"{title}: views of argument {name}"
            expect(is_number or number is None, what, expected="1 or more", got=repr(number))
        if views is not None and is_pml_loss(loss):
            raise ConfigurationError(
                f"{title}: views",
                expected="none for a loss of pytorch-metric-learning, which compares rows by their labels",
                got=repr(views),
                fix="Give each row its label: labels.repeat(2) for two views. SelfSupervisedLoss takes the views one by one.",
            )
        return known._replace(
            batch_dims={**known.batch_dims, **(batch_dims or {})},
            views=dict(by_argument),
            first_views=of_first,
        )

    def of_call(self, values: Mapping[Argument, Any], title: str) -> SampleLayout:
        """Return the layout of a call's arguments, with the number of views of each argument.

        Args:
            values: Arguments by position and name, in order.
            title: Name of the loss in errors.

        Raises:
            InputError: if an argument with views is missing in the call.
        """
        views = dict(self.views)
        for name in views:
            what, names = f"{title}: views of argument {name}", ", ".join(map(str, values))
            fix = "Name it as the call does, by its position or its keyword."
            expect(name in values, what, expected=f"one of the call: {names}", got=name, fix=fix, error=InputError)
        if self.first_views is not None and values:
            views.setdefault(next(iter(values)), self.first_views)
        return self._replace(views=views, first_views=None)

    def has_views(self) -> bool:
        """Return whether an argument has several views."""
        return any(number > 1 for number in (self.first_views or 1, *self.views.values()))

    def refuse_views(self, title: str) -> None:
        """Reject views in a call whose rows stay on their rank, because the global rows are then ordered rank by rank.

        Raises:
            ConfigurationError: if an argument has several views.
        """
        several = {name: number for name, number in self.views.items() if number > 1}
        expect(
            not several,
            f"{title}: views in mode='rows'",
            expected="one view an argument",
            got=several,
            fix="Use mode='auto', which gathers the views, or hand in each view as an argument.",
        )

    def samples_first(self, name: Argument, tensor: Tensor, title: str) -> Tensor:
        """Return a tensor with its samples along dim 0, and their views along dim 1 if there are several.

        Raises:
            InputError: if the number of rows is not divisible by the number of views.
        """
        batch = tensor.movedim(self.batch_dims.get(name) or 0, 0)
        views = self.views.get(name, 1)
        if views == 1:
            return batch
        rows = batch.shape[0]
        what, expected = f"{title}: rows of argument {name}", f"a multiple of its {views} views"
        expect(
            rows % views == 0,
            what,
            expected=expected,
            got=rows,
            error=InputError,
            fix="Concatenate all views of every row: torch.cat(views), or correct `views=`.",
        )
        return batch.reshape(views, rows // views, *batch.shape[1:]).movedim(1, 0)

    def as_given(self, name: Argument, samples: Tensor) -> Tensor:
        """Convert a result of ``samples_first`` back to the layout of the argument."""
        rows = samples
        if self.views.get(name, 1) > 1:
            rows = samples.movedim(0, 1).flatten(0, 1)
        return rows.movedim(0, self.batch_dims.get(name) or 0)

    def refuse_unnamed_views(self, values: Mapping[Argument, Any], counts: Mapping[str, list[int]], title: str) -> None:
        """Reject rows of the first argument that appear to be undeclared views, judged by the number of labels.

        Args:
            values: Arguments of the call on this rank.
            counts: Rows of each rank, by argument.
            title: Name of the loss in errors.

        Raises:
            InputError: on every rank, since all ranks have the same counts.
        """
        first, *others = values
        if self._is_given(first) or str(first) not in counts or len(counts[str(first)]) == 1:
            return
        for name in others:
            has_samples = name in self.counting or (name in _LABELS and _are_labels(values[name]))
            if not has_samples or self._is_given(name) or str(name) not in counts:
                continue
            rows, samples = counts[str(first)], counts[str(name)]
            number = _common_multiple(rows, samples)
            if number is None:
                continue
            raise InputError(
                f"{title}: rows of argument {first}",
                expected=f"one for each row of argument {name}",
                ranks=[f"{of_rank} rows for {labels}" for of_rank, labels in zip(rows, samples, strict=True)],
                fix=f"If they are {number} views of the batch one after another (torch.cat([view1, view2])), give views={number}. "
                f"If the rows of each sample follow one another, give batch_dims={{{first!r}: 0}}.",
                collective=True,
            )

    def _is_given(self, argument: Argument) -> bool:
        return argument in self.batch_dims or argument in self.views


def _are_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point() and not value.is_complex()


def _common_multiple(rows: list[int], samples: list[int]) -> int | None:
    """Return the number of rows per sample, if it is the same integer above 1 on all ranks with rows or samples."""
    found = set()
    for of_rank, labels in zip(rows, samples, strict=True):
        if of_rank or labels:
            found.add(divmod(of_rank, labels) if labels else (0, 1))
    number, rest = found.pop() if len(found) == 1 else (0, 0)
    return number if number > 1 and rest == 0 else None


def _of_lightly(loss: nn.Module) -> SampleLayout:
    """Return the layout that the classes of lightly (1.6) expect, which is empty for any other loss."""
    name = name_in_lightly(loss)
    if name in ("LeJEPALoss", "VISRegLoss"):  # (views, B, D)
        return SampleLayout({"local_proj": 1, "global_proj": 1})
    if name == "WMSELoss":  # (views * B, D)
        return SampleLayout(first_views=int(loss.num_samples))  # type: ignore[arg-type]
    if name in ("MSNLoss", "PMSNLoss", "PMSNCustomLoss"):  # (views * B, D), (B, D), and prototypes equal on all ranks
        return SampleLayout({2: None, "prototypes": None}, counting=(1, "targets"))
    return SampleLayout()
