"""Why N ranks differ from one process: one small rule for each fault, the most specific first.

A rule reads an `AuditContext` and yields a `Diagnosis` if it applies. It consists of a condition and numbers. The texts are cases of the
fault in the table of faults (``faults.yaml``). Rules are pure: besides the compared rows, they only use counterfactual runs, which the
context makes for them. To add a rule, write a function, add it to one of the stages, and add a case to the table.

Rules for ranks that do not agree with each other are applied first. They form one stage: all rules that apply are reported.

The rules look for these patterns, where a ratio is the norm on the ranks divided by the norm in one process:

* 1/W everywhere: the gradient of a gather only passes through this rank's part.
* W on the loss's parameters: a factor was meant for the encoder.
* Exact above a batch norm and wrong below it: each rank has its own statistics.
* A different direction, while the ranks average their local losses: rows depend on the other rows of their rank (a loss over pairs that
  never gathered negatives). If rows that are moved to another rank have the same gradients, they depend on their position in the batch.
* A weighted sum of the ranks' own gradients with weights in proportion to rows or valid targets: a mean of means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, Severity, comma_list, number_text, quoted
from lightning_ddp_losses.audit.rank_record import Entry
from lightning_ddp_losses.audit.replay import load_batch, row_digests
from lightning_ddp_losses.core.fault_rules import (
    FAULT_OF_CUT,
    agree_at,
    fault_of_memory,
    fault_of_same_rows,
    fault_of_scale,
    fault_of_unreduced,
    faults_of_optimizers,
    first_difference,
    scale_of,
    starts_at_own_rows,
)

Rule = Callable[[AuditContext], Iterable[Diagnosis]]

# ---------------------------------------------------------------------- data: also where every gradient is equal


def identical_batches(context: AuditContext) -> Iterator[Diagnosis]:
    """F67: every rank draws the same rows."""
    columns = list(zip(*(record.batches for record in context.runs.user_run.records), strict=False))
    if columns and all(len({batch.digest for batch in column}) == 1 for column in columns):
        loader = context.runs.user_run.records[0].module_info.foreign_loader
        case = "loader_in_audit" if loader else "audit"
        if not context.by_trainer:
            case = "loop"
        yield context.diagnosis(fault_of_same_rows(is_iterable=False), case, batches=len(columns), loader=loader)


def sampler_shuffled_apart(context: AuditContext) -> Iterator[Diagnosis]:
    """F68: Lightning shuffles a sampler that meant its order."""
    text = context.runs.user_run.records[0].module_info.reshuffled
    if text:
        evidence, _, fix = text.partition("\n")
        yield context.diagnosis("F68", evidence=evidence, fix=fix)


# ---------------------------------------------------------------------- loops without a Trainer


def repeated_rows(context: AuditContext) -> Iterator[Diagnosis]:
    """F67: ranks share some rows. Rows with few numbers may be equal by chance and are not compared."""
    batches = [record.batches[0] for record in context.runs.user_run.records]
    if context.by_trainer or any(identical_batches(context)):
        return
    of_ranks = [row_digests(load_batch(batch.file), batch.total_rows) for batch in batches]
    counts = Counter(chain.from_iterable(map(set, of_ranks)))
    repeated = sum(count > 1 for count in counts.values())
    if repeated:
        yield context.diagnosis("F67", "rows", repeated=repeated, total=sum(map(len, of_ranks)))


def accumulation_factor(context: AuditContext) -> Iterator[Diagnosis]:
    """F18: the losses of micro-batches are not divided by their number exactly once."""
    size = context.info.accumulate
    if size == 1 or context.by_trainer:
        return
    factor = context.accumulation_factor()
    for which, value in (("A", size), ("1/A", 1 / size), ("1/A**2", 1 / size**2)):
        if factor is not None and math.isclose(factor, value, rel_tol=_CLOSE):
            yield context.diagnosis("F18", "accumulation", which=which, accumulate=size, factor=number_text(factor, 4))


def never_reduced(context: AuditContext) -> Iterator[Diagnosis]:
    """SYNC: each rank steps with its own gradient."""
    rows = context.desynchronized
    if rows and not context.by_trainer and not any(changed_after_reduction(context)):
        yield context.diagnosis("SYNC", "loop", about=rows)


def clipped_before_reduction(context: AuditContext) -> Iterator[Diagnosis]:
    """F13: each rank clips its own gradient, and the clipped ones are reduced."""
    by_rank = context.stages_by_rank
    # in a fit, the clipping was done in training_step
    stage, case = ("clipped", "step") if context.by_trainer else ("reduced", "early")
    rows = [row for row in context.wrong if agree_at(by_rank, stage, row.parameter) is False]
    if rows and not context.desynchronized:
        yield context.diagnosis("F13", case, about=rows)


# ---------------------------------------------------------------------- at the wrap


def parameter_order(context: AuditContext) -> Iterator[Diagnosis]:
    """F12: DDP pairs by position."""
    orders = [record.parameter_order for record in context.ranks.records]
    for place, shown in _first_difference(list(zip_longest(*orders, fillvalue="nothing")), "`{}`"):
        yield context.diagnosis("F12", position=place, shown=shown)


def norm_converted_late(context: AuditContext) -> Iterator[Diagnosis]:
    """F60: a batch norm that was replaced after the wrap, or that the conversion did not reach."""
    at_wrap, in_training = context.record.norms_at_wrap, context.record.norms_in_training
    # replaced after the wrap, or not converted although the trainer's option was set
    late = [name for name, kind in in_training.items() if at_wrap.get(name, kind) != kind]
    plain = [name for name, kind in in_training.items() if "Sync" not in kind]
    if not late and not (plain and context.info.sync_batchnorm):
        return
    layers = tuple(late or plain)
    rows = [row for row in context.wrong if row.parameter.startswith(layers)]
    before, now = at_wrap.get(layers[0]), in_training[layers[0]]
    yield context.diagnosis("F60", "audit" if late else "missed", about=rows, layer=layers[0], before=before, now=now)


def unequal_start(context: AuditContext) -> Iterator[Diagnosis]:
    """F04: weights start different on the ranks."""
    names = context.ranks.names(0, "initial")
    differ = [name for name in names if not context.ranks.ranks_agree(0, "initial", name)]
    if differ and context.step == 1:
        yield context.diagnosis("F04", parameters=differ, first=differ[0], more=len(differ) - 1)


# ---------------------------------------------------------------------- gradients that are not reduced


def unregistered_loss(context: AuditContext) -> Iterator[Diagnosis]:
    """F02: an optimizer holds parameters that the module has not registered."""
    rows = [row for row in context.desynchronized if row.owner == "unregistered"]
    if rows:
        yield context.diagnosis(fault_of_unreduced(is_registered=False), about=rows)


def changed_after_wrap(context: AuditContext) -> Iterator[Diagnosis]:
    """F05 to F08: DDP's hook is not on the parameter that is trained now."""
    # the first event of the first parameter that differs
    for row in context.desynchronized:
        for record in context.ranks.records:
            event = record.parameter_events.get(row.parameter, "")
            fault = fault_of_unreduced(event=event)
            if fault:
                yield context.diagnosis(fault, about=[row], name=row.parameter, event=event)
                return


