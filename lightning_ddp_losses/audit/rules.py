"""Why N ranks differ from one process: one small rule for each fault, the most specific first.

A rule looks at an `AuditContext` and answers with a `Diagnosis` or None. Rules are pure: what they need to know beyond the rows
they ask from counterfactual runs, which the context makes for them. A newcomer adds a function and its line in ``STAGES``. Rules
for ranks that do not agree with each other are in `rules_desync`.

What the patterns mean, ratios being those of norms on the ranks over norms in one process:

* 1/W everywhere: a gather whose gradient flows through this rank's part only;
* W on the loss's own parameters: a factor that was meant for the encoder;
* exact above a batch norm and wrong below it: each rank's own statistics;
* another direction, the ranks being the mean of their own losses: rows depend on the other rows of their rank (a loss over pairs that
  never gathered negatives), or, where rows that change ranks have the same gradients, on their place in the batch;
* a weighted sum of the ranks' own gradients that follows rows or valid targets: a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_ddp_losses.audit.compare import ComparedRow
from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, comma_list, loss_text, plural
from lightning_ddp_losses.audit.rules_desync import DESYNC_RULES

Rule = Callable[[AuditContext], Diagnosis | None]

_MEAN_OF_RANKS = "one process that averages the ranks' own losses has the ranks' gradients"


# ---------------------------------------------------------------------- data: also where every gradient is equal


def identical_batches(context: AuditContext) -> Diagnosis | None:
    """F67, F71: every rank draws the same rows."""
    columns = list(zip(*(record.batches for record in context.user_run.records), strict=False))
    if context.W == 1 or not columns:
        return None
    for column in columns:
        if any(batch.digest != column[0].digest for batch in column):
            return None
    return Diagnosis(
        "F67",
        "every rank has the same batches",
        f"All {len(columns)} batches are the same bits on all {context.W} ranks: {context.W} processes do the work of one.",
        "Let Lightning put its DistributedSampler in (use_distributed_sampler=True and a sampler, not a "
        "custom batch_sampler), use "
        "GlobalBatchSampler, or split an iterable dataset by rank in its __iter__.",
        confirmed="digests of the batches",
    )


def sampler_shuffled_apart(context: AuditContext) -> Diagnosis | None:
    """F68: Lightning shuffles a sampler that meant its order."""
    text = context.user_run.records[0].module_info.reshuffled
    if not text:
        return None
    what, _, fix = text.partition("\n")
    return Diagnosis("F68", "a sampler's batches are shuffled apart", what + ".", fix, confirmed="the loader's sampler")


# ---------------------------------------------------------------------- rounding and overflow


def rounding(context: AuditContext) -> Diagnosis | None:
    """F78: a difference of the size that the precision makes, gone in float64."""
    # no larger than a few thousand rounding errors, which no fault is
    worst = context.comparison.worst()
    too_large = worst > 4096 * context.unit
    if context.desynchronized or not context.wrong or too_large or context.unit < 1e-15:
        return None
    if not context.counterfactual.without("precision").equal:
        return None
    expected = max((row.tolerance for row in context.rows), default=0.0)
    return Diagnosis(
        "F78",
        "rounding of the precision",
        f"Gradients differ by up to {worst:.1e}; one operation in {context.info.precision} rounds by "
        f"{context.unit:.1e}, and the order "
        f"of summation differs between ranks and one process. (Tolerance used: {expected:.1e}.)",
        "Nothing is wrong. Leave tolerance at its estimate, or train in a wider precision where this matters.",
        confirmed="in float64 both runs are equal",
        severity="explanation",
    )


def not_finite(context: AuditContext) -> Diagnosis | None:
    """F79: overflow or NaN on one side only, in gradients or in a loss whose gradient is finite all the same."""
    odd = [row for row in context.rows if row.verdict == "not finite"]
    batch = context.first_odd_batch
    if not odd and batch is None:
        return None
    evidence = []
    title = "a loss that is not finite"
    if odd:
        title = "infinite or NaN gradients"
        evidence.append(
            f"{context.names(odd)} {plural(odd, 'has', 'have')} values that are not finite on rank "
            f"{odd[0].rank} or in one process, but not in both."
        )
    # the loss that was not finite, of several micro-batches the first
    if batch is None:
        evidence.append("All losses of that step are finite: it is in backward that something overflows.")
        fix = (
            "Look for the first layer whose gradient overflows on that rank's batch (a root or a logarithm at zero); or use bf16 "
            "instead of fp16."
        )
    else:
        losses = [
            f"rank {rank} {loss_text(record.loss_of(batch))}" for rank, record in enumerate(context.ranks.records)
        ]
        evidence.append(f"The first loss that is not finite is that of batch {batch}: {comma_list(losses)}.")
        fix = (
            "Look at that rank's batch. NaN is often a mean over nothing (no valid target, an empty mask): divide the sum by the number "
            "of valid elements of all ranks, as GlobalBatchLoss does. Infinity is an overflow: lower the learning rate, or use bf16 "
            "instead of fp16."
        )
    return Diagnosis("F79", title, " ".join(evidence), fix)


# ---------------------------------------------------------------------- a common factor


def metric_as_loss(context: AuditContext) -> Diagnosis | None:
    """F27: torchmetrics detaches what it gathers, except the own slot."""
    metrics = context.record.metric_losses
    factor = context.factors.encoder
    if not metrics or not _is_factor(factor, 1 / context.W):
        return None
    return Diagnosis(
        "F27",
        "a metric of torchmetrics as the loss",
        f"`{metrics[0]}` returns a value with gradient; all gradients are {_factor_text(factor)} = "
        f"1/{context.W} of one process's: in its "
        "sync only this rank's part keeps its graph.",
        f"Make the metric keep its gradient through the sync: lightning_ddp_losses.differentiable({metrics[0]}). Or take a loss "
        "module instead, evaluated over the global batch (GlobalBatchLoss).",
    )


def factor_on_loss(context: AuditContext) -> Diagnosis | None:
    """F24: the factor W that makes up for the own-slot gather hits the loss's own weights too."""
    if not (_is_factor(context.factors.encoder, 1.0) and _is_factor(context.factors.losses, float(context.W))):
        return None
    wrapper = _pml_wrapper(context)
    multiplied = "The loss is multiplied"
    if wrapper:
        multiplied = f"`{wrapper}` multiplies the loss"
    loss = [row for row in context.rows if row.owner != "encoder"]
    return Diagnosis(
        "F24",
        "the loss's own weights get W times the gradient",
        f"The encoder's gradients are exact; {context.names(loss)} {plural(loss, 'is', 'are')} "
        f"{_factor_text(context.factors.losses)} times one process's, W being {context.W}. "
        f"{multiplied} by the number of ranks, "
        "which makes up for its gather on the encoder's side; the loss's weights see the whole batch on "
        "every rank and need no factor.",
        "Take GlobalBatchLoss(loss) instead of the wrapper, or divide the gradients of the loss's own "
        "weights by the number of ranks.",
        parameters=tuple(row.parameter for row in loss),
    )


