"""A forward that pauses where its states must meet those of other ranks, so that several metrics meet in one exchange.

A metric's forward is a generator: it updates, yields what it has to exchange, is given what all ranks have, and computes.
A collection, a composition or a wrapper runs the generators of its members side by side and passes on what they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torchmetrics.utilities.data import dim_zero_cat

from lightning_ddp_losses.core import autograd_graph, precision
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.metrics.exchange import State, meet


class Member(Protocol):
    """What takes part in an exchange."""

    process_group: Any

    def told(self) -> str:
        """What came back into its values in backward since it was last asked."""

    def description(self) -> str:
        """Its configuration."""


@dataclass(frozen=True)
class Request:
    """States that a metric wants from all ranks."""

    owner: Member
    states: Sequence[State]


Stages: TypeAlias = Generator[list[Request], list[list[Any]], Any]
Call: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]


def run(owner: Any, title: str, stages: Callable[..., Stages], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward from end to end, in full precision; what fails on one rank fails on all.

    Args:
        owner: The metric, composition or collection; its parameters and inputs fix the precision.
        title: The place, for messages.
        stages: The forward.
        args: Its arguments.
        kwargs: Likewise.
    """

    def whole(*args: Any, **kwargs: Any) -> Any:
        steps = stages(*args, **kwargs)
        try:
            requests = next(steps)
            while True:
                requests = steps.send(answer(title, requests))
        except StopIteration as end:
            return end.value
        finally:
            steps.close()  # a metric gets its states back, whatever happened

    try:
        value = autograd_graph.run_full_precision(owner, whole, args, kwargs)
    except Exception as error:  # what all ranks raise alike passes through
        if not owner._meets:
            raise
        handshake.raise_on_all_ranks(error, title, group=owner.process_group)
    return value


def answer(title: str, requests: Sequence[Request]) -> list[list[Any]]:
    """The states that were asked for, as all ranks have them; one exchange for each process group."""
    replies: list[list[Any]] = [[] for _ in requests]
    parts: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        parts.setdefault(process_groups.members(request.owner.process_group), []).append(index)
    for indices in parts.values():
        mine = [requests[i] for i in indices]
        states = [state for request in mine for state in request.states]
        noted = ", ".join(request.owner.told() for request in mine)
        must_match: dict[str, object] = {"factor that came back in the last backward": noted}
        described = "; ".join(request.owner.description() for request in mine)
        group = mine[0].owner.process_group
        try:
            values = meet(title, states, must_match, described, group=group)
        except Exception as error:  # what all ranks raise alike passes through
            handshake.raise_on_all_ranks(error, title, group=group)
        for i in indices:
            count = len(requests[i].states)
            replies[i], values = values[:count], values[count:]
    return replies


def gather_inputs(
    owner: Member, title: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generator[list[Request], list[list[Any]], Any]:
    """The arguments of an update with the rows of all ranks in place of this rank's; 0-dim tensors stay.

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
    batches = [t for t in precision.tensors_in(tree) if t.ndim]
    states = [State(f"{type(owner).__name__}, input {i}", t, t.device, dim_zero_cat) for i, t in enumerate(batches)]
    (values,) = yield [Request(owner, states)]
    found = iter(values)
    return precision.map_tensors(lambda t: next(found) if t.ndim else t, tree)


def together(calls: Sequence[Call]) -> Stages:
    """Forwards of several metrics, in one exchange; one after the other where they share a metric.

    Args:
        calls: Metric, positional arguments, keyword arguments.

    Returns:
        Their values.
    """
    if _share(calls):
        values = []
        for metric, args, kwargs in calls:
            value = yield from metric._stages(*args, **kwargs)
            values.append(value)
        return values
    running = [metric._stages(*args, **kwargs) for metric, args, kwargs in calls]
    values = [None] * len(running)
    try:
        asking: dict[int, list[Request]] = {}
        for index in range(len(running)):
            _advance(running, index, None, asking, values)
        while asking:
            order = list(asking)
            sizes = [len(asking[index]) for index in order]
            replies = yield [request for index in order for request in asking[index]]
            for index, size in zip(order, sizes, strict=True):
                _advance(running, index, replies[:size], asking, values)
                replies = replies[size:]
    finally:
        for steps in running:
            steps.close()
    return values


def _advance(
    running: Sequence[Stages],
    index: int,
    reply: list[list[Any]] | None,
    asking: dict[int, list[Request]],
    values: list[Any],
) -> None:
    asking.pop(index, None)
    try:
        asking[index] = running[index].send(reply)  # type: ignore[arg-type]
    except StopIteration as end:
        values[index] = end.value


def _share(calls: Sequence[Call]) -> bool:
    seen: set[int] = set()
    for metric, _, _ in calls:
        own = {id(module) for module in metric.modules()}
        if own & seen:
            return True
        seen |= own
    return False


def gradient_is_wanted(given: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient could reach the inputs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
