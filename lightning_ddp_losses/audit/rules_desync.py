"""Rules for ranks that do not agree with each other: something is not synchronised.

They are one stage: all that apply are named, in the order of ``DESYNC_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, comma_list, plural
from lightning_ddp_losses.audit.rank_record import Entry

# ---------------------------------------------------------------------- at the wrap


def parameter_order(context: AuditContext) -> Diagnosis | None:
    """F12: DDP pairs by position."""
    orders = [record.parameter_order for record in context.ranks.records]
    first = _first_difference(list(zip_longest(*orders, fillvalue="nothing")), "`{}`")
    if first is None:
        return None
    at, shown = first
    return Diagnosis(
        "F12",
        "parameters are registered in another order per rank",
        f"Position {at}: {shown}. DDP pairs parameters by position.",
        "Register submodules in a fixed order (sort names; no iteration over sets).",
        confirmed="names compared at the wrap",
    )


def norm_converted_late(context: AuditContext) -> Diagnosis | None:
    """F60: a batch norm that was replaced after the wrap, or that the conversion did not reach."""
    at_wrap, in_training = context.record.norms_at_wrap, context.record.norms_in_training
    # replaced since the wrap, or not reached by the conversion that the trainer was asked for
    late = [name for name, kind in in_training.items() if at_wrap.get(name, kind) != kind]
    plain = [name for name, kind in in_training.items() if "Sync" not in kind]
    if late:
        kinds = f"{at_wrap[late[0]]} when DDP was built and {in_training[late[0]]} when training began"
        evidence = f"`{late[0]}` was a {kinds}: DDP knows the old layer's parameters, not the new one's."
    elif plain and context.info.sync_batchnorm:
        evidence = (
            f"sync_batchnorm is on, but `{plain[0]}` is still a {in_training[plain[0]]}: "
            "it was created later, or out of the conversion's reach."
        )
    else:
        return None
    layers = tuple(late or plain)
    return Diagnosis(
        "F60",
        "batch norm converted after the wrap",
        evidence,
        "Convert before DDP is built: Trainer(sync_batchnorm=True), or in the module's __init__ or configure_model.",
        confirmed="classes of the layers at the wrap and at the first step",
        parameters=tuple(row.parameter for row in context.wrong if row.parameter.startswith(layers)),
    )


def unequal_start(context: AuditContext) -> Diagnosis | None:
    """F04: weights that nobody broadcast."""
    names = context.ranks.names(0, "initial")
    differ = [name for name in names if not context.ranks.ranks_agree(0, "initial", name)]
    if not differ or context.step != 1:
        return None
    others = plural(differ, "", f" (and {len(differ) - 1} more)")
    return Diagnosis(
        "F04",
        "weights that start different on each rank",
        f"`{differ[0]}` differs between ranks before the first step{others}.",
        "Seed alike before building it (seed_everything), and register it as a submodule so that DDP "
        "broadcasts rank 0's.",
        confirmed="parameters compared before the first step",
        parameters=tuple(differ),
    )


# ---------------------------------------------------------------------- gradients that nobody reduces


def unregistered_loss(context: AuditContext) -> Diagnosis | None:
    """F02: an optimizer holds what the module has not registered."""
    rows = [row for row in context.desynchronized if row.owner == "unregistered"]
    if not rows:
        return None
    return Diagnosis(
        "F02",
        "a loss that is not a registered submodule",
        f"{context.names(rows)}: an optimizer trains it, but it is not in the module's parameters(), so nobody "
        f"averages its gradient: the ranks disagree.",
        "Make it an attribute (or put it into nn.ModuleList / nn.ModuleDict), or use DDPLossStrategy(adopt=True).",
        confirmed="the optimizer's parameters against the module's",
        parameters=tuple(row.parameter for row in rows),
    )


_EVENTS = {
    "created": (
        "F05",
        "a parameter created after the wrap",
        "Create it in __init__ or configure_model, before DDP is built",
    ),
    "replaced": (
        "F06",
        "a parameter replaced after the wrap",
        "Copy into the existing one (with torch.no_grad(): p.copy_(...))",
    ),
    "changed": (
        "F07",
        "a parameter that changes its dtype or device after the wrap",
        "Convert the module before fit (or in configure_model), and in forward cast the embeddings to the weight's dtype, not "
        "the weight",
    ),
    "unfrozen": (
        "F08",
        "a parameter unfrozen after the wrap",
        "Keep requires_grad=True from the start, with learning rate 0 until then",
    ),
}


def changed_after_wrap(context: AuditContext) -> Diagnosis | None:
    """F05 to F08: DDP's hook is not on what is trained now."""
    # the first event of the first parameter that differs
    for row in context.desynchronized:
        for record in context.ranks.records:
            what = record.parameter_events.get(row.parameter, "")
            kind = what.split(" ")[0]
            if kind not in _EVENTS:
                continue
            fault, title, fix = _EVENTS[kind]
            return Diagnosis(
                fault,
                title,
                f"`{row.parameter}` {what}; DDP does not reduce it and the ranks' gradients differ.",
                f"{fix}, or use strategy='ddp_losses', which looks at the live parameters.",
                confirmed="the parameter at the wrap and at the step",
                parameters=(row.parameter,),
            )
    return None