def gather_without_autograd(context: AuditContext) -> Diagnosis | None:
    """F20, F23: gradients pass through this rank's part of the gather only."""
    encoder, losses = context.factors.encoder, context.factors.losses
    losses_fit = losses is None or _is_factor(losses, 1.0) or _is_factor(losses, 1 / context.W)
    if not _is_factor(encoder, 1 / context.W) or not losses_fit:
        return None
    exact_losses = ""
    if _is_factor(losses, 1.0):
        exact_losses = ", and the loss's own are exact"
    return _without_autograd(
        f"The encoder's gradients are {_factor_text(encoder)} = 1/{context.W} of one process's, in the same direction"
        f"{exact_losses}: the value is global, but the gradient flows through this rank's part only and DDP then divides "
        "by the number of ranks.",
    )


def graph_cut(context: AuditContext) -> Diagnosis | None:
    """F20: what is gathered has no graph at all, not even this rank's part."""
    encoder = [row for row in context.rows if row.owner == "encoder" and row.verdict == "missing"]
    if not encoder or not _has_gradient_on_no_rank(context, encoder):
        return None
    return _without_autograd(
        f"{context.names(encoder)} {plural(encoder, 'has', 'have')} a gradient in one process and none on any rank: "
        "what the loss is computed from was gathered or reduced without its graph.",
        tuple(row.parameter for row in encoder),
    )


