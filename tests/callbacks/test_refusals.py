"""What checks refuse, and errors that are the same on every rank whichever rank the checks found something on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_ddp_losses import DDPChecks, ParameterSyncCheck
from lightning_ddp_losses.callbacks import Finding
from tests.callbacks import test_absent_gradients as absent
from tests.callbacks import test_failing_checks as failing
from tests.callbacks import test_framework as framework
from tests.callbacks import test_watchdog as watchdog
from tests.callbacks.data_cases import FewerUpdates, MissingLoss, OtherDtype
from tests.callbacks.harness import fit
from tests.callbacks.test_notes_and_files import found_in
from tests.callbacks.test_schedule import Big
from tests.callbacks.test_what_checks_read import Mixed
from tests.callbacks.training_cases import Nudged
from tests.refusals import Refused, refusals

STRATEGIES = ("ddp", "ddp_losses")


def checking(call: Callable[..., object], *args: Any, words: Any = (), **row: Any) -> Refused:
    """What a fit with checks does on each rank."""
    return Refused(lambda _: call(*args), words, **row)


def nudged(make: framework.Make, strategy: str) -> Refused:
    words = ("head.weight", "rank 2", "step 2", "max difference")
    return checking(framework.train, make, Nudged, strategy, words=words, ranks=3, unsaid="encoder")


def of_user(breaks: str, strategy: str) -> Refused:
    """Where every rank is at the same place its error stays what it is."""
    words, call = failing.OF_USERS[breaks], partial(failing.fit_users, breaks, strategy)
    if breaks in ("dry_run", "figures"):
        return checking(call, words=words, kind="ZeroDivisionError", ranks=3, same=False)
    return checking(call, words=(words, *["itself failed (rank 2)"] * (breaks != "what it measures")), ranks=3)


def big(step: str, **options: Any) -> Refused:
    words = ("`big` (rank 1), max difference 0.25", step)
    return Refused(lambda _: fit(ParameterSyncCheck(**options), Big, max_epochs=3), words)


def before_a_wait(subject: type[Any], *words: str, **options: Any) -> Refused:
    """With any action: the backward, the exchange after it or the gather of a metric would wait for ever."""
    call = partial(watchdog.fit, partial(subject, True), file=False, **options)
    return Refused(lambda _: call(), words)


WAITS = ((watchdog.WithoutLoss, "F35"), (watchdog.WithoutEncoder, "F37"), (watchdog.ZeroWithoutEncoder, "F32"))
GATHERS = ((FewerUpdates, "F51"), (OtherDtype, "F52"))
WRONG_ACTIONS: list[Any] = ["quiet", {"errors": "warn"}, {"error": "quiet"}, ["warn"], [], 3, {"error": ["warn"]}]
OWN = ("OwnCheck, F44", "rank 0 at after the optimizer step; rank 1 at", "max difference 0.5", "of step 2")
ON_RANKS: dict[str, Refused] = {
    # findings
    **{
        f"a weight that one rank changes, {make.__name__}, {strategy}": nudged(make, strategy)
        for make in (framework.alone, framework.beside, framework.no_file)
        for strategy in STRATEGIES
    },
    **{
        f"absent gradients: {kind.__name__}, {strategy}": checking(
            absent.train,
            kind,
            True,
            strategy,
            words=("GradientFlowCheck, F38", *words),
            unsaid="look for a backward() of your own",
        )
        for kind, words in absent.KINDS.items()
        for strategy in STRATEGIES
    },
    "a change of parts=1": big("optimizer step of step 1", parts=1),
    "a change of parts=4": big("optimizer step of step 3", parts=4),
    "a change of parts=4, all every 2 steps": big("optimizer step of step 2", parts=4, full_every_n_steps=2),
    "a change every 50 steps": big("end of training, after 12 steps", every_n_steps=50),
    "a missing loss under the strategy": checking(
        found_in, MissingLoss, True, "ddp_losses", words=("LossCheck, F35", "returned None (rank 1)", "step 1")
    ),
    **{
        f"{fault} before a wait, {action}, {strategy}": before_a_wait(
            subject, fault, "of step 1", "rank 1", strategy=strategy, action=action
        )
        for subject, fault in WAITS
        for action in ("warn", "log")
        for strategy in STRATEGIES
    },
    **{
        f"{fault} before a gather, {strategy}": before_a_wait(
            subject,
            *(f"BufferSyncCheck, {fault}, end of the validation epoch", "collected.values"),
            strategy=strategy,
            action="warn",
        )
        for subject, fault in GATHERS
        for strategy in STRATEGIES
    },
    # checks that differ, or that a user wrote
    **{
        f"checks that differ: {case}": checking(
            framework.train, partial(framework.different_sets, case), kind="ConfigurationError"
        )
        for case in ("set", "options")
    },
    "a warning that is an error": Refused(
        lambda _: fit(framework.Echo("F30", (1, 2, 2))), (), own=dict.fromkeys((0, 1), "UserWarning")
    ),
    **{
        f"a user's check, {strategy}": Refused(
            lambda _, strategy=strategy: fit(framework.OwnCheck(), None, strategy), OWN
        )
        for strategy in STRATEGIES
    },
    **{
        f"a user's check fails: {breaks}, {strategy}": of_user(breaks, strategy)
        for breaks in failing.OF_USERS
        for strategy in STRATEGIES
    },
    "an error of the package in a check": checking(failing.fit_refusing, kind="RankMismatchError", same=False),
    "rows of two kinds": Refused(
        lambda _: fit(Mixed()),
        ("Mixed itself failed", "0: measured a list of ints", "1: measured torch.int64"),
        same=False,
    ),
    # without ranks
    "an object that is no check": checking(DDPChecks, [torch.nn.Linear(1, 1)], words=("RankCheck", "Linear"), ranks=0),
    "no steps": Refused(lambda _: ParameterSyncCheck(every_n_steps=0), ("every_n_steps", "0"), ranks=0),
    **{
        f"{make.__name__}: action={action!r}": Refused(
            lambda _, make=make, action=action: make(action=action),
            (f"{make.__name__}: action: expected one of raise, warn, log", f"error, warning, note, got {action!r}"),
            "ConfigurationError",
            0,
        )
        for make in (DDPChecks, ParameterSyncCheck)
        for action in WRONG_ACTIONS
    },
    "a fault that is not in the table": checking(
        Finding, "F999", "what", words="F999", kind="RuntimeError", ranks=0, same=False
    ),
}
test_on_ranks = refusals(__name__, "ON_RANKS")