def own_backward(context: AuditContext) -> Iterator[Diagnosis]:
    """F09, F10: a backward that bypasses DDP."""
    calls = context.record.foreign_backwards
    fault = fault_of_unreduced(has_backward=calls == 0, is_automatic=context.info.automatic)
    if context.desynchronized and fault:
        yield context.diagnosis(fault, calls=calls, names=context.names(context.desynchronized))


# ---------------------------------------------------------------------- between gradient and step

# stages of a gradient after its reduction, and the code that runs before each
_PLACES = {
    "hooked": "in on_after_backward or on_before_optimizer_step",
    "used": "between on_before_optimizer_step and the step: configure_gradient_clipping, or the optimizer itself",
}


def clipped_by_desynchronized_norm(context: AuditContext) -> Iterator[Diagnosis]:
    """F13: one unsynchronised gradient, and the clip factor differs for all."""
    unreduced = context.desynchronized
    # if parameters are equal before the step but not after it, something in between depends on the rank
    equal_before = {row.parameter for row in context.rows if row.ranks_agree}
    drifted = [row for row in context.desynchronized_updates if row.parameter in equal_before]
    if not unreduced or not drifted or not context.info.clip:
        return
    if _scales_or_rates_differ(context) or any(changed_after_reduction(context)):
        return
    names: dict[str, Any] = {"drifted": context.names(drifted), "unreduced": context.names(unreduced)}
    yield context.diagnosis("F13", "norm", about=[*unreduced, *drifted], clip=context.info.clip, **names)


