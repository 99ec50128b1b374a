"""From a case to ranked diagnoses and notes: randomness is taken out first, then stage by stage until a rule knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning_ddp_losses.audit.context import Case, Diagnosis
from lightning_ddp_losses.audit.rules import DATA, STAGES, local_statistics, unknown

MakeCase = Callable[[frozenset[str]], Case]


def diagnose(case: Case, make: MakeCase) -> list[Diagnosis]:
    """Why the ranks differ from one process, the likeliest first; faults of the data also where nothing differs.

    Args:
        case: The audit as it ran.
        make: The same audit with something switched off.
    """
    found = [diagnosis for rule in DATA if (diagnosis := rule(case)) is not None]
    if case.comparison.equal:
        return found
    if case.draws and "randomness" not in case.switched_off:
        off = frozenset(case.switched_off) | {"randomness"}
        still = make(off)
        if still.comparison.equal:
            return [*found, _randomness(case, True)]
        rest = _by_stages(still, make)
        if rest:
            rest = [_under(each, "every random draw replaced by its mean") for each in rest]
            return [*found, *rest, *([_randomness(case, False)] if _less(still, case) else [])]
        if not case.counters.reseeded().equal:
            return [*found, _draws_without_mean(case)]
        case = still
    return found + (_by_stages(case, make) or [unknown(case)])


def _by_stages(case: Case, make: MakeCase) -> list[Diagnosis]:
    for stage in STAGES:
        found = [diagnosis for rule in stage if (diagnosis := rule(case)) is not None]
        if found:
            return found
    norms = any("Sync" not in kind for kind in case.facts["norms_wrapped"].values())
    if norms and "batch_norm" not in case.switched_off:  # perhaps its statistics hide something else
        still = make(frozenset(case.switched_off) | {"batch_norm"})
        rest = [_under(each, "batch norm in evaluation mode") for each in _by_stages(still, make)]
        return [*rest, *([local_statistics(case)] if rest and _less(still, case) else [])]
    return []


def _under(found: Diagnosis, condition: str) -> Diagnosis:
    return dataclasses.replace(found, evidence=f"(With {condition}.) {found.evidence}")


def _less(still: Case, case: Case) -> bool:
    return len(still.wrong) < len(case.wrong) or still.step > case.step


def _randomness(case: Case, alone: bool) -> Diagnosis:
    layers = case.facts["dropout"]
    source = f"dropout in {', '.join(f'`{n}`' for n in layers[:3])}" if layers else "random numbers in training_step"
    return Diagnosis(
        "F72",
        "random numbers differ",
        f"A step draws random numbers ({source}); {case.W} processes and one cannot draw the same ones for "
        f"the same rows." + ("" if alone else " It was switched off to find the rest."),
        'Nothing is wrong in expectation. Audit without it: audit(..., without=("randomness",)). '
        "Give ranks different seeds for noise, the same for initial weights.",
        confirmed="with every draw replaced by its mean both runs are equal" if alone else "",
        severity="explanation",
    )


def _draws_without_mean(case: Case) -> Diagnosis:
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


def notes(case: Case, *, needs_group: bool) -> list[Diagnosis]:
    """What is true of both runs: no difference, but worth knowing."""
    found = [note for rule in (_unoptimised, _accumulated, _dtype, _overflow) if (note := rule(case)) is not None]
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
    return [*found, _meaning(case)]


def _note(fault: str, title: str, evidence: str, fix: str, confirmed: str = "") -> Diagnosis:
    return Diagnosis(fault, title, evidence, fix, confirmed, severity="note")


def _unoptimised(case: Case) -> Diagnosis | None:
    names = case.facts["unoptimised"]
    if not names:
        return None
    return _note(
        "F01",
        "a parameter in no optimizer",
        f"{', '.join(f'`{n}`' for n in names[:4])}{' ...' if len(names) > 4 else ''}: trainable, but no "
        f"optimizer moves it.",
        "Add it in configure_optimizers (the loss's parameters in a group of their own if they need their "
        "own learning rate), or freeze it.",
        "optimizers compared with the module's parameters",
    )


def _accumulated(case: Case) -> Diagnosis | None:
    if case.facts["accumulate"] <= 1 or not case.facts["automatic"] or case.counters.whole().equal:
        return None
    if case.local and len({b["rows"] for page in case.ranks.facts for b in page["batches"]}) > 1:
        return None  # unequal pieces of a plain mean
    return _note(
        "F33",
        "accumulation with a loss over pairs",
        f"{case.facts['accumulate']} batches accumulated are not one batch of their rows: the loss compares "
        f"rows, and sees those of one batch at a time.",
        "More devices, or microbatched(...) for a large batch at a small batch's memory.",
        "one process without accumulation has other gradients",
    )


def _dtype(case: Case) -> Diagnosis | None:
    changed = {n: e for n, e in case.one.facts[0]["events"].items() if e.startswith("changed")}
    if not changed:
        return None
    name, what = next(iter(changed.items()))
    return _note(
        "F78",
        "a weight changes its dtype in forward",
        f"`{name}` {what} in one process; what it loses stays lost.",
        "Use strategy='ddp_losses', or run the loss outside autocast on embeddings of the weight's dtype.",
    )


def _overflow(case: Case) -> Diagnosis | None:
    names = [
        n
        for n, entry in case.one.entries(0, 1, "gradient").items()
        if entry.exists and not all(bool(p.isfinite().all()) for p in entry.pieces())
    ]
    if not names:
        return None
    return _note(
        "F79",
        "gradients that are not finite in both runs",
        f"`{names[0]}`{' and others' if len(names) > 1 else ''} at step 1.",
        "With fp16 the scaler's first steps may overflow and are skipped; otherwise look for the layer that gives NaN.",
    )


def _meaning(case: Case) -> Diagnosis:
    each = case.rows_per_rank(1)
    factor = sum(each) / max(1, each[0])
    rates = sorted(set((case.facts["learning_rates"] or [[]])[0]))
    return _note(
        "F18",
        "what a batch is here",
        f"One optimizer step sees {sum(each)} rows: {' + '.join(map(str, each))} on {case.W} ranks "
        f"(accumulation {case.facts['accumulate']}). "
        f"Learning rate{'s' if len(rates) > 1 else ''} {', '.join(f'{r:g}' for r in rates) or 'unknown'}.",
        f"If a run on one device with {each[0]} rows a step did better, that is not DDP: it made "
        f"{factor:.3g} times as many steps. Linear scaling would multiply "
        f"the learning rate by {factor:.3g} here.",
    )
