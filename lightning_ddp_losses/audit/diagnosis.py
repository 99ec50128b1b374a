"""From an audit to ranked diagnoses and notes: randomness is taken out first, then stage by stage until a rule knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, comma_list, plural
from lightning_ddp_losses.audit.rules import DATA_RULES, STAGES, local_statistics, unknown

MakeContext = Callable[[frozenset[str]], AuditContext]


def diagnose(context: AuditContext, make: MakeContext) -> list[Diagnosis]:
    """Say why the ranks differ from one process, the likeliest first; faults of the data also where nothing differs.

    Args:
        context: The audit as it ran.
        make: The same audit with something switched off.
    """
    # the data: also where every gradient is equal
    found = [diagnosis for rule in DATA_RULES if (diagnosis := rule(context)) is not None]
    if context.comparison.equal:
        return found

    # randomness hides everything else: without it first
    if context.used_rng and "randomness" not in context.switched_off:
        quiet = make(frozenset(context.switched_off) | {"randomness"})
        if quiet.comparison.equal:
            return [*found, _random_numbers_differ(context, alone=True)]
        rest = _ask_stages(quiet, make)
        if rest:
            found += [_under(each, "every random draw replaced by its mean") for each in rest]
            if _differs_less(quiet, context):
                found.append(_random_numbers_differ(context, alone=False))
            return found
        if not context.counterfactual.reseeded().equal:
            return [*found, _draws_without_mean(context)]
        context = quiet

    return found + (_ask_stages(context, make) or [unknown(context)])


def _ask_stages(context: AuditContext, make: MakeContext) -> list[Diagnosis]:
    """Ask the rules stage by stage; where none knows, once more with batch norm in evaluation mode."""
    for stage in STAGES:
        found = [diagnosis for rule in stage if (diagnosis := rule(context)) is not None]
        if found:
            return found
    local_norms = any("Sync" not in kind for kind in context.record.norms_at_wrap.values())
    if not local_norms or "batch_norm" in context.switched_off:
        return []
    # perhaps the statistics of batch norm hide something else
    eval_mode = make(frozenset(context.switched_off) | {"batch_norm"})
    rest = [_under(each, "batch norm in evaluation mode") for each in _ask_stages(eval_mode, make)]
    if rest and _differs_less(eval_mode, context):
        rest.append(local_statistics(context))
    return rest


def _under(found: Diagnosis, condition: str) -> Diagnosis:
    return dataclasses.replace(found, evidence=f"(With {condition}.) {found.evidence}")


def _differs_less(ablated: AuditContext, context: AuditContext) -> bool:
    return len(ablated.wrong) < len(context.wrong) or ablated.step > context.step


def _random_numbers_differ(context: AuditContext, *, alone: bool) -> Diagnosis:
    """F72, alone or beside something else."""
    source = "random numbers in training_step"
    if context.info.dropout:
        layers = ", ".join(f"`{name}`" for name in context.info.dropout[:3])
        source = f"dropout in {layers}"
    evidence = f"A step draws random numbers ({source}); {context.W} processes and one cannot draw the same ones for the same rows."
    confirmed = ""
    if alone:
        confirmed = "with every draw replaced by its mean both runs are equal"
    else:
        evidence += " It was switched off to find the rest."
    return Diagnosis(
        "F72",
        "random numbers differ",
        evidence,
        'Nothing is wrong in expectation. Audit without it: audit(..., without=("randomness",)). '
        "Give ranks different seeds for noise, the same for initial weights.",
        confirmed=confirmed,
        severity="explanation",
    )


def _draws_without_mean(context: AuditContext) -> Diagnosis:
    """F72 for draws that no mean can replace."""
    return Diagnosis(
        "F72",
        "random numbers differ",
        "A step draws random numbers that have no mean to put in their place (a permutation, sampled "
        "pairs): one process with another seed has other "
        "gradients too.",
        "Draw them from a generator that is seeded alike for the same rows (GlobalBatchLoss draws alike on "
        "all ranks), or audit with the draw fixed.",
        confirmed="one process with two seeds",
        severity="explanation",
    )


# ---------------------------------------------------------------------- notes


def notes(context: AuditContext, make: MakeContext, *, needs_group: bool) -> list[Diagnosis]:
    """List what is true of both runs: no difference, but worth knowing.

    Args:
        context: The audit as it ran.
        make: The same audit with something switched off.
        needs_group: The module calls torch.distributed itself.
    """
    rules = (
        _without_optimizer,
        partial(_accumulated_rows, make=make),
        _changed_dtype,
        _overflow,
        _repeated_in_validation,
    )
    found = [note for rule in rules if (note := rule(context)) is not None]
    if needs_group:
        found.append(
            _note(
                "F09",
                "the module does not run without a process group",
                "It calls torch.distributed itself; the one process was given a group of a single rank.",
                "Guard such calls with torch.distributed.is_initialized(), so that the module trains on one "
                "device too.",
            )
        )
    return [*found, _meaning_of_a_batch(context)]


def _note(fault: str, title: str, evidence: str, fix: str, confirmed: str = "") -> Diagnosis:
    return Diagnosis(fault, title, evidence, fix, confirmed, severity="note")


def _without_optimizer(context: AuditContext) -> Diagnosis | None:
    names = context.info.unoptimized
    listed = ", ".join(f"`{name}`" for name in names[:4])
    if len(names) > 4:
        listed += " ..."
    # what the optimizers hold in the module's place
    foreign = _foreign_parameters(context)
    if foreign:
        instead = ""
        if names:
            instead = f", while {listed} {plural(names, 'is', 'are')} in none"
        return _note(
            "F02",
            "an optimizer holds other parameters than the module's",
            f"{len(foreign)} {plural(foreign, 'tensor', 'tensors')} in the optimizers, the first as `{foreign[0]}`, "
            f"{plural(foreign, 'belongs', 'belong')} to no part of the module and {plural(foreign, 'gets', 'get')} no gradient{instead}.",
            "Build the optimizer in configure_optimizers from self.parameters(): it holds a copy, or what stood in the module "
            "before a part of it was replaced.",
            "optimizers compared with the module's parameters",
        )
    if not names:
        return None
    return _note(
        "F01",
        "a parameter in no optimizer",
        f"{listed}: trainable, but no optimizer moves it.",
        "Add it in configure_optimizers (the loss's parameters in a group of their own if they need their "
        "own learning rate), or freeze it.",
        "optimizers compared with the module's parameters",
    )


def _repeated_in_validation(context: AuditContext) -> Diagnosis | None:
    repeated = context.user_run.records[0].module_info.repeated_rows
    if not any(repeated):
        return None
    counts = comma_list(f"loader {index}: {rows}" for index, rows in enumerate(repeated) if rows)
    return _note(
        "F54",
        "validation counts rows twice",
        f"So that all ranks have as many, some rows are handed out twice ({counts}); every metric of the epoch counts them twice.",
        'Use DDPLossStrategy(evaluation="exact"), which gives each row to one rank; around a batch sampler or a DistributedSampler of your '
        "own, GlobalBatchSampler.batches(sampler).",
        "the validation loaders' samplers",
    )


def _foreign_parameters(context: AuditContext) -> list[str]:
    """List what optimizers hold, is not the module's, and had no gradient at any step, in one process as on the ranks."""
    stepped: set[str] = set()
    with_gradient: set[str] = set()
    for run in (context.one, context.ranks):
        for step in range(1, run.steps + 1):
            entries = run.entries(0, step, "gradient")
            stepped |= entries.keys()
            with_gradient |= {name for name, entry in entries.items() if entry.exists}
    owners = context.info.owners
    return [name for name in owners if owners[name] == "unregistered" and name in stepped - with_gradient]