def changed_after_reduction(context: AuditContext) -> Iterator[Diagnosis]:
    """F13: gradients that were equal after the reduction are clipped or changed by some ranks."""
    if first_difference(context.loss_scales) is not None or any(own_backward(context)):
        return
    by_rank = context.stages_by_rank
    apart = [*context.desynchronized, *context.desynchronized_updates]
    names = list(dict.fromkeys(row.parameter for row in apart))
    for name in names:
        if not agree_at(by_rank, "backward", name) and not agree_at(by_rank, "reduced", name):
            return  # another rule judges a gradient that was not reduced
    # ranks start to differ in the module's hooks, or between the hooks and the step
    for stage, place in _PLACES.items():
        changed = [name for name in names if agree_at(by_rank, stage, name) is False]
        if changed:
            who = _changed_by(by_rank, stage, changed[0])
            yield context.diagnosis("F13", parameters=changed, who=who, place=place)
            return


def _changed_by(by_rank: Sequence[dict[str, dict[str, str]]], stage: str, name: str) -> str:
    """Name the ranks that changed their gradient after the reduction."""
    earlier = "reduced"
    if not agree_at(by_rank, earlier, name):
        earlier = "backward"
    ranks = [rank for rank, stages in enumerate(by_rank) if stages[stage].get(name) != stages[earlier][name]]
    return f"by rank {comma_list(ranks)}" if len(ranks) < len(by_rank) else "each rank in its own way"


def changed_outside_step(context: AuditContext) -> Iterator[Diagnosis]:
    """SYNC: the step used the same gradient and rate on all ranks, but the parameter differs after the step."""
    apart = context.desynchronized_updates
    if not apart or _scales_or_rates_differ(context) or any(unequal_start(context)):
        return
    if all(agree_at(context.stages_by_rank, "used", row.parameter) for row in apart):
        yield context.diagnosis("SYNC", about=apart)


def unlike_optimizers(context: AuditContext) -> Iterator[Diagnosis]:
    """F14, F15, F17: loss scales or learning rates differ by rank, or a scaler skipped a step on some ranks."""
    for place, shown in _first_difference(context.loss_scales, "{:g}"):
        # scales differ from the start, or a step was skipped before this one
        column = {"steps" if place else "scale": context.loss_scales[place]}
        for fault in faults_of_optimizers(column).values():
            yield context.diagnosis(fault, step=place + 1, shown=shown)
    for place, shown in _first_difference(context.learning_rates):
        for fault in faults_of_optimizers({"settings": context.learning_rates[place]}).values():
            yield context.diagnosis(fault, step=place + 1, shown=shown)


def _first_difference(columns: Sequence[Sequence[object]], form: str = "{}") -> Iterator[tuple[int, str]]:
    """Yield the index and the text of the first column whose values differ between ranks, if there is one."""
    place = first_difference(columns)
    if place is not None:
        yield place, comma_list(f"rank {rank} {form.format(value)}" for rank, value in enumerate(columns[place]))