def _without_autograd(evidence: str, parameters: tuple[str, ...] = ()) -> Diagnosis:
    return Diagnosis(
        "F20",
        "a gather or reduction without autograd",
        evidence,
        "Gather with collectives.all_gather_with_grad (torch.distributed's all_gather and all_reduce carry "
        "no gradient), or use GlobalBatchLoss.",
        parameters=parameters,
    )


def double_scaling(context: AuditContext) -> Diagnosis | None:
    """F21, F22: a factor W where none is due."""
    encoder, losses = context.factors.encoder, context.factors.losses
    W = float(context.W)
    if context.W == 1 or not (_is_factor(encoder, W) or _is_factor(encoder, W**2)):
        return None
    of_losses = ""
    if losses is not None:
        of_losses = f"; the loss's own {_factor_text(losses)}"
    return Diagnosis(
        "F21",
        "scaled by the number of ranks once too often",
        f"The encoder's gradients are {_factor_text(encoder)} times one process's, W being {context.W}{of_losses}"
        ": a gather with gradient (or no gather at all) together with a factor W in the loss.",
        "Remove the multiplication by world_size; DDP's mean and a gather with gradient already give the "
        "global gradient.",
    )


def own_rows_first(context: AuditContext) -> Diagnosis | None:
    """F26: the loss depends on the order of rows, and each rank has its own rows first."""
    if context.used_rng or not context.wrong or context.desynchronized or context.is_local_mean:
        return None
    if context.counterfactual.reversed_order().equal:
        return None
    wrapper = _pml_wrapper(context)
    reason = "."
    if wrapper:
        reason = f"; `{wrapper}` puts this rank's rows before the others'."
    losses = comma_list(map(loss_text, context.losses_at(context.step)))
    return Diagnosis(
        "F26",
        "each rank concatenates its own rows first",
        "The loss depends on the order of the rows: one process with the ranks' batches joined the other "
        "way round has other "
        f"gradients too. The ranks' losses are {losses}{reason}",
        "Gather in rank order on every rank: GlobalBatchLoss, or collectives.all_gather_with_grad.",
        confirmed="one process, ranks joined in reverse order",
    )


def unknown(context: AuditContext) -> Diagnosis:
    """Say where the runs differ first, where no rule knows why."""
    return Diagnosis(
        "",
        "unknown",
        f"{len(context.wrong)} of {len(context.rows)} gradients differ at step {context.step} and no known pattern "
        f"fits. {context.counterfactual.first_traced_difference()}",
        "Look at that layer: what in it sees more than one row, other ranks, or random numbers?",
    )


# ---------------------------------------------------------------------- exactly what DDP promises, the mean of local losses


def local_batch_norm(context: AuditContext) -> Diagnosis | None:
    """F59: each rank normalises by its own rows."""
    if not _local_norms(context) or context.desynchronized or not context.counterfactual.without("batch_norm").equal:
        return None
    return local_statistics(context, "with batch norm in evaluation mode both runs are equal")


def local_statistics(
    context: AuditContext, confirmed: str = "with batch norm in evaluation mode fewer gradients differ"
) -> Diagnosis:
    """F59, alone or beside something else."""
    norms = _local_norms(context)
    listed = comma_list(f"`{name}`" for name in norms[:3])
    if len(norms) > 3:
        listed += " ..."
    return Diagnosis(
        "F59",
        "batch norm with each rank's own statistics",
        f"{listed}: mean and variance are those of this rank's rows "
        f"({comma_list(context.rows_per_rank(context.step))}), not of the batch.",
        "Trainer(sync_batchnorm=True), or a norm that looks at one row at a time (LayerNorm, GroupNorm).",
        confirmed=confirmed,
        parameters=tuple(row.parameter for row in context.wrong),
    )


