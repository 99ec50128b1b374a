"""Why N ranks differ from one process: one small rule for each fault, the most specific first.

A rule looks at an `AuditContext` and answers with a `Diagnosis` or None. A rule has a condition and its numbers. The texts are cases of
the fault in the table of faults (``faults.yaml``). Rules are pure: anything beyond the rows they ask from counterfactual runs, which the
context makes for them. A newcomer adds a function and its line in ``STAGES``, and a case to the table.

Rules for ranks that do not agree with each other come first. They are one stage: all that apply are named.

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
from itertools import zip_longest

from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, comma_list, loss_text, quoted
from lightning_ddp_losses.audit.rank_record import Entry

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
    return Diagnosis.of("F67", confirmed="digests of the batches", batches=len(columns), W=context.W)


def sampler_shuffled_apart(context: AuditContext) -> Diagnosis | None:
    """F68: Lightning shuffles a sampler that meant its order."""
    text = context.user_run.records[0].module_info.reshuffled
    if not text:
        return None
    evidence, _, fix = text.partition("\n")
    return Diagnosis.of("F68", confirmed="the loader's sampler", evidence=evidence, fix=fix)


# ---------------------------------------------------------------------- at the wrap


def parameter_order(context: AuditContext) -> Diagnosis | None:
    """F12: DDP pairs by position."""
    orders = [record.parameter_order for record in context.ranks.records]
    first = _first_difference(list(zip_longest(*orders, fillvalue="nothing")), "`{}`")
    if first is None:
        return None
    at, shown = first
    return Diagnosis.of("F12", confirmed="names compared at the wrap", position=at, shown=shown)


def norm_converted_late(context: AuditContext) -> Diagnosis | None:
    """F60: a batch norm that was replaced after the wrap, or that the conversion did not reach."""
    at_wrap, in_training = context.record.norms_at_wrap, context.record.norms_in_training
    # replaced since the wrap, or not reached by the conversion that the trainer was asked for
    late = [name for name, kind in in_training.items() if at_wrap.get(name, kind) != kind]
    plain = [name for name, kind in in_training.items() if "Sync" not in kind]
    if not late and not (plain and context.info.sync_batchnorm):
        return None
    layers = tuple(late or plain)
    return Diagnosis.of(
        "F60",
        "audit" if late else "missed",
        confirmed="classes of the layers at the wrap and at the first step",
        parameters=tuple(row.parameter for row in context.wrong if row.parameter.startswith(layers)),
        layer=layers[0],
        before=at_wrap.get(layers[0]),
        now=in_training[layers[0]],
    )


def unequal_start(context: AuditContext) -> Diagnosis | None:
    """F04: weights that nobody broadcast."""
    names = context.ranks.names(0, "initial")
    differ = [name for name in names if not context.ranks.ranks_agree(0, "initial", name)]
    if not differ or context.step != 1:
        return None
    return Diagnosis.of(
        "F04",
        confirmed="parameters compared before the first step",
        parameters=tuple(differ),
        first=differ[0],
        more=len(differ) - 1,
    )


# ---------------------------------------------------------------------- gradients that nobody reduces


def unregistered_loss(context: AuditContext) -> Diagnosis | None:
    """F02: an optimizer holds what the module has not registered."""
    rows = [row for row in context.desynchronized if row.owner == "unregistered"]
    if not rows:
        return None
    return Diagnosis.of(
        "F02",
        confirmed="the optimizer's parameters against the module's",
        parameters=tuple(row.parameter for row in rows),
        names=context.names(rows),
    )


_EVENTS = {"created": "F05", "replaced": "F06", "changed": "F07", "unfrozen": "F08"}


def changed_after_wrap(context: AuditContext) -> Diagnosis | None:
    """F05 to F08: DDP's hook is not on what is trained now."""
    # the first event of the first parameter that differs
    for row in context.desynchronized:
        for record in context.ranks.records:
            event = record.parameter_events.get(row.parameter, "")
            fault = _EVENTS.get(event.split(" ")[0])
            if fault is not None:
                confirmed = "the parameter at the wrap and at the step"
                parameters = (row.parameter,)
                return Diagnosis.of(fault, confirmed=confirmed, parameters=parameters, name=row.parameter, event=event)
    return None