def _scales_or_rates_differ(context: AuditContext) -> bool:
    return first_difference([*context.loss_scales, *context.learning_rates]) is not None


# ---------------------------------------------------------------------- state besides the parameters

_SORTED = 1 << 20  # largest buffer, in elements, with rows that are compared one by one


def own_queue(context: AuditContext) -> Iterator[Diagnosis]:
    """F64, F26: a memory of rows, or a statistic of them, that each rank stores separately."""
    for step in range(1, context.step + 1):
        for name in context.ranks.names(step, "buffer"):
            # running statistics are judged by another rule, and counters are not rows
            of_norm = name.rpartition(".")[0] in context.record.norms_at_wrap
            if of_norm or context.ranks.ranks_agree(step, "buffer", name):
                continue
            entries = [entry for entry in context.ranks.entries_of(step, "buffer", name) if entry.exists]
            if entries[0].dtype in ("bool", "int64", "int32") and not entries[0].shape:
                continue
            of_one = context.one.entry(0, step, "buffer", name)
            if any(entry.shape != of_one.shape for entry in entries):
                yield context.diagnosis("F64", "shape", buffer=name, step=step, shapes=_shapes(context, name, step))
                return
            if not _keeps_rows(context, name, step, entries[0]):
                yield context.diagnosis("F64", "statistic", buffer=name, step=step)
                return
            fault = _fault_of_memory(entries)
            yield context.diagnosis(fault, "queue" if fault == "F26" else "audit", buffer=name, step=step)
            return


def global_buffer(context: AuditContext) -> Iterator[Diagnosis]:
    """F64: a buffer that is equal on all ranks, but differs from the buffer of one process."""
    for row in context.wrong_buffers:
        name, step = row.parameter, row.step
        if context.ranks.entry(0, step, "buffer", name).shape != context.one.entry(0, step, "buffer", name).shape:
            yield context.diagnosis(
                "F64", "shape", parameters=[name], buffer=name, step=step, shapes=_shapes(context, name, step)
            )
            return
        if name.rpartition(".")[0] in context.local_norms:
            continue  # judged as statistics of batch norm
        # one that the optimizer's step changed follows from wrong gradients
        ranks = context.ranks.entry(0, step, "forward buffer", name)
        one = context.one.entry(0, step, "forward buffer", name)
        if not context.wrong or ranks.digest != one.digest:
            yield context.diagnosis("F64", "one", parameters=[name], buffer=name, step=step, error=row.error)
            return


def _shapes(context: AuditContext, name: str, step: int) -> str:
    """Return the shape of a buffer on each rank and in one process, as text."""
    entries = context.ranks.entries_of(step, "buffer", name)
    shown = [f"rank {rank} {entry.shape if entry.exists else 'none'}" for rank, entry in enumerate(entries)]
    return f"{comma_list(shown)}; one process {context.one.entry(0, step, 'buffer', name).shape}"


def _keeps_rows(context: AuditContext, name: str, step: int, entry: Entry) -> bool:
    """Return whether a buffer is a memory of rows: some of them outlive a step, but all of a running statistic moves."""
    if not entry.dtype.startswith(("float", "bfloat")) or entry.numel > _SORTED:
        return True
    before = context.ranks.entry(0, step - 1, "initial" if step == 1 else "buffer", name)
    if not before.exists or before.shape != entry.shape:
        return True
    earlier = _sorted_rows(before)
    return any(row in earlier for row in _sorted_rows(entry))


def _fault_of_memory(entries: Sequence[Entry]) -> str:
    """Compare the ranks' rows in any order. Large buffers are not sorted and count as different."""
    contents = [_sorted_rows(entry) for entry in entries if entry.numel <= _SORTED]
    return fault_of_memory(contents) if contents else "F64"