def summed_loss(context: AuditContext) -> Diagnosis | None:
    """F18: a loss that is a sum, divided by W through DDP's mean."""
    weights = _exact_rank_weights(context)
    if weights is None or not all(abs(weight - 1) < 0.02 for weight in weights):
        return None
    return Diagnosis(
        "F18",
        'a loss with reduction="sum"',
        f"All gradients are 1/{context.W} of one process's: the loss is the sum over samples, and DDP takes "
        f"the mean of the ranks' sums.",
        f'Use reduction="mean", or multiply the learning rate by the number of ranks ({context.W}) on purpose.',
        confirmed=f"{_MEAN_OF_RANKS}, and the sum of the ranks' gradients is one process's",
    )


def mean_of_means(context: AuditContext) -> Diagnosis | None:
    """F30: ranks with fewer rows, or fewer valid targets, count as much as the others."""
    weights = _exact_rank_weights(context)
    rows = context.rows_per_rank(context.step)
    uneven = len(set(rows)) > 1
    if weights is None:
        # later steps have no weights: equal while batches were even, different at the first uneven one
        if context.step == 1 or not uneven or not context.is_local_mean:
            return None
        if not context.counterfactual.without("uneven").equal:
            return None
        evidence = (
            f"The first {context.step - 1} steps are equal; at step {context.step} the ranks have {comma_list(rows)} rows, "
            "and each rank's mean counts alike."
        )
    else:
        # equal shares are what DDP gives them: then something else differs
        shares_differ = max(weights) - min(weights) > min(0.02, max(1e-6, 64 * context.unit))
        if abs(sum(weights) - 1) > 0.02 or not shares_differ:
            return None
        # weights in proportion to rows: the ranks' batches differ; else what counts in them differs
        reason = "valid targets (ignored, masked or zero elements do not count)"
        pairs = zip(weights, rows, strict=True)
        if uneven and all(abs(weight - count / sum(rows)) < 0.02 for weight, count in pairs):
            reason = f"rows ({comma_list(rows)})"
        shown = comma_list(f"{weight:.3f}" for weight in weights)
        evidence = (
            f"In one process the ranks' gradients count with weights {shown}, in proportion to their {reason}; "
            f"under DDP each counts 1/{context.W}."
        )
    return Diagnosis(
        "F30",
        "a mean of means",
        evidence,
        "Divide each rank's sum by the number of valid elements of all ranks (GlobalBatchLoss does), or "
        "give all ranks equal batches (drop_last=True).",
        confirmed=_MEAN_OF_RANKS,
    )


def never_gathered(context: AuditContext) -> Diagnosis | None:
    """F29, F31: a loss that is no mean over rows sees this rank's rows only."""
    if not context.wrong or context.desynchronized or not context.is_local_mean:
        return None
    if _local_norms(context) and "batch_norm" not in context.switched_off:
        return None  # local statistics look like this too: asked again with batch norm in evaluation mode
    if context.keeps_gradients_of_exchanged_rows:
        return _counts_by_place(context)
    losses = context.losses_at(context.step)
    without_pairs = [rank for rank, loss in enumerate(losses) if loss == 0.0]
    cosine = min(row.cosine for row in context.wrong)
    evidence = (
        f"Gradients point elsewhere (cosine down to {cosine:.3f}). Ranks' losses {comma_list(map(loss_text, losses))}"
    )
    of_one = context.one.records[0].loss_of(0)
    if context.step == 1 and of_one is not None:
        evidence += f", on the concatenated embeddings {loss_text(of_one)}"
    fault = "F29"
    fix = (
        "Wrap the loss: GlobalBatchLoss(loss) (or DDPLossStrategy(global_batch='auto')); and draw batches "
        "with GlobalBatchSampler."
    )
    if without_pairs:
        fault, title = "F31", "a batch without valid pairs on a rank"
        evidence += f"; rank {without_pairs[0]} had no pair to compare."
    elif context.info.pair_losses:
        title = "a loss over pairs that never sees the other ranks' rows"
        listed = comma_list(f"`{name}`" for name in context.info.pair_losses[:3])
        evidence += f": negatives of other ranks are missing in {listed}."
    else:
        # pairs and a function of a mean cannot be told apart from outside: |mean of y|^2 is a mean over pairs
        title = "a loss that is no mean over its rows sees one rank's rows only"
        evidence += (
            ". It compares rows with each other, or is not linear in a mean over them (the square of a mean, a penalty on "
            "a gradient, several means over other numbers of valid targets): its mean over the ranks' rows is not what it is of all rows."
        )
        fix = (
            "If it is computed from the rows' outputs, evaluate it over those of all ranks: GlobalBatchLoss(loss), or "
            "collectives.all_gather_with_grad before it. If it is a function of a mean, take that mean over all ranks first "
            "(collectives.all_reduce_with_grad). A penalty on a gradient per batch stays one per rank: make it one per row."
        )
    return Diagnosis(fault, title, evidence, fix, confirmed=_MEAN_OF_RANKS)


