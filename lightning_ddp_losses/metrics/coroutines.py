"""Runs a forward that pauses where it needs the states of other ranks, so that several metrics share one exchange.

A metric's forward is a coroutine: it updates, yields what it has to exchange, is given what all ranks have, and computes.
A collection, a composition or a wrapper runs the coroutines of its members side by side and passes on what they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torchmetrics.utilities.data import dim_zero_cat

from lightning_ddp_losses.core import autograd_graph, nests
from lightning_ddp_losses.core.forward_patch import refuse_capture
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.accumulation import micro_batch_to_match
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.metrics.exchange import exchange_states
from lightning_ddp_losses.metrics.travelling_state import State


class Member(Protocol):
    """What takes part in an exchange."""

    process_group: Any

    def take_upstream_grads(self) -> str:
        """Return what came back into its values in backward since this was last asked, as text."""

    def description(self) -> str:
        """Return its configuration as text."""


@dataclass(frozen=True)
class Request:
    """States that a metric wants from all ranks."""

    owner: Member
    states: Sequence[State]


Replies: TypeAlias = list[list[Any]]
"""For each request, its states as all ranks have them."""
Coroutine: TypeAlias = Generator[list[Request], Replies, Any]
Call: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A metric, its positional and its keyword arguments."""


def run(
    owner: Any, title: str, coroutine: Callable[..., Coroutine], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a forward from end to end, in full precision; what fails on one rank fails on all.

    Args:
        owner: The metric, composition or collection; its parameters and inputs fix the precision.
        title: The place, for messages.
        coroutine: The forward.
        args: Its arguments.
        kwargs: Likewise.
    """

    def run_with_exchanges(*args: Any, **kwargs: Any) -> Any:
        refuse_capture(title)
        steps = coroutine(*args, **kwargs)
        try:
            requests = next(steps)
            while True:
                requests = steps.send(reply(title, requests))
        except StopIteration as end:
            return end.value
        finally:
            steps.close()  # a metric gets its states back, whatever happened

    try:
        value = autograd_graph.run_full_precision(owner, run_with_exchanges, args, kwargs)
    except Exception as error:  # what all ranks raise alike passes through
        if not owner._has_peers:
            raise
        handshake.raise_on_all_ranks(error, title, group=owner.process_group)
    return value


def reply(title: str, requests: Sequence[Request]) -> Replies:
    """Return the states that were asked for, as all ranks have them. Communication: one exchange for each process group."""
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        by_ranks.setdefault(process_groups.members(request.owner.process_group), []).append(index)
    replies: Replies = [[] for _ in requests]
    for indices in by_ranks.values():
        own = [requests[index] for index in indices]
        values = _exchange_together(title, own)
        for index in indices:
            count = len(requests[index].states)
            replies[index], values = values[:count], values[count:]
    return replies


def _exchange_together(title: str, requests: Sequence[Request]) -> list[Any]:
    """Exchange the states of several metrics over one process group; a failure here is one on every rank."""
    states = [state for request in requests for state in request.states]
    upstream = ", ".join(request.owner.take_upstream_grads() for request in requests)
    description = "; ".join(request.owner.description() for request in requests)
    group = requests[0].owner.process_group
    must_match: dict[str, object] = {"factor that came back in the last backward": upstream, **micro_batch_to_match()}
    try:
        return exchange_states(title, states, must_match, description, group=group)
    except Exception as error:  # what all ranks raise alike passes through
        handshake.raise_on_all_ranks(error, title, group=group)


def gather_inputs(
    owner: Member, title: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generator[list[Request], Replies, Any]:
    """Return the arguments of an update with the rows of all ranks in place of this rank's; 0-dim tensors stay.

    Args:
        owner: The metric.
        title: It, for messages.
        args: This rank's arguments.
        kwargs: Likewise.

    Raises:
        InputError: for what cannot be gathered.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value):
            raise InputError(
                f"{title}: inputs",
                expected="tensors",
                got="a list of str, which would stay on this rank",
                fix="Use gather='states'.",
            )
    tree = (args, kwargs)
    batches = [tensor for tensor in nests.tensors_in(tree) if tensor.ndim]
    name = type(owner).__name__
    states = [State(f"{name}, input {i}", t, t.device, dim_zero_cat) for i, t in enumerate(batches)]
    (values,) = yield [Request(owner, states)]
    gathered = iter(values)
    return nests.map_tensors(lambda t: next(gathered) if t.ndim else t, tree)


def together(calls: Sequence[Call]) -> Coroutine:
    """Run forwards of several metrics in one exchange; one after the other where they share a metric.

    Args:
        calls: Metric, positional arguments, keyword arguments.

    Returns:
        Their values.
    """
    if _share_a_metric(calls):
        in_turn = []
        for metric, args, kwargs in calls:
            value = yield from metric._forward_coroutine(*args, **kwargs)
            in_turn.append(value)
        return in_turn
    running = [metric._forward_coroutine(*args, **kwargs) for metric, args, kwargs in calls]
    values = [None] * len(running)
    try:
        # run each up to its first request
        waiting: dict[int, list[Request]] = {}
        for index in range(len(running)):
            _advance_(running, index, None, waiting, values)
        # pass on what all of them ask for, as one, and give each its part of the replies
        while waiting:
            order = list(waiting)
            sizes = [len(waiting[index]) for index in order]
            replies = yield [request for index in order for request in waiting[index]]
            for index, size in zip(order, sizes, strict=True):
                _advance_(running, index, replies[:size], waiting, values)
                replies = replies[size:]
    finally:
        for steps in running:
            steps.close()
    return values


def _advance_(
    running: Sequence[Coroutine],
    index: int,
    replies: Replies | None,
    waiting: dict[int, list[Request]],
    values: list[Any],
) -> None:
    """Run one coroutine up to its next request, or to its value."""
    waiting.pop(index, None)
    try:
        waiting[index] = running[index].send(replies)  # type: ignore[arg-type]
    except StopIteration as end:
        values[index] = end.value


def _share_a_metric(calls: Sequence[Call]) -> bool:
    seen: set[int] = set()
    for metric, _, _ in calls:
        own = {id(module) for module in metric.modules()}
        if own & seen:
            return True
        seen |= own
    return False


def wants_gradient(given: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient could reach the inputs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