def _sorted_rows(entry: Entry) -> list[list[float]]:
    first = entry.shape[0] if entry.shape else 1
    rows: list[list[float]] = entry.tensor().double().reshape(max(1, first), -1).tolist()
    return sorted(rows)


# ---------------------------------------------------------------------- rounding and overflow


def rounding(context: AuditContext) -> Iterator[Diagnosis]:
    """F78: a difference of the size that the precision makes, gone in float64."""
    # no larger than a few thousand rounding errors, which no fault is
    unit, worst = context.runs.unit, context.comparison.worst()
    if context.desynchronized or not context.wrong or worst > 4096 * unit or unit < 1e-15:
        return
    if context.without("precision").comparison.equal:
        tolerance = max((row.tolerance for row in context.rows), default=0.0)
        numbers: dict[str, Any] = {"worst": worst, "unit": unit, "tolerance": tolerance}
        yield context.diagnosis("F78", severity="explanation", precision=context.info.precision, **numbers)


def not_finite(context: AuditContext) -> Iterator[Diagnosis]:
    """F79: overflow or NaN on one side only, in gradients or in a loss with a finite gradient."""
    odd = [row for row in context.rows if row.verdict == "not finite"]
    batch = context.first_odd_batch
    gradients = ""
    if odd:
        gradients = f"Not finite on rank {odd[0].rank} or in one process, but not in both: {context.names(odd)}. "
    if batch is not None:
        # show the loss of the first micro-batch that is not finite
        values = enumerate(context.losses[batch].ranks)
        losses = comma_list(f"rank {rank} {number_text(value)}" for rank, value in values)
        yield context.diagnosis("F79", gradients=gradients, batch=batch, losses=losses)
    elif odd:
        yield context.diagnosis("F79", "backward", gradients=gradients)


def not_finite_anywhere(context: AuditContext) -> Iterator[Diagnosis]:
    """F79: gradients of one process that are not finite. If both runs are equal, the ranks' gradients are not finite either."""
    # report only the first step with such gradients, because later ones follow from it
    for step in range(1, context.one.steps + 1):
        names = []
        for name, entry in context.one.entries(0, step, "gradient").items():
            if entry.exists and not all(bool(piece.isfinite().all()) for piece in entry.pieces()):
                names.append(name)
        if names:
            numbers: dict[str, Any] = {"name": names[0], "more": len(names) - 1, "step": step}
            severity: Severity = "unclear" if context.comparison.equal else "note"
            yield context.diagnosis("F79", "both", severity=severity, parameters=names, **numbers)
            return


def within_rounding(context: AuditContext) -> Iterator[Diagnosis]:
    """F78: differences that may be caused by the precision or by a fault."""
    rows = context.comparison.unclear
    if rows:
        worst = max(rows, key=lambda row: row.error / row.tolerance)
        fields: dict[str, Any] = {"error": worst.error, "allowed": worst.tolerance, "finding": worst.certain}
        fields |= {"precision": context.info.precision, "worst": context.name(worst.parameter), "count": len(rows)}
        names = dict.fromkeys(row.parameter for row in rows)
        yield context.diagnosis("F78", "unclear", severity="unclear", parameters=[*names], **fields)


# ---------------------------------------------------------------------- a common factor


def metric_as_loss(context: AuditContext) -> Iterator[Diagnosis]:
    """F27: torchmetrics detaches gathered states, except the own slot."""
    metrics = context.record.metric_losses
    factor, _ = context.factors
    if metrics and _fault_of_encoder(context, has_metrics=True) == "F27":
        yield context.diagnosis("F27", metric=metrics[0], factor=number_text(factor, 4))


def factor_on_loss(context: AuditContext) -> Iterator[Diagnosis]:
    """F24: the factor W that compensates for the own-slot gather is also applied to the loss's own weights."""
    encoder, losses = context.factors
    if _scale(context, encoder) == "right" and _scale(context, losses) == "large":
        rows = [row for row in context.rows if row.owner != "encoder"]
        source = context.pml_wrapper or "The loss"
        yield context.diagnosis("F24", about=rows, factor=number_text(losses, 4), source=source)


