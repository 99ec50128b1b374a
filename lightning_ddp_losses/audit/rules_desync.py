"""Rules for ranks that do not agree with each other: something is not synchronised."""

from __future__ import annotations

from collections.abc import Callable

from lightning_ddp_losses.audit.context import Case, Diagnosis

Rule = Callable[[Case], Diagnosis | None]


def order(case: Case) -> Diagnosis | None:
    """F12: DDP pairs by position."""
    orders = [page["order"] for page in case.ranks.facts]
    if all(names == orders[0] for names in orders):
        return None
    at = next(i for i in range(len(orders[0])) if len({tuple(names[i : i + 1]) for names in orders}) > 1)
    return Diagnosis(
        "F12",
        "parameters are registered in another order per rank",
        f"Position {at}: "
        + "; ".join(f"rank {r} `{names[at]}`" for r, names in enumerate(orders))
        + ". DDP pairs parameters by position.",
        "Register submodules in a fixed order (sort names; no iteration over sets).",
        confirmed="names compared at the wrap",
    )


def norm_converted_late(case: Case) -> Diagnosis | None:
    """F60: a batch norm that was replaced after the wrap, or that the conversion did not reach."""
    wrapped, training = case.facts["norms_wrapped"], case.facts.get("norms_training", {})
    late = [n for n, kind in training.items() if wrapped.get(n, kind) != kind]
    plain = [n for n, kind in training.items() if "Sync" not in kind]
    if late:
        kinds = f"{wrapped[late[0]]} when DDP was built and {training[late[0]]} when training began"
        evidence = f"`{late[0]}` was a {kinds}: DDP knows the old layer's parameters, not the new one's."
    elif plain and case.facts["sync_batchnorm"]:
        evidence = (
            f"sync_batchnorm is on, but `{plain[0]}` is still a {training[plain[0]]}: "
            "it was created later, or out of the conversion's reach."
        )
    else:
        return None
    return Diagnosis(
        "F60",
        "batch norm converted after the wrap",
        evidence,
        "Convert before DDP is built: Trainer(sync_batchnorm=True), or in the module's __init__ or configure_model.",
        confirmed="classes of the layers at the wrap and at the first step",
        parameters=tuple(
            row.parameter for row in case.wrong if any(row.parameter.startswith(n) for n in late or plain)
        ),
    )


def clipped_by_torn_norm(case: Case) -> Diagnosis | None:
    """F13: one unsynchronised gradient, and the clip factor differs for all."""
    torn, whole = case.torn, {row.parameter for row in case.rows if row.ranks_agree}
    drifted = [row for row in case.comparison.first_updates() if not row.ranks_agree and row.parameter in whole]
    if not torn or not drifted or not case.facts["clip"] or _scales_differ(case) or _rates_differ(case):
        return None
    return Diagnosis(
        "F13",
        "gradients are clipped by a norm that differs by rank",
        f"{case.names(drifted)} had the same gradient on every rank and another value after the step: "
        f"gradient_clip_val={case.facts['clip']} "
        f"divides by a norm that includes {case.names(torn)}, which {'is' if len(torn) == 1 else 'are'} not "
        f"synchronised.",
        f"Synchronise {case.names(torn)} (register the loss as a submodule before fit, or use strategy='ddp_losses').",
        confirmed="equal before the clip, unequal after the step",
        parameters=tuple(row.parameter for row in (*torn, *drifted)),
    )


def hidden(case: Case) -> Diagnosis | None:
    """F02: an optimizer holds what the module has not registered."""
    torn = [row for row in case.torn if row.owner == "unregistered"]
    if not torn:
        return None
    return Diagnosis(
        "F02",
        "a loss that is not a registered submodule",
        f"{case.names(torn)}: an optimizer trains it, but it is not in the module's parameters(), so nobody "
        f"averages its gradient: the ranks disagree.",
        "Make it an attribute (or put it into nn.ModuleList / nn.ModuleDict), or use DDPLossStrategy(adopt=True).",
        confirmed="the optimizer's parameters against the module's",
        parameters=tuple(row.parameter for row in torn),
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
        "a parameter that changes its dtype in forward",
        "Cast the embeddings to the weight's dtype before the loss",
    ),
    "unfrozen": (
        "F08",
        "a parameter unfrozen after the wrap",
        "Keep requires_grad=True from the start, with learning rate 0 until then",
    ),
}


def event(case: Case) -> Diagnosis | None:
    """F05 to F08: DDP's hook is not on what is trained now."""
    for row in case.torn:
        for page in case.ranks.facts:
            what = page["events"].get(row.parameter, "")
            if what.split(" ")[0] in _EVENTS:
                fault, title, fix = _EVENTS[what.split(" ")[0]]
                return Diagnosis(
                    fault,
                    title,
                    f"`{row.parameter}` {what}; DDP does not reduce it and the ranks' gradients differ.",
                    f"{fix}, or use strategy='ddp_losses', which looks at the live parameters.",
                    confirmed="the parameter at the wrap and at the step",
                    parameters=(row.parameter,),
                )
    return None