def _counts_by_place(context: AuditContext) -> Diagnosis:
    """F72, or no known fault: rows may change ranks, but not their places in a batch."""
    confirmed = "rows that change ranks and keep their places have the same gradients"
    without_draws = "randomness" not in context.switched_off and context.counterfactual.without("randomness").equal
    if without_draws:
        return Diagnosis(
            "F72",
            "the same random numbers on every rank",
            "No row meets another one, but what is drawn for a row depends on its place in the rank's batch: a generator "
            f"of the module's own is seeded alike on {context.W} ranks, so they share their draws, where one process has other "
            "draws for each row.",
            "Seed that generator with the rank too (seed + self.global_rank). The gradients still differ from those of one "
            'process, as they should: audit with without=("randomness",).',
            confirmed=f"{confirmed}, and with every draw replaced by its mean both runs are equal",
            severity="explanation",
        )
    return Diagnosis(
        "",
        "a row's place in its batch counts",
        "No row meets another one, but a row's gradient depends on its place in the rank's batch (weights or noise by "
        "position), and places are others in the batch of one process.",
        "Take what belongs to a row from the row (its data or its index in the data set), not from its place; else nothing is wrong "
        "but that W ranks differ from one process.",
        confirmed=confirmed,
    )


# ---------------------------------------------------------------------- what the rules have in common


def _exact_rank_weights(context: AuditContext) -> list[float] | None:
    """Return the ranks' weights in one process's gradient, where they explain all of it and the ranks take their plain mean."""
    if not context.wrong or context.desynchronized or context.step != 1 or not context.is_local_mean:
        return None
    found = context.rank_weights
    if found is None:
        return None
    # what the weights leave over may be rounding, but no more than a twentieth
    allowed = max(1e-4, min(0.05, max(row.tolerance for row in context.rows)))
    return found.weights if found.unexplained <= allowed else None


def _local_norms(context: AuditContext) -> list[str]:
    return [name for name, kind in context.record.norms_at_wrap.items() if "Sync" not in kind]


def _has_gradient_on_no_rank(context: AuditContext, rows: Sequence[ComparedRow]) -> bool:
    """Say whether no rank has a gradient of any of these parameters at the step that is looked at."""
    for row in rows:
        entries = context.ranks.entries_of(context.step, "gradient", row.parameter)
        if any(entry is not None and entry.exists for entry in entries):
            return False
    return True


def _pml_wrapper(context: AuditContext) -> str:
    """Name a module that is pytorch-metric-learning's distributed wrapper; empty without one."""
    for name, kind in context.info.module_types.items():
        if kind.endswith("DistributedLossWrapper"):
            return name
    return ""


def _is_factor(ratio: float | None, value: float) -> bool:
    return ratio is not None and math.isclose(ratio, value, rel_tol=0.05)


def _factor_text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


DATA_RULES: tuple[Rule, ...] = (identical_batches, sampler_shuffled_apart)
"""Asked in every audit."""

STAGES: tuple[tuple[Rule, ...], ...] = (
    (rounding,),
    DESYNC_RULES,
    (not_finite,),
    (metric_as_loss,),
    (factor_on_loss,),
    (local_batch_norm,),
    (summed_loss,),
    (mean_of_means,),
    (never_gathered,),
    (gather_without_autograd, graph_cut),
    (double_scaling,),
    (own_rows_first,),
)
"""Asked where something differs, until a stage finds something."""