def gather_without_autograd(context: AuditContext) -> Iterator[Diagnosis]:
    """F20, F23: gradients only pass through this rank's part of the gather."""
    encoder, losses = context.factors
    losses_fit = losses is None or _scale(context, losses) in ("right", "cut")
    if losses_fit and _fault_of_encoder(context) == "F20":
        line = "".join(f" It is at {line}." for _, line in context.cut_lines[:1])
        yield context.diagnosis("F20", encoder=number_text(encoder, 4), losses=number_text(losses, 4), line=line)


def graph_cut(context: AuditContext) -> Iterator[Diagnosis]:
    """F20: no gathered row has a graph, not even this rank's part."""
    encoder = [row for row in context.rows if row.owner == "encoder" and row.verdict == "missing"]
    columns = [context.ranks.entries_of(context.step, "gradient", row.parameter) for row in encoder]
    if encoder and not any(entry.exists for entry in chain.from_iterable(columns)):
        yield context.diagnosis("F20", "cut", about=encoder)


def double_scaling(context: AuditContext) -> Iterator[Diagnosis]:
    """F21, F22: a factor W where none is due."""
    encoder, losses = context.factors
    if context.is_local_mean:
        return  # judged by ``scaled_local_loss``
    is_squared = encoder is not None and math.isclose(encoder, context.W**2, rel_tol=_CLOSE)
    if is_squared or _fault_of_encoder(context) == "F21":
        yield context.diagnosis("F21", encoder=number_text(encoder, 4), losses=number_text(losses, 4))


def targets_of_own_rows(context: AuditContext) -> Iterator[Diagnosis]:
    """F25: the columns of a cross entropy are the rows of all ranks, and every rank's targets count from 0."""
    if not context.wrong or context.is_local_mean:
        return
    for column in context.counted_targets:
        rows = [each.rows for each in column]
        first = [each.first for each in column]
        if starts_at_own_rows(rows, [each.columns for each in column], first):
            fields: dict[str, Any] = {"columns": sum(rows), "rows": comma_list(rows), "start": rows[0]}
            yield context.diagnosis("F25", "unshifted", about=context.wrong, line=column[0].line, **fields)
            return


def own_rows_first(context: AuditContext) -> Iterator[Diagnosis]:
    """F26: the loss depends on the order of rows, and each rank has its own rows first."""
    if context.used_rng or not context.wrong or context.desynchronized or context.is_local_mean:
        return
    reversed_rows = context.against_one("reversed")
    # rounding in a narrower dtype than the dtype of the parameters also depends on the order
    is_large = reversed_rows.worst() > _SHARE_OF_ORDER * context.comparison.worst()
    if is_large and not reversed_rows.equal:
        losses = comma_list(map(number_text, context.losses_at_step))
        yield context.diagnosis("F26", losses=losses, wrapper=context.pml_wrapper or "none")


def traced_cut(context: AuditContext) -> Iterator[Diagnosis]:
    """F20, F23: a collective cuts the graph of rows that receive another share of their gradient correctly."""
    cuts = context.cut_lines
    if cuts and not context.is_local_mean:
        kind, line = cuts[0]
        fault = FAULT_OF_CUT[kind]
        counts: dict[str, Any] = {"count": len(context.wrong), "total": len(context.rows)}
        yield context.diagnosis(fault, "traced", about=context.wrong, line=line, **counts)


def unknown(context: AuditContext) -> Diagnosis:
    """Return a diagnosis with the first location at which the runs differ, for a difference that no rule explains."""
    return Diagnosis(
        "",
        "unknown",
        f"{len(context.wrong)} of {len(context.rows)} gradients differ at step {context.step} and no known pattern "
        f"fits. {context.first_traced_difference()}",
        "Look at that layer: what in it sees more than one row, other ranks, or random numbers?",
    )


