"""Why N ranks differ from one process: one small rule for each fault, the most specific first.

A rule looks at a `Case` and answers with a `Diagnosis` or None. Rules are pure: what they need to know beyond the rows they
ask from counter-runs, which the case makes for them. A newcomer adds a function and its line in ``STAGES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_ddp_losses.audit.compare import Row
from lightning_ddp_losses.audit.context import Case, Diagnosis
from lightning_ddp_losses.audit.rules_desync import TORN

Rule = Callable[[Case], Diagnosis | None]


# ---------------------------------------------------------------------- data: also where every gradient is equal


def identical_batches(case: Case) -> Diagnosis | None:
    """F67, F71: every rank draws the same rows."""
    columns = list(zip(*([b["digest"] for b in page["batches"]] for page in case.source.facts), strict=False))
    if case.W == 1 or not columns or any(len(set(column)) > 1 for column in columns):
        return None
    return Diagnosis(
        "F67",
        "every rank has the same batches",
        f"All {len(columns)} batches are the same bits on all {case.W} ranks: {case.W} processes do the work of one.",
        "Let Lightning put its DistributedSampler in (use_distributed_sampler=True and a sampler, not a "
        "custom batch_sampler), use "
        "GlobalBatchSampler, or split an iterable dataset by rank in its __iter__.",
        confirmed="digests of the batches",
    )


def reshuffled_sampler(case: Case) -> Diagnosis | None:
    """F68: Lightning shuffles a sampler that meant its order."""
    text = case.source.facts[0]["reshuffled"]
    if not text:
        return None
    what, _, fix = text.partition("\n")
    return Diagnosis("F68", "a sampler's batches are shuffled apart", what + ".", fix, confirmed="the loader's sampler")


# ---------------------------------------------------------------------- factors


def precision(case: Case) -> Diagnosis | None:
    """Rounding: a difference of the size that the precision makes, gone in float64."""
    worst = case.comparison.worst()
    if case.torn or not case.wrong or worst > 4096 * case.unit or case.unit < 1e-15:
        return None
    if not case.counters.without("precision").equal:
        return None
    expected = max((row.tolerance for row in case.rows), default=0.0)
    return Diagnosis(
        "F78",
        "rounding of the precision",
        f"Gradients differ by up to {worst:.1e}; one operation in {case.facts['precision']} rounds by "
        f"{case.unit:.1e}, and the order "
        f"of summation differs between ranks and one process. (Tolerance used: {expected:.1e}.)",
        "Nothing is wrong. Leave tolerance at its estimate, or train in a wider precision where this matters.",
        confirmed="in float64 both runs are equal",
        severity="explanation",
    )


def metric_as_loss(case: Case) -> Diagnosis | None:
    """F27: torchmetrics detaches what it gathers, except the own slot."""
    metrics = case.facts["metric_losses"]
    if not metrics or not _is(case.factors.encoder, 1 / case.W):
        return None
    return Diagnosis(
        "F27",
        "a metric of torchmetrics as the loss",
        f"`{metrics[0]}` returns a value with gradient; all gradients are {_ratio(case.factors.encoder)} = "
        f"1/{case.W} of one process's: in its "
        "sync only this rank's part keeps its graph.",
        "Take a loss module instead of the metric, evaluated over the global batch (GlobalBatchLoss).",
    )


def factor_on_loss(case: Case) -> Diagnosis | None:
    """F24: the factor W that makes up for the own-slot gather hits the loss's own weights too."""
    if not (_is(case.factors.encoder, 1.0) and _is(case.factors.losses, float(case.W))):
        return None
    wrapper = _wrapper(case)
    loss = [row for row in case.rows if row.owner != "encoder"]
    return Diagnosis(
        "F24",
        "the loss's own weights get W times the gradient",
        f"The encoder's gradients are exact; {case.names(loss)} {'is' if len(loss) == 1 else 'are'} "
        f"{_ratio(case.factors.losses)} times one process's, W being {case.W}. "
        + (
            f"`{wrapper}` multiplies the loss by the number of ranks, "
            if wrapper
            else "The loss is multiplied by the number of ranks, "
        )
        + "which makes up for its gather on the encoder's side; the loss's weights see the whole batch on "
        "every rank and need no factor.",
        "Take GlobalBatchLoss(loss) instead of the wrapper, or divide the gradients of the loss's own "
        "weights by the number of ranks.",
        parameters=tuple(row.parameter for row in loss),
    )


def gather_without_autograd(case: Case) -> Diagnosis | None:
    """F20, F23: gradients pass through this rank's part of the gather only."""
    encoder, losses = case.factors.encoder, case.factors.losses
    if not _is(encoder, 1 / case.W) or not (losses is None or _is(losses, 1.0) or _is(losses, 1 / case.W)):
        return None
    return Diagnosis(
        "F20",
        "a gather or reduction without autograd",
        f"The encoder's gradients are {_ratio(encoder)} = 1/{case.W} of one process's, in the same direction"
        + (", and the loss's own are exact" if _is(losses, 1.0) else "")
        + ": the value is global, but the gradient flows through this rank's part only and DDP then divides "
        "by the number of ranks.",
        "Gather with collectives.all_gather_with_grad (torch.distributed's all_gather and all_reduce carry "
        "no gradient), or use GlobalBatchLoss.",
    )