def own_backward(context: AuditContext) -> Diagnosis | None:
    """F09, F10: a backward that DDP does not know of."""
    calls = context.record.tensor_backwards - context.record.lightning_backwards
    if not context.desynchronized or calls <= 0:
        return None
    names = context.names(context.desynchronized)
    if not context.info.automatic:
        return Diagnosis(
            "F10",
            "loss.backward() instead of self.manual_backward(loss)",
            f"Manual optimisation with {calls} backward calls that did not go through Lightning: DDP's "
            f"reduction is off there and {names} differ by rank.",
            "Call self.manual_backward(loss).",
            confirmed="backward calls counted",
        )
    return Diagnosis(
        "F09",
        "a backward of your own beside Lightning's",
        f"{calls} backward calls outside Lightning's: DDP does not reduce them, and {names} differ by rank.",
        "Return the sum of all losses from training_step, or use manual optimisation with self.manual_backward.",
        confirmed="backward calls counted",
    )


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
    if _scales_differ(context) or _rates_differ(context) or changed_after_reduction(context) is not None:
        return None
    return Diagnosis(
        "F13",
        "gradients are clipped by a norm that differs by rank",
        f"{context.names(drifted)} had the same gradient on every rank and another value after the step: "
        f"gradient_clip_val={context.info.clip} "
        f"divides by a norm that includes {context.names(unreduced)}, which {plural(unreduced, 'is', 'are')} not "
        f"synchronised.",
        f"Synchronise {context.names(unreduced)} (register the loss as a submodule before fit, or use strategy='ddp_losses').",
        confirmed="equal before the clip, unequal after the step",
        parameters=tuple(row.parameter for row in (*unreduced, *drifted)),
    )


def changed_after_reduction(context: AuditContext) -> Diagnosis | None:
    """F13: what all ranks had alike after the reduction, some ranks clipped or changed by themselves."""
    if _scales_differ(context) or own_backward(context) is not None:
        return None
    by_rank = context.fingerprints_by_rank
    apart = [row for row in (*context.rows, *context.comparison.first_updates()) if not row.ranks_agree]
    names = list(dict.fromkeys(row.parameter for row in apart))
    for name in names:
        if not _agree(by_rank, "backward", name) and not _agree(by_rank, "reduced", name):
            return None  # a gradient that nobody reduced has a rule of its own
    # where the ranks part: in the module's hooks, or between those and the step
    stage, place = "hooked", "in on_after_backward or on_before_optimizer_step"
    changed = [name for name in names if _disagree(by_rank, stage, name)]
    if not changed:
        stage = "used"
        place = "between on_before_optimizer_step and the step: configure_gradient_clipping, or the optimizer itself"
        changed = [name for name in names if _disagree(by_rank, stage, name)]
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
    verb = plural(changed, "was", "were")
    return Diagnosis(
        "F13",
        "gradients that are clipped or changed on some ranks only",
        f"{shown} {verb} equal on all ranks when the reduction was done, then changed {who}, {place}.",
        "Clip and change gradients on every rank alike: they are equal after the reduction, so the same code gives the same "
        "result. Leave it to Trainer(gradient_clip_val=...), or take the `if rank` away.",
        confirmed="fingerprints of the gradients on their way to the step",
        parameters=tuple(changed),
    )


def changed_outside_step(context: AuditContext) -> Diagnosis | None:
    """SYNC: the step used the same gradient and rate on all ranks, and the parameter is another one after it."""
    by_rank = context.fingerprints_by_rank
    apart = [row for row in context.comparison.first_updates() if not row.ranks_agree]
    if not apart or _scales_differ(context) or _rates_differ(context) or unequal_start(context) is not None:
        return None
    if not all(_agree(by_rank, "used", row.parameter) for row in apart):
        return None
    verb = plural(apart, "differs", "differ")
    return Diagnosis(
        "SYNC",
        "a parameter that some ranks change outside the optimizer step",
        f"{context.names(apart)} {verb} between ranks after step {context.step}, which had the same gradients and learning rates on all "
        "ranks.",
        "Look for code that writes parameters on some ranks only (a hook with `if rank`, a copy_, a reset), or for optimizers that were "
        "restored from different states.",
        confirmed="fingerprints of the gradients that the step used",
        parameters=tuple(row.parameter for row in apart),
    )


_Stages = dict[str, dict[str, int]]  # of one rank: by stage and name, a gradient's fingerprint