# ---------------------------------------------------------------------- the mean of local losses, as DDP promises


def local_batch_norm(context: AuditContext) -> Iterator[Diagnosis]:
    """F59: each rank normalises by its own rows."""
    if context.local_norms and not context.desynchronized and context.without("batch_norm").comparison.equal:
        yield local_statistics(context, "both runs are equal")


def local_statistics(context: AuditContext, outcome: str = "fewer gradients differ") -> Diagnosis:
    """F59, either as the only fault or with another one."""
    rows = comma_list(context.rows_per_rank(context.step))
    return context.diagnosis("F59", about=context.wrong, names=quoted(context.local_norms), rows=rows, outcome=outcome)


def scaled_local_loss(context: AuditContext) -> Iterator[Diagnosis]:
    """F21, F22: the ranks' own losses are multiplied by W."""
    if not context.wrong or context.desynchronized or context.has_local_statistics:
        return
    if context.local_factor == context.W:
        yield context.diagnosis("F21", "local", about=context.wrong)


def summed_loss(context: AuditContext) -> Iterator[Diagnosis]:
    """F18: a loss that is a sum is divided by W in DDP's mean."""
    weights = context.rank_weights
    if weights is not None and all(abs(weight - 1) < 0.02 for weight in weights):
        yield context.diagnosis("F18", "sum")


def mean_of_means(context: AuditContext) -> Iterator[Diagnosis]:
    """F30: ranks with fewer rows, or fewer valid targets, have the same weight as other ranks."""
    weights = context.rank_weights
    rows = context.rows_per_rank(context.step)
    uneven = len(set(rows)) > 1
    if weights is None:
        # weights are not computed at later steps. Here gradients are equal until the first uneven batch
        is_later = context.step > 1 and uneven and context.is_local_mean
        if is_later and context.without("uneven").comparison.equal:
            yield context.diagnosis("F30", "later", rows=comma_list(rows))
        return
    # if the shares are equal, as under DDP, the difference has another cause
    shares_differ = max(weights) - min(weights) > min(0.02, max(1e-6, 64 * context.runs.unit))
    if abs(sum(weights) - 1) > 0.02 or not shares_differ:
        return
    # if weights are in proportion to rows, the sizes of batches differ. Otherwise the numbers of valid targets differ
    reason = "valid targets (ignored, masked or zero elements do not count)"
    pairs = zip(weights, rows, strict=False)
    if uneven and all(abs(weight - count / sum(rows)) < 0.02 for weight, count in pairs):
        reason = f"rows ({comma_list(rows)})"
    shown, case = comma_list(f"{weight:.3f}" for weight in weights), "audit" if len(weights) == context.W else "windows"
    yield context.diagnosis("F30", case, weights=shown, reason=reason, count=len(weights))


def never_gathered(context: AuditContext) -> Iterator[Diagnosis]:
    """F29, F31: a loss that is not a mean over rows only uses this rank's rows."""
    if not context.wrong or context.desynchronized or not context.is_local_mean or context.local_mean_is_right:
        return
    if context.has_local_statistics:
        return  # local statistics have the same pattern. The rule is applied again with batch norm in evaluation mode
    if context.keeps_gradients_of_exchanged_rows:
        yield _counts_by_place(context)
        return
    losses = context.losses_at_step
    without_pairs = [rank for rank, loss in enumerate(losses) if loss == 0.0]
    cosine = f"{min(row.cosine for row in context.wrong):.3f}"
    found = "Gradients differ" if cosine == "1.000" else f"Gradients point elsewhere (cosine down to {cosine})"
    if None not in losses:  # the user's loop may return no loss
        found += f". Ranks' losses {comma_list(map(number_text, losses))}"
    of_one = context.one.records[0].losses[0]
    if context.step == 1 and of_one is not None:
        found += f", on the concatenated embeddings {number_text(of_one)}"
    if without_pairs:
        yield context.diagnosis("F31", found=found, rank=without_pairs[0])
    elif context.info.pair_losses:
        yield context.diagnosis("F29", "pairs", found=found, losses=quoted(context.info.pair_losses))
    else:
        # a loss over pairs cannot be distinguished from a function of a mean: |mean of y|^2 is a mean over pairs
        yield context.diagnosis("F29", "mean", found=found)