def graph_cut(case: Case) -> Diagnosis | None:
    """F20: what is gathered has no graph at all, not even this rank's part."""
    encoder = [row for row in case.rows if row.owner == "encoder" and row.verdict == "missing"]
    if not encoder or not _on_no_rank(case, encoder):
        return None
    return Diagnosis(
        "F20",
        "a gather or reduction without autograd",
        f"{case.names(encoder)} {'has' if len(encoder) == 1 else 'have'} a gradient in one process and none on any rank: "
        "what the loss is computed from was gathered or reduced without its graph.",
        "Gather with collectives.all_gather_with_grad (torch.distributed's all_gather and all_reduce carry "
        "no gradient), or use GlobalBatchLoss.",
        parameters=tuple(row.parameter for row in encoder),
    )


def double_scaling(case: Case) -> Diagnosis | None:
    """F21, F22: a factor W where none is due."""
    encoder, losses = case.factors.encoder, case.factors.losses
    powers = [float(case.W) ** k for k in (1, 2)]
    if case.W == 1 or not any(_is(encoder, power) for power in powers):
        return None
    return Diagnosis(
        "F21",
        "scaled by the number of ranks once too often",
        f"The encoder's gradients are {_ratio(encoder)} times one process's, W being {case.W}"
        + (f"; the loss's own {_ratio(losses)}" if losses is not None else "")
        + ": a gather with gradient (or no gather at all) together with a factor W in the loss.",
        "Remove the multiplication by world_size; DDP's mean and a gather with gradient already give the "
        "global gradient.",
    )


def own_first(case: Case) -> Diagnosis | None:
    """F26: the loss depends on the order of rows, and each rank has its own rows first."""
    if case.draws or not case.wrong or case.torn or case.local or case.counters.backwards().equal:
        return None
    wrapper = _wrapper(case)
    losses = case.losses_at(case.step)
    return Diagnosis(
        "F26",
        "each rank concatenates its own rows first",
        "The loss depends on the order of the rows: one process with the ranks' batches joined the other "
        "way round has other "
        f"gradients too. The ranks' losses are {', '.join(_number(loss) for loss in losses)}"
        + (f"; `{wrapper}` puts this rank's rows before the others'." if wrapper else "."),
        "Gather in rank order on every rank: GlobalBatchLoss, or collectives.all_gather_with_grad.",
        confirmed="one process, ranks joined in reverse order",
    )


def not_finite(case: Case) -> Diagnosis | None:
    """F79: overflow or NaN on one side only."""
    odd = [row for row in case.rows if row.verdict == "not finite"]
    if not odd:
        return None
    return Diagnosis(
        "F79",
        "infinite or NaN gradients",
        f"{case.names(odd)} {'has' if len(odd) == 1 else 'have'} values that are not finite on rank "
        f"{odd[0].rank} or in one process, but not in both. "
        f"The ranks' losses are {', '.join(_number(loss) for loss in case.losses_at(case.step))}.",
        "Look for the first layer that overflows on that rank's batch; lower the learning rate or use bf16 "
        "instead of fp16.",
    )


def unknown(case: Case) -> Diagnosis:
    """No rule knows it: where the runs part."""
    return Diagnosis(
        "",
        "unknown",
        f"{len(case.wrong)} of {len(case.rows)} gradients differ at step {case.step} and no known pattern "
        f"fits. {case.counters.part()}",
        "Look at that layer: what in it sees more than one row, other ranks, or random numbers?",
    )


def _on_no_rank(case: Case, rows: Sequence[Row]) -> bool:
    """Whether no rank has a gradient of any of these parameters at the step that is looked at."""
    pages = [case.ranks.entries(rank, case.step, "gradient") for rank in range(case.W)]
    return not any(row.parameter in page and page[row.parameter].exists for page in pages for row in rows)


def _is(ratio: float | None, value: float) -> bool:
    return ratio is not None and math.isclose(ratio, value, rel_tol=0.05)