def own_backward(context: AuditContext) -> Diagnosis | None:
    """F09, F10: a backward that DDP does not know of."""
    calls = context.record.tensor_backwards - context.record.lightning_backwards
    if not context.desynchronized or calls <= 0:
        return None
    fault = "F09" if context.info.automatic else "F10"
    names = context.names(context.desynchronized)
    return Diagnosis.of(fault, confirmed="backward calls counted", calls=calls, names=names)


# ---------------------------------------------------------------------- what happens between gradient and step


def clipped_by_desynchronized_norm(context: AuditContext) -> Diagnosis | None:
    """F13: one unsynchronised gradient, and the clip factor differs for all."""
    unreduced = context.desynchronized
    # equal before the step and not after it: something between the two depends on the rank
    equal_before = {row.parameter for row in context.rows if row.ranks_agree}
    updates = context.comparison.first_updates()
    drifted = [row for row in updates if not row.ranks_agree and row.parameter in equal_before]
    if not unreduced or not drifted or not context.info.clip:
        return None
    if (
        any(map(_differ, (*context.loss_scales, *context.learning_rates)))
        or changed_after_reduction(context) is not None
    ):
        return None
    return Diagnosis.of(
        "F13",
        "norm",
        confirmed="equal before the clip, unequal after the step",
        parameters=tuple(row.parameter for row in (*unreduced, *drifted)),
        drifted=context.names(drifted),
        clip=context.info.clip,
        unreduced=context.names(unreduced),
    )


def changed_after_reduction(context: AuditContext) -> Diagnosis | None:
    """F13: what all ranks had alike after the reduction, some ranks clipped or changed by themselves."""
    if any(map(_differ, context.loss_scales)) or own_backward(context) is not None:
        return None
    by_rank = context.fingerprints_by_rank
    apart = [row for row in (*context.rows, *context.comparison.first_updates()) if not row.ranks_agree]
    names = list(dict.fromkeys(row.parameter for row in apart))
    for name in names:
        if not _agree(by_rank, "backward", name) and not _agree(by_rank, "reduced", name):
            return None  # a gradient that nobody reduced has a rule of its own
    # where the ranks part: in the module's hooks, or between those and the step
    stage, place = "hooked", "in on_after_backward or on_before_optimizer_step"
    changed = [name for name in names if _agree(by_rank, stage, name) is False]
    if not changed:
        stage = "used"
        place = "between on_before_optimizer_step and the step: configure_gradient_clipping, or the optimizer itself"
        changed = [name for name in names if _agree(by_rank, stage, name) is False]
    if not changed:
        return None
    # the ranks whose values are no longer what the reduction left, where the others' still are
    earlier = "reduced"
    if not _agree(by_rank, earlier, changed[0]):
        earlier = "backward"
    ranks = [r for r, stages in enumerate(by_rank) if stages[stage].get(changed[0]) != stages[earlier][changed[0]]]
    who = "each rank in its own way"
    if len(ranks) < len(by_rank):
        who = f"by rank {comma_list(ranks)}"
    shown = context.names({row.parameter: row for row in apart if row.parameter in changed}.values())
    return Diagnosis.of(
        "F13",
        confirmed="fingerprints of the gradients on their way to the step",
        parameters=tuple(changed),
        names=shown,
        who=who,
        place=place,
    )


def changed_outside_step(context: AuditContext) -> Diagnosis | None:
    """SYNC: the step used the same gradient and rate on all ranks, and the parameter is another one after it."""
    by_rank = context.fingerprints_by_rank
    apart = [row for row in context.comparison.first_updates() if not row.ranks_agree]
    if (
        not apart
        or any(map(_differ, (*context.loss_scales, *context.learning_rates)))
        or unequal_start(context) is not None
    ):
        return None
    if not all(_agree(by_rank, "used", row.parameter) for row in apart):
        return None
    return Diagnosis.of(
        "SYNC",
        confirmed="fingerprints of the gradients that the step used",
        parameters=tuple(row.parameter for row in apart),
        names=context.names(apart),
        step=context.step,
    )


