"""The arguments of one call as this rank gives them: by name, of PML's shapes; two views of each sample as rows with identities.

pytorch-metric-learning's (PML) ``SelfSupervisedLoss`` is no formula of its own: row i of one view has the identity of row i of the other,
and the loss inside it compares rows by these labels. PML numbers the rows of one process, so each rank would count from 0 again. Here the
rows of both views are one batch per rank, and the identities are counted over all ranks. Then every evaluation of labelled rows evaluates
two views.

* symmetric: the loss inside gets both views as rows of one batch (SimCLR's objective with ``NTXentLoss``).
* one way (``symmetric=False``): the rows of one view are anchors, those of the other references.

Legend: ``B`` samples on this rank, ``G`` over all ranks, ``D`` embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pytorch_metric_learning.losses import SelfSupervisedLoss, VICRegLoss
from torch import Tensor, nn

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.pml_registry import is_of_pml, takes_class_labels

_SHAPES = (("embeddings", "(n, D)", 2), ("labels", "(n,)", 1), ("ref_emb", "(n, D)", 2), ("ref_labels", "(n,)", 1))

TWO_VIEWS = ("embeddings", "ref_emb")
"""How ``SelfSupervisedLoss`` calls its views."""


def by_name(
    title: str, inner: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name, without those that are None.

    Args:
        title: How the message names what is called.
        inner: The loss or miner.
        names: Of the positional ones.
        args: By position.
        kwargs: By name.

    Raises:
        InputError: for more positional arguments than names, for one that is given twice, for labels that are no classes, and for
            embeddings that are not (n, D).
    """
    twice = [name for name in names[: len(args)] if name in kwargs]
    if len(args) > len(names) or twice:
        got = f"{len(args)} positional ones"
        if twice:
            got = f"{', '.join(twice)} twice"
        fix = None
        if len(args) > len(names) and tuple(names) == TWO_VIEWS:
            fix = (
                "It compares two views. For more, hand in torch.cat(views) with labels that are unique over all ranks."
            )
        raise InputError(f"{title}: arguments", expected=f"{', '.join(names)}, each once", got=got, fix=fix)
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if value is not None}
    if takes_class_labels(inner):
        _refuse_float_labels(title, inner, given)
    if is_of_pml(inner):
        _refuse_odd_shapes(title, given)
    return given


def _refuse_float_labels(title: str, inner: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse labels that are no classes: a second view in their place, or numbers that a lower precision would make equal."""
    for name in ("labels", "ref_labels"):
        labels = given.get(name)
        if not isinstance(labels, Tensor) or not (labels.is_floating_point() or labels.is_complex()):
            continue
        fix = "Pass class indices: labels.long()."
        if labels.ndim > 1:
            fix = fix_for_views(inner)
        raise InputError(
            f"{title}: {name}",
            expected="an integer per row (torch.int64)",
            got=f"a floating dtype of shape {tuple(labels.shape)}",
            fix=fix,
        )


def _refuse_odd_shapes(title: str, given: Mapping[str, Any]) -> None:
    """Refuse embeddings and labels of other shapes than PML's."""
    for name, shape, dimensions in _SHAPES:
        value = given.get(name)
        if value is None or (isinstance(value, Tensor) and value.ndim == dimensions):
            continue
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{title}: {name}", expected=f"a tensor of shape {shape}", got=got)


# ---------------------------------------------------------------------- two views without labels


def labelled_loss(loss: nn.Module) -> Any:
    """Return the loss that compares rows by their labels: the one in a ``SelfSupervisedLoss``, which only makes labels; else the loss.

    A subclass may make something else of its views, and is a loss of its own.
    """
    if type(loss) is SelfSupervisedLoss:
        return loss.loss
    return loss


def stacks_views(loss: nn.Module) -> bool:
    """Say whether a loss compares the rows of both views as one batch."""
    return type(loss) is SelfSupervisedLoss and bool(loss.symmetric)


def compares_one_way(loss: nn.Module) -> bool:
    """Say whether a loss compares the rows of one view with those of the other only."""
    return type(loss) is SelfSupervisedLoss and not loss.symmetric


def labelled_arguments(loss: nn.Module, title: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as ``labelled_loss(loss)`` takes them; ``PMLCall`` adds the labels.

    Args:
        loss: The loss that was called.
        title: How messages name it.
        given: Its arguments by name.

    Returns:
        Both views as (2 B, D) ``embeddings`` where ``stacks_views``; else the arguments as they are.

    Raises:
        InputError: for a view that is missing, no tensor, or of another shape than the other.
    """
    if type(loss) is not SelfSupervisedLoss:
        return given
    _refuse_views(title, given)
    if not loss.symmetric:
        return given
    return {"embeddings": torch.cat([given[name] for name in TWO_VIEWS])}


def identities_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return labels of the rows of all ranks, each rank's first view before its second.

    Args:
        counts: Rows of each rank, both views together.
        device: Where they shall be.

    Returns:
        (2 G,) int64; a sample's number over all ranks, for both of its rows.
    """
    samples = torch.arange(sum(counts) // 2, device=device)
    parts = torch.split(samples, [rows // 2 for rows in counts])
    return torch.cat([part.repeat(2) for part in parts])


def by_view(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of one process, the first view of all ranks before the second, from rows in the order of ``identities_of``."""
    sizes: list[int] = []
    for both in counts:
        sizes += [both // 2, both // 2]
    parts = torch.split(rows, sizes)
    return torch.cat([*parts[0::2], *parts[1::2]])


def fix_for_views(loss: nn.Module) -> str:
    """Say how two views are given to a loss that was called with the second in the place of labels."""
    name = type(loss).__name__
    if name in SelfSupervisedLoss.supported_losses():
        return f"Two views without labels: GlobalBatchLoss(SelfSupervisedLoss({name}(...)))(view1, view2)."
    if isinstance(loss, VICRegLoss):
        return "Pass the second view as ref_emb."
    return "Pass class indices, one per row."


def _refuse_views(title: str, given: Mapping[str, Any]) -> None:
    shapes = []
    for name, value in given.items():
        form = type(value).__name__
        if isinstance(value, Tensor):
            form = str(tuple(value.shape))
        shapes.append(f"{name} {form}")
    views = [given.get(name) for name in TWO_VIEWS]
    are_tensors = set(given) == set(TWO_VIEWS) and all(isinstance(view, Tensor) and view.ndim == 2 for view in views)
    if are_tensors and views[0].shape == views[1].shape:  # type: ignore[union-attr]
        return
    raise InputError(
        f"{title}: views",
        expected="embeddings and ref_emb, (n, D) each: row i of one belongs to row i of the other",
        got=", ".join(shapes),
    )