def _ratio(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _wrapper(case: Case) -> str:
    """The name of a module of pytorch-metric-learning's distributed wrappers; empty without one."""
    return next((n for n, kind in case.facts["modules"].items() if kind.endswith("DistributedLossWrapper")), "")


# ----------------------------------------------------------------------

_MEAN = "one process that averages the ranks' own losses has the ranks' gradients"


def batch_norm(case: Case) -> Diagnosis | None:
    """F59: each rank normalises by its own rows."""
    if not _local_norms(case) or case.torn or not case.counters.without("batch_norm").equal:
        return None
    return local_statistics(case, "with batch norm in evaluation mode both runs are equal")


def _local_norms(case: Case) -> list[str]:
    return [n for n, kind in case.facts["norms_wrapped"].items() if "Sync" not in kind]


def local_statistics(
    case: Case, confirmed: str = "with batch norm in evaluation mode fewer gradients differ"
) -> Diagnosis:
    """F59, alone or beside something else."""
    norms = _local_norms(case)
    return Diagnosis(
        "F59",
        "batch norm with each rank's own statistics",
        f"{', '.join(f'`{n}`' for n in norms[:3])}{' ...' if len(norms) > 3 else ''}: mean and variance are those of this rank's rows "
        f"({', '.join(map(str, case.rows_per_rank(case.step)))}), not of the batch.",
        "Trainer(sync_batchnorm=True), or a norm that looks at one row at a time (LayerNorm, GroupNorm).",
        confirmed=confirmed,
        parameters=tuple(row.parameter for row in case.wrong),
    )


def summed(case: Case) -> Diagnosis | None:
    """A loss that is a sum, divided by W through DDP's mean."""
    found = _exact_shares(case)
    if found is None or not all(abs(weight - 1) < 0.02 for weight in found):
        return None
    return Diagnosis(
        "F18",
        'a loss with reduction="sum"',
        f"All gradients are 1/{case.W} of one process's: the loss is the sum over samples, and DDP takes "
        f"the mean of the ranks' sums.",
        f'Use reduction="mean", or multiply the learning rate by the number of ranks ({case.W}) on purpose.',
        confirmed=f"{_MEAN}, and the sum of the ranks' gradients is one process's",
    )


def mean_of_means(case: Case) -> Diagnosis | None:
    """F30: ranks with fewer rows, or fewer valid targets, count as much as the others."""
    found = _exact_shares(case)
    rows = case.rows_per_rank(case.step)
    uneven = len(set(rows)) > 1
    if found is None:
        # later steps have no shares: equal while batches were even, different at the first uneven one
        if case.step == 1 or not uneven or not case.local or not case.counters.without("uneven").equal:
            return None
        evidence = (
            f"The first {case.step - 1} steps are equal; at step {case.step} the ranks have {_list(rows)} rows, "
            "and each rank's mean counts alike."
        )
    else:
        if abs(sum(found) - 1) > 0.02:
            return None
        by_rows = uneven and all(abs(w - n / sum(rows)) < 0.02 for w, n in zip(found, rows, strict=True))
        reason = f"rows ({_list(rows)})" if by_rows else "valid targets (ignored, masked or zero elements do not count)"
        evidence = (
            f"In one process the ranks' gradients count with weights {_list([f'{w:.3f}' for w in found])}, "
            f"in proportion to their {reason}; "
            f"under DDP each counts 1/{case.W}."
        )
    return Diagnosis(
        "F30",
        "a mean of means",
        evidence,
        "Divide each rank's sum by the number of valid elements of all ranks (GlobalBatchLoss does), or "
        "give all ranks equal batches (drop_last=True).",
        confirmed=_MEAN,
    )


def never_gathered(case: Case) -> Diagnosis | None:
    """F29, F31: a loss that compares rows sees this rank's rows only."""
    if not case.wrong or case.torn or not case.local:
        return None
    losses = case.losses_at(case.step)
    zero = [r for r, loss in enumerate(losses) if loss == 0.0]
    cosine = min(row.cosine for row in case.wrong)
    whole = case.one.facts[0]["losses"][0] if case.step == 1 else None
    return Diagnosis(
        "F31" if zero else "F29",
        "a batch without valid pairs on a rank" if zero else "a loss over pairs that never sees the other ranks' rows",
        f"Gradients point elsewhere (cosine down to {cosine:.3f}). Ranks' losses {_list([_format(x) for x in losses])}"
        + (f", on the concatenated embeddings {_format(whole)}" if whole is not None else "")
        + (f"; rank {zero[0]} had no pair to compare." if zero else ": negatives of other ranks are missing."),
        "Wrap the loss: GlobalBatchLoss(loss) (or DDPLossStrategy(global_batch='auto')); and draw batches "
        "with GlobalBatchSampler.",
        confirmed=_MEAN,
    )


def _exact_shares(case: Case) -> list[float] | None:
    """Weights of the ranks in one process's gradient, where they explain all of it and the ranks' run is their plain mean."""
    if not case.wrong or case.torn or case.step != 1 or not case.local:
        return None
    found = case.shares
    if found is None:
        return None
    weights, left = found
    allowed = max(1e-4, min(0.05, max(row.tolerance for row in case.rows)))
    return weights if left <= allowed else None


def _list(values: list[object] | list[int] | list[str]) -> str:
    return ", ".join(str(value) for value in values)


def _format(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


LOCAL: tuple[Rule, ...] = (batch_norm, summed, mean_of_means, never_gathered)
"""In the order in which they are asked."""


DATA: tuple[Rule, ...] = (identical_batches, reshuffled_sampler)
"""Looked at in every audit."""

STAGES: tuple[tuple[Rule, ...], ...] = (
    (precision,),
    TORN,
    (not_finite,),
    (metric_as_loss,),
    (factor_on_loss,),
    *((rule,) for rule in LOCAL),
    (gather_without_autograd, graph_cut),
    (double_scaling,),
    (own_first,),
)
"""Looked at where something differs, until a stage finds something."""