def _agree(by_rank: Sequence[dict[str, dict[str, int]]], stage: str, name: str) -> bool | None:
    """Return whether all ranks have the same bits of a gradient at a stage; None if a rank has none."""
    values = [stages.get(stage, {}).get(name) for stages in by_rank]
    return None if None in values else not _differ(values)


def skipped_step(context: AuditContext) -> Diagnosis | None:
    """F14, F15: loss scales, or steps that the scaler skipped, differ by rank."""
    first = _first_difference(context.loss_scales, "{:g}")
    if first is None:
        return None
    at, shown = first
    # scales that start apart, or a step that was skipped
    fault = "F14" if at else "F15"
    return Diagnosis.of(fault, confirmed="scales recorded at each step", step=at + 1, shown=shown)


def different_rates(context: AuditContext) -> Diagnosis | None:
    """F17: each rank has its own learning rate."""
    first = _first_difference(context.learning_rates)
    if first is None:
        return None
    at, shown = first
    return Diagnosis.of("F17", confirmed="learning rates recorded at each step", step=at + 1, shown=shown)


def _first_difference(columns: Sequence[Sequence[object]], form: str = "{}") -> tuple[int, str] | None:
    """Find the first column whose values differ by rank: its place, and its values as text; None where all agree."""
    for place, column in enumerate(columns):
        if _differ(column):
            return place, comma_list(f"rank {rank} {form.format(value)}" for rank, value in enumerate(column))
    return None


def _differ(column: Sequence[object]) -> bool:
    return any(value != column[0] for value in column)


# ---------------------------------------------------------------------- state beside the parameters

_SORTED = 1 << 20  # elements of a buffer whose rows are compared one by one


def own_queue(context: AuditContext) -> Diagnosis | None:
    """F64, F26: a memory of rows, or a statistic of them, that each rank keeps by itself."""
    for step in range(1, context.step + 1):
        for name in context.ranks.names(step, "buffer"):
            # running statistics have a rule of their own; counters are no rows
            of_norm = name.rpartition(".")[0] in context.record.norms_at_wrap
            if of_norm or context.ranks.ranks_agree(step, "buffer", name):
                continue
            entries = [entry for entry in context.ranks.entries_of(step, "buffer", name) if entry is not None]
            if _is_counter(entries[0]):
                continue
            fault, case = "F64", "audit"
            if not _keeps_rows(context, name, step, entries[0]):
                case = "statistic"
            elif _have_the_same_rows(entries):
                fault, case = "F26", "queue"
            return Diagnosis.of(fault, case, confirmed="buffers compared after the step", buffer=name, step=step)
    return None


def _keeps_rows(context: AuditContext, name: str, step: int, entry: Entry) -> bool:
    """Say whether a buffer is a memory of rows: some of them outlive a step, where all of a running statistic moves."""
    if not entry.dtype.startswith(("float", "bfloat")) or entry.numel > _SORTED:
        return True
    kind = "buffer"
    if step == 1:
        kind = "initial"
    before = context.ranks.entries_of(step - 1, kind, name)[0]
    if before is None or before.shape != entry.shape:
        return True
    earlier = _sorted_rows(before)
    return any(row in earlier for row in _sorted_rows(entry))


def _have_the_same_rows(entries: Sequence[Entry]) -> bool:
    """Return whether all ranks keep the same rows, in any order; large buffers are not sorted, and count as different."""
    contents = [_sorted_rows(entry) for entry in entries if entry.numel <= _SORTED]
    return bool(contents) and all(rows == contents[0] for rows in contents)


def _is_counter(entry: Entry) -> bool:
    return entry.dtype in ("bool", "int64", "int32") and not entry.shape


def _sorted_rows(entry: Entry) -> list[list[float]]:
    first = entry.shape[0] if entry.shape else 1
    rows: list[list[float]] = entry.tensor().double().reshape(max(1, first), -1).tolist()
    return sorted(rows)


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
    return Diagnosis.of(
        "F78",
        confirmed="in float64 both runs are equal",
        severity="explanation",
        worst=worst,
        precision=context.info.precision,
        unit=context.unit,
        tolerance=max((row.tolerance for row in context.rows), default=0.0),
    )


