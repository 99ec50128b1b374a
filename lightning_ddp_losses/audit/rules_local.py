"""Rules for ranks that compute exactly what DDP promises, the mean of their own losses, where the whole batch means more."""

from __future__ import annotations

from collections.abc import Callable

from lightning_ddp_losses.audit.context import Case, Diagnosis

Rule = Callable[[Case], Diagnosis | None]
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
        f"Gradients point elsewhere (cosine down to {cosine:.3f}). Ranks' losses {_list([_number(x) for x in losses])}"
        + (f", on the concatenated embeddings {_number(whole)}" if whole is not None else "")
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


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


LOCAL: tuple[Rule, ...] = (batch_norm, summed, mean_of_means, never_gathered)
"""In the order in which they are asked."""
