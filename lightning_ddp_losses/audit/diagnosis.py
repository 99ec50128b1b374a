"""From an audit to ranked diagnoses: randomness is removed first, then rules are applied in stages until one explains the difference.

A loss with several terms is diagnosed term by term before rules are applied to the whole loss, because its terms may have different faults,
and some terms may be correct. Faults that do not explain every difference (a buffer, a factor on the loss) are stored, and the search
continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, comma_list, first_part, quoted
from lightning_ddp_losses.audit.rules import (
    BESIDE_STAGES,
    DATA_RULES,
    DESYNC_RULES,
    FIRST_STAGES,
    LAST_STAGES,
    UNCLEAR_RULES,
    Rule,
    local_statistics,
    unknown,
)
from lightning_ddp_losses.errors import DDPLossError


def diagnose(context: AuditContext) -> list[Diagnosis]:
    """Return the causes of differences from one process, most likely first. Faults of the data are reported in equal runs too."""
    # apply rules for the data even if every gradient is equal
    found = ask(DATA_RULES, context)
    if context.comparison.equal:
        return found + ask(UNCLEAR_RULES, context)

    # randomness hides other differences, so it is removed first
    if context.used_rng and "randomness" not in context.off:
        return found + _under_same_draws(context)

    return found + (_ask_stages(context) or [unknown(context)])


def _under_same_draws(context: AuditContext) -> list[Diagnosis]:
    """Return causes other than random numbers, and F72 if random numbers explain some differences."""
    quiet = context.with_same_draws()
    if isinstance(quiet, str):
        return _draws_not_comparable(context, quiet)
    if quiet.comparison.equal and context.draws_explain_differences:
        return [_random_numbers_differ(context, alone=True)]
    if quiet.used_rng:
        where = "Random numbers are drawn outside of the step and its backward (in another hook)."
        return _draws_not_comparable(context, where)
    try:
        rest = _ask_stages(quiet)
    except DDPLossError as error:  # draws may be impossible for rows on other ranks or in another order
        return _draws_not_comparable(context, first_part(error))
    found = [_under(each, "the same random numbers for each row, on ranks and in one process") for each in rest]
    explained = context.draws_explain_differences
    if not found:  # all runs except the user's start with rank 0's weights, which may hide a difference
        found = ask(DESYNC_RULES, context) or [unknown(quiet if explained else context)]
    if explained and _differs_less(quiet, context):
        found.append(_random_numbers_differ(context, alone=False))
    return found


def ask(rules: Iterable[Rule], context: AuditContext) -> list[Diagnosis]:
    """Apply all rules in order, and return their diagnoses."""
    return [diagnosis for rule in rules for diagnosis in rule(context)]


def _ask_stages(context: AuditContext) -> list[Diagnosis]:
    """Apply the rules stage by stage. If none applies, repeat this with batch norm in evaluation mode."""
    beside: list[Diagnosis] = []
    for stage in (*FIRST_STAGES, (wrong_terms,), *LAST_STAGES):
        found = ask(stage, context)
        if stage in BESIDE_STAGES:
            beside += found
        elif found:
            return _without_repeats(found + beside if stage is DESYNC_RULES else beside + found)
    has_norms = bool(context.record.norms_at_wrap) and "batch_norm" not in context.off
    if beside or not has_norms:
        return beside
    # statistics of batch norm may hide another cause, since a replay on one rank's rows has different statistics in any case
    eval_mode = context.without("batch_norm")
    rest = [_under(each, "batch norm in evaluation mode") for each in _ask_stages(eval_mode)]
    if rest and context.local_norms and (_differs_less(eval_mode, context) or context.parts_at_local_norm):
        rest.append(local_statistics(context))
    return rest


def wrong_terms(context: AuditContext) -> Iterator[Diagnosis]:
    """Diagnose each term of the loss separately if there are several, because some may be correct and others may have different faults."""
    if context.has_local_statistics:
        return  # every term is wrong. The terms are diagnosed again with batch norm in evaluation mode
    lines = context.terms
    answers: list[tuple[int, Diagnosis]] = []
    for number in range(len(lines)):
        alone = context.term_alone(number)
        if alone.wrong:
            answers += [(number, each) for each in _ask_stages(alone) or [unknown(alone)]]
    if not any(each.fault for _, each in answers):
        return  # no term has a known fault, so rules are applied to the whole loss
    # merge equal faults of several terms. List a mean of means, which other fixes may resolve, and unknown causes last
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, each in answers:
        numbers.setdefault((each.fault, each.title), []).append(number)
    for number, each in sorted(answers, key=_rank_of_term):
        of_terms = numbers[each.fault, each.title]
        if number == of_terms[0]:
            shown = comma_list(f"{of_term + 1} ({lines[of_term] or 'line unknown'})" for of_term in of_terms)
            yield _under(each, f"only term {shown} of the loss's {len(lines)} terms")


def _rank_of_term(answer: tuple[int, Diagnosis]) -> int:
    """Return a sort key that puts informative diagnoses of terms first."""
    _, found = answer
    return {"": 2, "F30": 1}.get(found.fault, 0)


def _without_repeats(found: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Remove diagnoses of a part that were already made for the whole."""
    first: dict[tuple[str, str], Diagnosis] = {}
    for each in found:
        first.setdefault((each.fault, each.title), each)
    return [*first.values()]


def _under(found: Diagnosis, condition: str) -> Diagnosis:
    return dataclasses.replace(found, evidence=f"(With {condition}.) {found.evidence}")


def _differs_less(ablated: AuditContext, context: AuditContext) -> bool:
    return len(ablated.wrong) < len(context.wrong) or ablated.step > context.step


def _source_of_draws(context: AuditContext) -> str:
    if context.info.dropout:
        return f"dropout in {quoted(context.info.dropout)}"
    return "random numbers in training_step" if context.by_trainer else "random numbers in the loop"


def _draws_not_comparable(context: AuditContext, reason: str) -> list[Diagnosis]:
    """Return F72 if other differences from one process cannot be determined, and diagnoses of differences between ranks."""
    found = context.diagnosis("F72", "refused", severity="unclear", source=_source_of_draws(context), reason=reason)
    return [*ask(DESYNC_RULES, context), found]


def _random_numbers_differ(context: AuditContext, *, alone: bool) -> Diagnosis:
    """F72, either as the only fault or with another one."""
    source = _source_of_draws(context)
    confirmed = ""
    if alone:
        confirmed = "with the same random numbers for each row both runs are equal"
    return context.diagnosis("F72", severity="explanation", source=source, confirmed=confirmed)