def not_finite(context: AuditContext) -> Diagnosis | None:
    """F79: overflow or NaN on one side only, in gradients or in a loss whose gradient is finite all the same."""
    odd = [row for row in context.rows if row.verdict == "not finite"]
    batch = context.first_odd_batch
    if not odd and batch is None:
        return None
    gradients = ""
    if odd:
        gradients = f"Not finite on rank {odd[0].rank} or in one process, but not in both: {context.names(odd)}. "
    if batch is None:
        return Diagnosis.of("F79", "backward", gradients=gradients)
    # the loss that was not finite, of several micro-batches the first
    losses = [f"rank {rank} {loss_text(record.loss_of(batch))}" for rank, record in enumerate(context.ranks.records)]
    return Diagnosis.of("F79", gradients=gradients, batch=batch, losses=comma_list(losses))


# ---------------------------------------------------------------------- a common factor


def metric_as_loss(context: AuditContext) -> Diagnosis | None:
    """F27: torchmetrics detaches what it gathers, except the own slot."""
    metrics = context.record.metric_losses
    factor = context.factors.encoder
    if not metrics or not _is_factor(factor, 1 / context.W):
        return None
    return Diagnosis.of("F27", metric=metrics[0], factor=_factor_text(factor), W=context.W)


def factor_on_loss(context: AuditContext) -> Diagnosis | None:
    """F24: the factor W that makes up for the own-slot gather hits the loss's own weights too."""
    if not (_is_factor(context.factors.encoder, 1.0) and _is_factor(context.factors.losses, float(context.W))):
        return None
    loss = [row for row in context.rows if row.owner != "encoder"]
    return Diagnosis.of(
        "F24",
        parameters=tuple(row.parameter for row in loss),
        names=context.names(loss),
        factor=_factor_text(context.factors.losses),
        W=context.W,
        source=context.pml_wrapper or "The loss",
    )


def gather_without_autograd(context: AuditContext) -> Diagnosis | None:
    """F20, F23: gradients pass through this rank's part of the gather only."""
    encoder, losses = context.factors.encoder, context.factors.losses
    losses_fit = losses is None or _is_factor(losses, 1.0) or _is_factor(losses, 1 / context.W)
    if not _is_factor(encoder, 1 / context.W) or not losses_fit:
        return None
    return Diagnosis.of("F20", encoder=_factor_text(encoder), losses=_factor_text(losses), W=context.W)


def graph_cut(context: AuditContext) -> Diagnosis | None:
    """F20: what is gathered has no graph at all, not even this rank's part."""
    encoder = [row for row in context.rows if row.owner == "encoder" and row.verdict == "missing"]
    if not encoder or any(map(context.has_gradient_on_a_rank, encoder)):
        return None
    return Diagnosis.of("F20", "cut", parameters=tuple(row.parameter for row in encoder), names=context.names(encoder))


def double_scaling(context: AuditContext) -> Diagnosis | None:
    """F21, F22: a factor W where none is due."""
    encoder, losses = context.factors.encoder, context.factors.losses
    W = float(context.W)
    if context.W == 1 or not (_is_factor(encoder, W) or _is_factor(encoder, W**2)):
        return None
    return Diagnosis.of("F21", encoder=_factor_text(encoder), losses=_factor_text(losses), W=context.W)