def _agree(by_rank: Sequence[_Stages], stage: str, name: str) -> bool:
    """Say whether all ranks have that gradient at that stage, with the same bits."""
    values = _values_at(by_rank, stage, name)
    return None not in values and not _differ(values)


def _disagree(by_rank: Sequence[_Stages], stage: str, name: str) -> bool:
    """Say whether all ranks have that gradient at that stage, with other bits."""
    values = _values_at(by_rank, stage, name)
    return None not in values and _differ(values)


def _values_at(by_rank: Sequence[_Stages], stage: str, name: str) -> list[int | None]:
    return [stages.get(stage, {}).get(name) for stages in by_rank]


def skipped_step(context: AuditContext) -> Diagnosis | None:
    """F14, F15: loss scales, or steps that the scaler skipped, differ by rank."""
    first = _first_difference(_loss_scales(context), "{:g}")
    if first is None:
        return None
    at, shown = first
    if at == 0:
        fault, title = "F15", "the loss scale differs by rank"
        reason = "Scaled gradients are averaged and divided by different scales."
    else:
        fault, title = "F14", "the GradScaler skipped a step on some ranks"
        reason = "A gradient that overflowed on one rank was not reduced."
    return Diagnosis(
        fault,
        title,
        f"GradScaler's scale at step {at + 1}: {shown}. {reason}",
        "Make every scaler with the same initial scale, restore all from the same checkpoint, and "
        "synchronise every gradient.",
        confirmed="scales recorded at each step",
    )


def different_rates(context: AuditContext) -> Diagnosis | None:
    """F17: each rank has its own learning rate."""
    first = _first_difference(_learning_rates(context))
    if first is None:
        return None
    at, shown = first
    return Diagnosis(
        "F17",
        "the learning rate differs by rank",
        f"At step {at + 1}: {shown}.",
        "Give the scheduler a value that is the same on all ranks: log the monitored value with sync_dist=True.",
        confirmed="learning rates recorded at each step",
    )


def _loss_scales(context: AuditContext) -> list[tuple[float | None, ...]]:
    """List the ranks' loss scales by step, as far as they can explain a difference."""
    # the step after it too: a step that was skipped shows in the next scale
    by_step = zip(*(record.loss_scales for record in context.ranks.records), strict=False)
    return list(by_step)[: context.step + 1]


def _learning_rates(context: AuditContext) -> list[tuple[list[float], ...]]:
    """List the ranks' learning rates by step, as far as they can explain a difference."""
    by_step = zip(*(record.learning_rates for record in context.ranks.records), strict=False)
    return list(by_step)[: context.step]


def _scales_differ(context: AuditContext) -> bool:
    return any(map(_differ, _loss_scales(context)))


def _rates_differ(context: AuditContext) -> bool:
    return any(map(_differ, _learning_rates(context)))


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
            if not _keeps_rows(context, name, step, entries[0]):
                return _statistic_diagnosis(name, step)
            return _queue_diagnosis(name, step, entries)
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


def _statistic_diagnosis(name: str, step: int) -> Diagnosis:
    return Diagnosis(
        "F64",
        "a buffer that each rank updates from its own rows",
        f"`{name}` differs between ranks after step {step}: each rank computed it from its own rows (a running mean, a centre, code "
        "usage), and DDP's buffer broadcast replaces them by rank 0's.",
        "Average what goes into it over all ranks first (torch.distributed.all_reduce, divided by the number of ranks; no gradient is "
        "needed).",
        confirmed="buffers compared after the step",
    )


def _queue_diagnosis(name: str, step: int, entries: Sequence[Entry]) -> Diagnosis:
    # the same rows in any order? large buffers are not sorted, and count as different
    small = [entry for entry in entries if entry.numel <= _SORTED]
    contents = [_sorted_rows(entry) for entry in small]
    if contents and all(rows == contents[0] for rows in contents):
        fault, title = "F26", "a memory queue in another order on each rank"
        how = "the same rows in another order, each rank's own first."
    else:
        fault, title = "F64", "a memory queue of its own on each rank"
        how = "each rank enqueued its own rows, and DDP's buffer broadcast replaces them by rank 0's."
    return Diagnosis(
        fault,
        title,
        f"`{name}` differs between ranks after step {step}: {how}",
        "GlobalBatchLoss(CrossBatchMemory(...)) keeps the queue of one process on every rank; by "
        "hand: gather in rank order before enqueueing.",
        confirmed="buffers compared after the step",
    )


def _is_counter(entry: Entry) -> bool:
    return entry.dtype in ("bool", "int64", "int32") and not entry.shape


def _sorted_rows(entry: Entry) -> list[list[float]]:
    first = entry.shape[0] if entry.shape else 1
    rows: list[list[float]] = entry.tensor().double().reshape(max(1, first), -1).tolist()
    return sorted(rows)


DESYNC_RULES: tuple[Callable[[AuditContext], Diagnosis | None], ...] = (
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
"""In the order in which they are asked."""