def _counts_by_place(context: AuditContext) -> Diagnosis:
    """F72, or no known fault: rows may be moved to other ranks, but not to other positions in a batch."""
    if "randomness" not in context.off:
        same_draws = context.with_same_draws()
        if not isinstance(same_draws, str) and same_draws.comparison.equal:
            return context.diagnosis("F72", "shared", severity="explanation")
    return Diagnosis(
        "",
        "a row's place in its batch counts",
        "No row meets another one, but a row's gradient depends on its place in the rank's batch (weights or noise by "
        "position), and places are others in the batch of one process.",
        "Take what belongs to a row from the row (its data or its index in the data set), not from its place; else nothing is wrong "
        "but that W ranks differ from one process.",
        confirmed="rows that change ranks and keep their places have the same gradients",
    )


# ---------------------------------------------------------------------- helpers of the rules


_CLOSE = 0.05  # relative distance of a ratio from a known one
_SHARE_OF_ORDER = 0.01  # share of the largest error that a different order of the rows must explain


def _scale(context: AuditContext, ratio: float | None) -> str:
    return scale_of(ratio, context.W, _CLOSE)


def _fault_of_encoder(context: AuditContext, *, has_metrics: bool = False) -> str:
    """Return the fault of the encoder's common ratio."""
    encoder, _ = context.factors
    return fault_of_scale(scale_of(encoder, context.W, _CLOSE), has_metrics=has_metrics)


DATA_RULES: tuple[Rule, ...] = (identical_batches, repeated_rows, sampler_shuffled_apart, accumulation_factor)
"""Rules for every audit."""

UNCLEAR_RULES: tuple[Rule, ...] = (not_finite_anywhere, within_rounding)
"""Rules that are applied if nothing differs for certain."""

DESYNC_RULES: tuple[Rule, ...] = (
    parameter_order,
    unlike_optimizers,
    clipped_by_desynchronized_norm,
    changed_after_reduction,
    norm_converted_late,
    changed_after_wrap,
    unregistered_loss,
    own_backward,
    unequal_start,
    changed_outside_step,
    never_reduced,
)
"""Rules for ranks that do not agree with each other. All rules that apply are reported, in this order."""

STATE_RULES: tuple[Rule, ...] = (own_queue, global_buffer)
"""Rules for buffers."""

BESIDE_STAGES: tuple[tuple[Rule, ...], ...] = (STATE_RULES, (scaled_local_loss,))
"""Stages of faults that may explain only some differences. Faults found by other stages are reported in addition."""

FIRST_STAGES: tuple[tuple[Rule, ...], ...] = (
    STATE_RULES,
    (rounding,),
    DESYNC_RULES,
    (not_finite,),
    (clipped_before_reduction,),
    (metric_as_loss,),
    (factor_on_loss,),
    (local_batch_norm,),
    (scaled_local_loss,),
    (summed_loss,),
    (mean_of_means,),
)
"""Stages that are applied in order if something differs, until a stage finds a fault."""

LAST_STAGES: tuple[tuple[Rule, ...], ...] = (
    (targets_of_own_rows,),
    (never_gathered,),
    (gather_without_autograd, graph_cut),
    (double_scaling,),
    (own_rows_first,),
    (traced_cut,),
)
"""Stages that are applied if neither ``FIRST_STAGES`` nor the terms of the loss have explained the difference."""