def own_rows_first(context: AuditContext) -> Diagnosis | None:
    """F26: the loss depends on the order of rows, and each rank has its own rows first."""
    if context.used_rng or not context.wrong or context.desynchronized or context.is_local_mean:
        return None
    if context.counterfactual.reversed_order().equal:
        return None
    return Diagnosis.of(
        "F26",
        confirmed="one process, ranks joined in reverse order",
        losses=comma_list(map(loss_text, context.losses_at(context.step))),
        wrapper=context.pml_wrapper or "none",
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
    if not context.local_norms or context.desynchronized or not context.counterfactual.without("batch_norm").equal:
        return None
    return local_statistics(context, "with batch norm in evaluation mode both runs are equal")


def local_statistics(
    context: AuditContext, confirmed: str = "with batch norm in evaluation mode fewer gradients differ"
) -> Diagnosis:
    """F59, alone or beside something else."""
    return Diagnosis.of(
        "F59",
        confirmed=confirmed,
        parameters=tuple(row.parameter for row in context.wrong),
        names=quoted(context.local_norms),
        rows=comma_list(context.rows_per_rank(context.step)),
    )


def summed_loss(context: AuditContext) -> Diagnosis | None:
    """F18: a loss that is a sum, divided by W through DDP's mean."""
    weights = context.rank_weights
    if weights is None or not all(abs(weight - 1) < 0.02 for weight in weights):
        return None
    confirmed = f"{_MEAN_OF_RANKS}, and the sum of the ranks' gradients is one process's"
    return Diagnosis.of("F18", "sum", confirmed=confirmed, W=context.W)


def mean_of_means(context: AuditContext) -> Diagnosis | None:
    """F30: ranks with fewer rows, or fewer valid targets, count as much as the others."""
    weights = context.rank_weights
    rows = context.rows_per_rank(context.step)
    uneven = len(set(rows)) > 1
    if weights is None:
        # later steps have no weights: equal while batches were even, different at the first uneven one
        if context.step == 1 or not uneven or not context.is_local_mean:
            return None
        if not context.counterfactual.without("uneven").equal:
            return None
        return Diagnosis.of("F30", "later", confirmed=_MEAN_OF_RANKS, step=context.step, rows=comma_list(rows))
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
    return Diagnosis.of("F30", confirmed=_MEAN_OF_RANKS, weights=shown, reason=reason, W=context.W)


def never_gathered(context: AuditContext) -> Diagnosis | None:
    """F29, F31: a loss that is no mean over rows sees this rank's rows only."""
    if not context.wrong or context.desynchronized or not context.is_local_mean:
        return None
    if context.local_norms and "batch_norm" not in context.switched_off:
        return None  # local statistics look like this too: asked again with batch norm in evaluation mode
    if context.keeps_gradients_of_exchanged_rows:
        return _counts_by_place(context)
    losses = context.losses_at(context.step)
    without_pairs = [rank for rank, loss in enumerate(losses) if loss == 0.0]
    cosine = min(row.cosine for row in context.wrong)
    shown = comma_list(map(loss_text, losses))
    found = f"Gradients point elsewhere (cosine down to {cosine:.3f}). Ranks' losses {shown}"
    of_one = context.one.records[0].loss_of(0)
    if context.step == 1 and of_one is not None:
        found += f", on the concatenated embeddings {loss_text(of_one)}"
    if without_pairs:
        return Diagnosis.of("F31", confirmed=_MEAN_OF_RANKS, found=found, rank=without_pairs[0])
    if context.info.pair_losses:
        pair_losses = quoted(context.info.pair_losses)
        return Diagnosis.of("F29", "pairs", confirmed=_MEAN_OF_RANKS, found=found, losses=pair_losses)
    # pairs and a function of a mean cannot be told apart from outside: |mean of y|^2 is a mean over pairs
    return Diagnosis.of("F29", "mean", confirmed=_MEAN_OF_RANKS, found=found)


def _counts_by_place(context: AuditContext) -> Diagnosis:
    """F72, or no known fault: rows may change ranks, but not their places in a batch."""
    confirmed = "rows that change ranks and keep their places have the same gradients"
    without_draws = "randomness" not in context.switched_off and context.counterfactual.without("randomness").equal
    if without_draws:
        confirmed += ", and with every draw replaced by its mean both runs are equal"
        return Diagnosis.of("F72", "shared", confirmed=confirmed, severity="explanation", W=context.W)
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


def _is_factor(ratio: float | None, value: float) -> bool:
    return ratio is not None and math.isclose(ratio, value, rel_tol=0.05)


def _factor_text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


DATA_RULES: tuple[Rule, ...] = (identical_batches, sampler_shuffled_apart)
"""Asked in every audit."""

DESYNC_RULES: tuple[Rule, ...] = (
    parameter_order,
    skipped_step,
    different_rates,
    clipped_by_desynchronized_norm,
    changed_after_reduction,
    norm_converted_late,
    changed_after_wrap,
    unregistered_loss,
    own_backward,
    unequal_start,
    own_queue,
    changed_outside_step,
)
"""For ranks that do not agree with each other; all that apply are named, in this order."""

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