def _accumulated_rows(context: AuditContext, make: MakeContext) -> Diagnosis | None:
    info = context.info
    if info.accumulate <= 1 or not info.automatic:
        return None
    # random draws and batch statistics are others in one large batch, whatever the loss is
    off = set(context.switched_off)
    if context.used_rng:
        off.add("randomness")
    if context.record.norms_at_wrap:
        off.add("batch_norm")
    quiet = context
    if off != set(context.switched_off):
        quiet = make(frozenset(off))
    if quiet.used_rng and not quiet.counterfactual.reseeded().equal:
        return None  # draws that no mean can replace
    if quiet.counterfactual.unaccumulated().equal:
        return None
    sizes = set()
    for record in context.ranks.records:
        sizes |= {batch.total_rows for batch in record.batches}
    if len(sizes) > 1 and quiet.is_local_mean:
        return None  # unequal pieces of a plain mean
    return _note(
        "F33",
        "accumulated batches are not one large batch",
        f"{info.accumulate} batches accumulated are not one batch of their rows: the loss compares rows (or is not linear in "
        "their mean), and sees those of one batch at a time.",
        "For more negatives draw one large batch and run the encoder over it in pieces: microbatched(encoder) needs a small batch's "
        "memory; or take more devices. GlobalBatchLoss joins the rows of all ranks, not those of several batches.",
        "one process without accumulation has other gradients",
    )


def _changed_dtype(context: AuditContext) -> Diagnosis | None:
    # in one process: on the ranks it is a difference, and a rule's business
    events = context.one.records[0].parameter_events
    for name, what in events.items():
        if what.startswith("changed from"):
            return _note(
                "F78",
                "a weight changes its dtype in forward",
                f"`{name}` {what} in one process; what it loses stays lost.",
                "Use strategy='ddp_losses', or run the loss outside autocast on embeddings of the weight's dtype.",
            )
    return None


def _overflow(context: AuditContext) -> Diagnosis | None:
    # the first step that has such gradients: what comes after it follows
    for step in range(1, context.one.steps + 1):
        names = []
        for name, entry in context.one.entries(0, step, "gradient").items():
            if entry.exists and not all(bool(piece.isfinite().all()) for piece in entry.pieces()):
                names.append(name)
        if names:
            others = plural(names, "", " and others")
            return _note(
                "F79",
                "gradients that are not finite in both runs",
                f"`{names[0]}`{others} at step {step}. From there on equal means no more than that both are not finite.",
                "NaN is often a mean over nothing (an empty class or mask), or a root or logarithm at zero. With fp16 the scaler's first "
                "steps may overflow and are skipped.",
            )
    return None


def _meaning_of_a_batch(context: AuditContext) -> Diagnosis:
    # rows of a step against those of one device, which is what learning rates are tuned for
    rows = context.rows_per_rank(1)
    factor = sum(rows) / max(1, rows[0])
    summands = " + ".join(map(str, rows))
    rates: list[float] = []
    if context.record.learning_rates:
        rates = sorted(set(context.record.learning_rates[0]))
    shown_rates = ", ".join(f"{rate:g}" for rate in rates) or "unknown"
    return _note(
        "F18",
        "what a batch is here",
        f"One optimizer step sees {sum(rows)} rows: {summands} on {context.W} ranks "
        f"(accumulation {context.info.accumulate}). "
        f"Learning {plural(rates, 'rate', 'rates')} {shown_rates}.",
        f"If a run on one device with {rows[0]} rows a step did better, that is not DDP: it made "
        f"{factor:.3g} times as many steps. Linear scaling would multiply "
        f"the learning rate by {factor:.3g} here.",
    )
