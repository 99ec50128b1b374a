"""What all ranks say together when they called different losses, or hold different gradients."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import LossCallError, RankMismatchError, format_error


def missing_calls(missing: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> LossCallError:
    """The error for losses that ran on some ranks only: title, calls and rows of each rank."""
    parts = []
    for title, calls, rows in missing:
        ran = [f"{c} call{'s' * (c > 1)} on {r} rows" if c else "not called" for c, r in zip(calls, rows, strict=True)]
        parts.append(format_error(f"{title} ran on some ranks only", expected="every rank or none", ranks=ran))
    fix = "Call it on every rank (times 0 where it should not count), or decide on all ranks together."
    return LossCallError("\n".join([*parts, fix]), collective=True)


def partial_gradients(names: Sequence[str], flags: Sequence[int]) -> LossCallError:
    """The error for gradients that ranks hold differently. Communication: one frame, which all ranks come to."""
    everyone = [
        json.loads(p) for p in handshake.all_gather("gradients that differ", {}, json.dumps(list(flags)).encode())
    ]
    parts = []
    for name, column in zip(names, zip(*everyone, strict=True), strict=True):
        sparse = max(column) > 1
        if sparse:
            expected = "dense (build the module with sparse=False)"
            ranks = [("no gradient", "dense")[flag] if flag < 2 else "sparse" for flag in column]
            parts.append(format_error(f"gradient of `{name}`", expected=expected, ranks=ranks))
        elif len(set(column)) > 1:
            ranks = ["gradient" if has else "no gradient" for has in column]
            parts.append(format_error(f"gradient of `{name}`", expected="on every rank or on none", ranks=ranks))
    fix = "Use the parameter in the loss of every rank (times 0 where it should not count), or on none."
    return LossCallError("\n".join([*parts, fix]), collective=True)


def refuse_other_coefficients(noted: Sequence[str]) -> None:
    """Refuse global values that came back in backward with different coefficients, as each rank noted them.

    Raises:
        RankMismatchError: on every rank.
    """
    if len(set(noted)) > 1:
        raise RankMismatchError(
            "coefficients of global losses and metrics in this backward",
            expected="the same on every rank, which holds the gradient for all of them",
            ranks=noted,
            fix="Multiply a global value by the same number on every rank; or give GlobalBatchLoss(backward='sum') where ranks shall "
            "differ. Nothing was reduced.",
            collective=True,
        )
