"""From an audit to ranked diagnoses and notes: randomness is taken out first, then stage by stage until a rule knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, comma_list, quoted
from lightning_ddp_losses.audit.rules import DATA_RULES, STAGES, Rule, local_statistics, unknown


def diagnose(context: AuditContext) -> list[Diagnosis]:
    """Return why the ranks differ from one process, the likeliest first. Faults of the data count in equal runs too."""
    # the data: also where every gradient is equal
    found = ask(DATA_RULES, context)
    if context.comparison.equal:
        return found

    # randomness hides everything else: without it first
    if context.used_rng and "randomness" not in context.off:
        quiet = context.without("randomness")
        if quiet.comparison.equal:
            return [*found, _random_numbers_differ(context, alone=True)]
        rest = _ask_stages(quiet)
        if rest:
            found += [_under(each, "every random draw replaced by its mean") for each in rest]
            if _differs_less(quiet, context):
                found.append(_random_numbers_differ(context, alone=False))
            return found
        if context.changes_with_seed():
            return [*found, context.diagnosis("F72", "no_mean", severity="explanation")]
        context = quiet

    return found + (_ask_stages(context) or [unknown(context)])


def ask(rules: Iterable[Rule], context: AuditContext) -> list[Diagnosis]:
    """Collect the answers of all rules, in order."""
    return [diagnosis for rule in rules for diagnosis in rule(context)]


def _ask_stages(context: AuditContext) -> list[Diagnosis]:
    """Ask the rules stage by stage. If none answers, ask once more with batch norm in evaluation mode."""
    for stage in STAGES:
        found = ask(stage, context)
        if found:
            return found
    if not context.local_norms or "batch_norm" in context.off:
        return []
    # perhaps the statistics of batch norm hide something else
    eval_mode = context.without("batch_norm")
    rest = [_under(each, "batch norm in evaluation mode") for each in _ask_stages(eval_mode)]
    if rest and _differs_less(eval_mode, context):
        rest.append(local_statistics(context))
    return rest


def _under(found: Diagnosis, condition: str) -> Diagnosis:
    return dataclasses.replace(found, evidence=f"(With {condition}.) {found.evidence}")


def _differs_less(ablated: AuditContext, context: AuditContext) -> bool:
    return len(ablated.wrong) < len(context.wrong) or ablated.step > context.step


def _random_numbers_differ(context: AuditContext, *, alone: bool) -> Diagnosis:
    """F72, alone or with another fault."""
    source = "random numbers in training_step"
    if context.info.dropout:
        source = f"dropout in {quoted(context.info.dropout)}"
    confirmed = "with every draw replaced by its mean both runs are equal" if alone else ""
    return context.diagnosis("F72", severity="explanation", source=source, confirmed=confirmed)


# ---------------------------------------------------------------------- notes


def notes(context: AuditContext) -> list[Diagnosis]:
    """List notes on both runs: no difference, but worth knowing."""
    found = ask((_without_optimizer, _accumulated_rows, _changed_dtype, _overflow, _repeated_in_validation), context)
    if context.runs.needs_group:
        found.append(context.diagnosis("F09", "group", severity="note"))
    if context.by_trainer:
        found.append(_meaning_of_a_batch(context))
    return found


def _without_optimizer(context: AuditContext) -> Iterator[Diagnosis]:
    names = context.info.unoptimized
    # tensors in the optimizers that are not the module's
    foreign = _foreign_parameters(context)
    if foreign:
        fields: dict[str, Any] = {"count": len(foreign), "first": foreign[0], "unoptimized": quoted(names) or "none"}
        yield context.diagnosis("F02", "foreign", severity="note", **fields)
    elif names:
        yield context.diagnosis("F01", severity="note", names=quoted(names))


def _repeated_in_validation(context: AuditContext) -> Iterator[Diagnosis]:
    repeated = context.runs.user_run.records[0].module_info.repeated_rows
    counts = comma_list(f"loader {index}: {rows}" for index, rows in enumerate(repeated) if rows)
    if counts:
        yield context.diagnosis("F54", severity="note", counts=counts)


def _foreign_parameters(context: AuditContext) -> list[str]:
    """List parameters in optimizers that are not the module's and had no gradient at any step, on no side."""
    stepped: set[str] = set()
    with_gradient: set[str] = set()
    for run in (context.one, context.ranks):
        for step in range(1, run.steps + 1):
            entries = run.entries(0, step, "gradient")
            stepped |= entries.keys()
            with_gradient |= {name for name, entry in entries.items() if entry.exists}
    owners = context.info.owners
    return [name for name in owners if owners[name] == "unregistered" and name in stepped - with_gradient]


def _accumulated_rows(context: AuditContext) -> Iterator[Diagnosis]:
    if context.info.accumulate <= 1 or not context.info.automatic:
        return
    # random draws and batch statistics are others in one large batch, for any loss
    off = {"randomness"} if context.used_rng else set()
    if context.record.norms_at_wrap:
        off.add("batch_norm")
    quiet = context if off <= context.off else context.without(*off)
    if quiet.used_rng and quiet.changes_with_seed():
        return  # draws that no mean can replace
    sizes = {batch.total_rows for record in context.ranks.records for batch in record.batches}
    # unequal pieces of a plain mean differ from it too
    if quiet.needs_micro_batches() and not (len(sizes) > 1 and quiet.is_local_mean):
        yield context.diagnosis("F33", severity="note", accumulate=context.info.accumulate)


def _changed_dtype(context: AuditContext) -> Iterator[Diagnosis]:
    # in one process: on the ranks it is a difference, and a rule's business
    events = context.one.records[0].parameter_events
    for name, what in events.items():
        if what.startswith("changed from"):
            yield context.diagnosis("F78", "changed", severity="note", name=name, event=what)
            return


def _overflow(context: AuditContext) -> Iterator[Diagnosis]:
    # the first step that has such gradients: later ones follow from it
    for step in range(1, context.one.steps + 1):
        names = []
        for name, entry in context.one.entries(0, step, "gradient").items():
            if entry.exists and not all(bool(piece.isfinite().all()) for piece in entry.pieces()):
                names.append(name)
        if names:
            fields: dict[str, Any] = {"name": names[0], "more": len(names) - 1, "step": step}
            yield context.diagnosis("F79", "both", severity="note", **fields)
            return


def _meaning_of_a_batch(context: AuditContext) -> Diagnosis:
    # rows of a step against those of one device, for which learning rates are tuned
    rows = context.rows_per_rank(1)
    rates = sorted(set(chain.from_iterable(context.record.learning_rates[:1])))
    return context.diagnosis(
        "F18",
        "batch",
        severity="note",
        total=sum(rows),
        summands=" + ".join(map(str, rows)),
        accumulate=context.info.accumulate,
        rates=comma_list(f"{rate:g}" for rate in rates) or "unknown",
        rows=rows[0],
        factor=sum(rows) / max(1, rows[0]),
    )