def own_backward(case: Case) -> Diagnosis | None:
    """F09, F10: a backward that DDP does not know of."""
    counts = case.facts["backwards"]
    if not case.torn or counts["tensor"] <= counts["lightning"]:
        return None
    calls = counts["tensor"] - counts["lightning"]
    if not case.facts["automatic"]:
        return Diagnosis(
            "F10",
            "loss.backward() instead of self.manual_backward(loss)",
            f"Manual optimisation with {calls} backward calls that did not go through Lightning: DDP's "
            f"reduction is off there and {case.names(case.torn)} differ by rank.",
            "Call self.manual_backward(loss).",
            confirmed="backward calls counted",
        )
    return Diagnosis(
        "F09",
        "a backward of your own beside Lightning's",
        f"{calls} backward calls outside Lightning's: DDP does not reduce them, and {case.names(case.torn)} "
        f"differ by rank.",
        "Return the sum of all losses from training_step, or use manual optimisation with self.manual_backward.",
        confirmed="backward calls counted",
    )


def unequal_start(case: Case) -> Diagnosis | None:
    """F04: weights that nobody broadcast."""
    differ = [n for n in case.ranks.names(0, "initial") if not case.ranks.agree(0, "initial", n)]
    if not differ or case.step != 1:
        return None
    return Diagnosis(
        "F04",
        "weights that start different on each rank",
        f"`{differ[0]}` differs between ranks before the first "
        f"step{f' (and {len(differ) - 1} more)' if len(differ) > 1 else ''}.",
        "Seed alike before building it (seed_everything), and register it as a submodule so that DDP "
        "broadcasts rank 0's.",
        confirmed="parameters compared before the first step",
        parameters=tuple(differ),
    )


def skipped_step(case: Case) -> Diagnosis | None:
    """F14, F15: loss scales, or steps that the scaler skipped, differ by rank."""
    if not _scales_differ(case):
        return None
    at = next(i for i, column in enumerate(_columns(case, "scales")) if len(set(column)) > 1)
    scales = ", ".join(f"rank {r} {page['scales'][at]:g}" for r, page in enumerate(case.ranks.facts))
    start = at == 0
    return Diagnosis(
        "F15" if start else "F14",
        "the loss scale differs by rank" if start else "the GradScaler skipped a step on some ranks",
        f"GradScaler's scale at step {at + 1}: {scales}."
        + (
            " Scaled gradients are averaged and divided by different scales."
            if start
            else " A gradient that overflowed on one rank was not reduced."
        ),
        "Make every scaler with the same initial scale, restore all from the same checkpoint, and "
        "synchronise every gradient.",
        confirmed="scales recorded at each step",
    )


def different_rates(case: Case) -> Diagnosis | None:
    """F17: each rank has its own learning rate."""
    if not _rates_differ(case):
        return None
    at = next(
        i for i, column in enumerate(_columns(case, "learning_rates")) if any(rate != column[0] for rate in column)
    )
    rates = ", ".join(f"rank {r} {page['learning_rates'][at]}" for r, page in enumerate(case.ranks.facts))
    return Diagnosis(
        "F17",
        "the learning rate differs by rank",
        f"At step {at + 1}: {rates}.",
        "Give the scheduler a value that is the same on all ranks: log the monitored value with sync_dist=True.",
        confirmed="learning rates recorded at each step",
    )


def queue(case: Case) -> Diagnosis | None:
    """F64, F26: a memory of rows that each rank fills by itself."""
    for step in range(1, case.step + 1):
        for name in case.ranks.names(step, "buffer"):
            owner = name.rpartition(".")[0]
            if case.ranks.agree(step, "buffer", name) or owner in case.facts["norms_wrapped"]:
                continue
            entries = [case.ranks.entries(r, step, "buffer")[name] for r in range(case.W)]
            if entries[0].dtype in ("bool", "int64", "int32") and len(entries[0].shape) == 0:
                continue
            sets = {
                tuple(sorted(map(tuple, e.tensor().double().reshape(max(1, e.shape[0]), -1).tolist())))
                for e in entries
                if e.numel <= 1 << 20
            }
            same_rows = len(sets) == 1
            return Diagnosis(
                "F26" if same_rows else "F64",
                "a memory queue in another order on each rank"
                if same_rows
                else "a memory queue of its own on each rank",
                f"`{name}` differs between ranks after step {step}: "
                + (
                    "the same rows in another order, each rank's own first."
                    if same_rows
                    else "each rank enqueued its own rows, and DDP's buffer broadcast replaces them by rank 0's."
                ),
                "GlobalBatchLoss(CrossBatchMemory(...)) keeps the queue of one process on every rank; by "
                "hand: gather in rank order before enqueueing.",
                confirmed="buffers compared after the step",
            )
    return None


def _columns(case: Case, key: str) -> list[tuple[object, ...]]:
    return list(zip(*(page[key] for page in case.ranks.facts), strict=False))


def _scales_differ(case: Case) -> bool:
    return any(len(set(column)) > 1 for column in _columns(case, "scales")[: case.step + 1])


def _rates_differ(case: Case) -> bool:
    return any(rate != column[0] for column in _columns(case, "learning_rates")[: case.step] for rate in column)


TORN: tuple[Rule, ...] = (
    order,
    skipped_step,
    different_rates,
    clipped_by_torn_norm,
    norm_converted_late,
    event,
    hidden,
    own_backward,
    unequal_start,
    queue,
)
"""In the order in which they are asked."""
