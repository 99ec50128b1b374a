"""`PendingValue`: a sum over ranks that is exchanged when its value is first required, or a result computed from such sums.

A formula often computes several sums before it reads one of them (the overlap and the sizes of a Dice, a mean and a covariance). These sums
are sent together. The result of an operator on pending values and numbers is also pending. Every other use requires the value: an operation
with rows, a number on the host, a branch, an operator that is not listed here. At this point all pending sums are exchanged, and all
pending operators run, in the order of the formula.

A pending value has a shape but does not have memory. It resolves to one plain tensor, which replaces it from then on.

In the exchange, ranks compare the pending operators, their operands and numbers. The resulting values are therefore equal on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import precision, torch_compat
from lightning_ddp_losses.distributed.rows.call import Place, RowsCall, is_in_custom_function, line_of_loss
from lightning_ddp_losses.distributed.rows.deferred import (
    DEFERRED,
    FACTS,
    OUT_OF_PLACE,
    UNCOUNTED,
    Operation,
    text_of,
)
from lightning_ddp_losses.distributed.rows.exchange import Part, SharedExchange
from lightning_ddp_losses.distributed.rows.listed import STACK, SUM
from lightning_ddp_losses.distributed.rows.maps import added_now, cut_at, shared_now, stacked_now
from lightning_ddp_losses.distributed.rows.nests import mapped, tensors_in
from lightning_ddp_losses.errors import InputError

_FIX = "Write into a clone: value.clone() has the value of the sum."


class PendingValue(Tensor):
    """A value that is equal on all ranks and has not been computed yet.

    Args:
        call: The call that it belongs to.
        form: A tensor with its shape and dtype, possibly without memory.
        device: Its device.
        needs_grad: Whether it has a graph once it has been computed.
    """

    _call: RowsCall
    _form: Tensor
    _device: torch.device
    _needs_grad: bool
    _number: int
    _part: Tensor | None
    _place: Place | None
    _kind: str
    _operation: Operation | None
    _value: Tensor | None
    _plain: Tensor | None
    _version_of_plain: int

    @staticmethod
    def __new__(cls, call: RowsCall, form: Tensor, device: torch.device, *, needs_grad: bool) -> PendingValue:
        """Create a value without memory, and append it to the pending values of the call."""
        made: PendingValue = torch_compat.without_memory(cls, form.shape, form.dtype, device)
        made._call, made._form, made._device, made._needs_grad = call, form, device, needs_grad
        made._number = call.waiting.number_of_values
        made._part = made._place = made._operation = made._value = made._plain = None
        call.waiting.number_of_values += 1
        call.waiting.values.append(made)
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Show the shape while the value is pending, because computing it would start an exchange, which a debugger must not do."""
        if self._plain is not None:
            return repr(self._plain)
        return f"PendingValue({tuple(self.shape)}, {self.dtype})"

    def is_known(self) -> bool:
        """Return whether a plain tensor has already replaced it."""
        return self._plain is not None

    def resolved(self) -> Tensor:
        """Return the plain tensor that replaces it. Communication: one exchange, unless it has been computed."""
        if self._plain is None:
            exchange_pending(self._call)
        if self._plain is None:
            raise InputError(
                f"{self._call.title}: a sum over rows",
                expected="a value of a call that has returned",
                got="one whose call has failed before it was exchanged",
                fix="Do not catch the error of that call, or drop the values that it left.",
            )
        return self._plain

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Defer an operator, or call it with values."""
        kwargs = kwargs or {}
        if func in FACTS:
            with torch_compat.without_torch_function():
                return func(*args, **kwargs)
        if func in DEFERRED and len(types) == 1:
            made = _deferred(func, args, kwargs)
            if made is not None:
                return made
        if func in UNCOUNTED:
            args[0].resolved()
            args[0]._version_of_plain = -1  # operators on this value are not deferred from now on
        args, kwargs = mapped(plain_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call a kernel with values. It was not called as a function of torch, and autograd has already recorded it."""
        values, by_name = mapped(_value_of, (args, kwargs or {}))
        if not torch_compat.is_write(func):
            return func(*values, **by_name)
        if any(type(each) is PendingValue and each._needs_grad for each in tensors_in((args, kwargs))):
            raise InputError(
                f"{func} of a sum over rows", expected="no write in place", got=f"one, at {line_of_loss()}", fix=_FIX
            )
        # a buffer that was set by the formula and is being broadcast
        result = func(*values, **by_name)
        return args[0] if type(args[0]) is PendingValue else result


def plain_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor that replaces a pending value, and any other tensor unchanged."""
    return tensor.resolved() if type(tensor) is PendingValue else tensor


def _value_of(tensor: Tensor) -> Tensor:
    return plain_of(tensor).detach()


# ---------------------------------------------------------------------- sums


def add(call: RowsCall, part: Tensor, operator: str) -> Tensor:
    """Return the sum over ranks of this rank's part. Communication: a share of one exchange, none in backward."""
    return _wait_for(call, part, Place(call, operator, line_of_loss()), SUM)


def stack(call: RowsCall, part: Tensor, operator: str) -> Tensor:
    """Return the tensors of all ranks, which have equal shapes, as (W, ...). Communication: a share of one exchange, none in backward."""
    return _wait_for(call, part, Place(call, operator, line_of_loss()), STACK)


def _wait_for(call: RowsCall, part: Tensor, place: Place, kind: str) -> Tensor:
    if call.is_over or torch.is_inference_mode_enabled():
        # a checkpoint that recomputes in backward
        return added_now(part, place) if kind == SUM else stacked_now(part, place)
    return _Later.apply(part, place, kind)  # type: ignore[no-any-return, no-untyped-call]


class _Later(torch.autograd.Function):
    """A sum, or a stack of all ranks' tensors, that is exchanged later."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Place, kind: str) -> Tensor:
        ctx.place, ctx.kind = place, kind
        form = part if kind == SUM else part.expand(place.call.world_size, *part.shape)
        made = PendingValue(place.call, form, part.device, needs_grad=ctx.needs_input_grad[0])
        made._part, made._place, made._kind = part.detach(), place, kind
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        place: Place = ctx.place.backward()
        if ctx.kind == SUM:
            return shared_now(grads[0], place), None, None
        own = cut_at(grads[0], (1,) * place.call.world_size, 0, place)
        return own.squeeze(0), None, None


class _Known(torch.autograd.Function):
    """The value of a sum, with the graph of its part."""

    @staticmethod
    def forward(ctx: Any, pending: PendingValue) -> Tensor:
        assert pending._value is not None
        return pending._value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


# ---------------------------------------------------------------------- operators that wait


def _deferred(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingValue | None:
    """Return the pending result of an operator, or None if the operator requires values."""
    given = [each for each in tensors_in((args, kwargs)) if type(each) is PendingValue]
    if not _can_wait(func, given):
        return None
    text = text_of(func, args, kwargs)
    if text is None:
        return None
    # torch computes shapes in Python, which takes longer than everything else in this function
    key = func, text, torch.get_default_dtype(), *((each._form.shape, each._form.dtype) for each in given)
    form = _forms.get(key)
    if form is None:
        form = _form_of_result(func, args, kwargs)
        if form is None:
            return None
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[key] = form
    versions = [(each._plain, each._version_of_plain) for each in given if each._plain is not None]
    has_grad_mode = torch.is_grad_enabled()
    operation = Operation(func, args, kwargs, has_grad_mode, text, tuple(versions))
    if has_grad_mode and any(each._needs_grad for each in given):
        return _Deferred.apply(operation, form, *given)  # type: ignore[no-any-return, no-untyped-call]
    return _waiting_for(operation, form, given[0], needs_grad=False)


_MOST_FORMS = 4096
_forms: dict[Any, Tensor] = {}
"""Shapes and dtypes of results, by operator, numbers, and shapes and dtypes of operands."""


def _can_wait(func: Any, given: list[PendingValue]) -> bool:
    """Return whether an operator on these values can be deferred."""
    call = given[0]._call
    if call.is_over or any(each._call is not call for each in given):
        return False
    # values that are already computed must not have been written to, and must not be written to by this operator
    known = [each for each in given if each._plain is not None]
    if len(known) == len(given) or (func in OUT_OF_PLACE and given[0]._plain is not None):
        return False
    if any(each._plain is None or each._plain._version != each._version_of_plain for each in known):
        return False
    # the result of a custom autograd.Function gets its graph from that function
    if not torch.is_grad_enabled() and (call.has_grad_mode or is_in_custom_function()):
        return False
    return not (torch_compat.are_saved_tensors_hooked() or torch_compat.is_any_autocast_on())


def _form_of_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return a tensor without memory that has the shape and dtype of the result, or None if it is not a tensor or depends on values."""
    try:
        form = func(*mapped(_form_of, args), **mapped(_form_of, kwargs))
    except Exception:
        return None  # the operator raises the same error when it is called with values
    return form if type(form) is Tensor else None


def _waiting_for(operation: Operation, form: Tensor, like: PendingValue, *, needs_grad: bool) -> PendingValue:
    """Return the pending result of a deferred operator."""
    made = PendingValue(like._call, form, like._device, needs_grad=needs_grad)
    made._operation = operation
    return made


class _Deferred(torch.autograd.Function):
    """A deferred operator. Its graph is used by calls that are not functions of torch, such as a custom ``autograd.Function``."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, form: Tensor, *given: PendingValue) -> Tensor:
        ctx.operation, ctx.given = operation, given
        return _waiting_for(operation, form, given[0], needs_grad=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        operation: Operation = ctx.operation
        given: tuple[PendingValue, ...] = ctx.given
        if any(each.resolved()._version != each._version_of_plain for each in given):
            raise _written(given[0], operation)
        args, kwargs = mapped(plain_of, (operation.args, operation.kwargs))
        with torch.enable_grad():
            result = OUT_OF_PLACE.get(operation.func, operation.func)(*args, **kwargs)
        needed = [each for each in given if each._needs_grad]
        found = torch.autograd.grad(
            result,
            [each.resolved() for each in needed],
            grads[0],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        by_number = dict(zip((each._number for each in needed), found, strict=True))
        # a value that is passed twice receives its whole gradient once
        return None, None, *(by_number.pop(each._number, None) for each in given)


def _written(value: PendingValue, operation: Operation, until: str = "") -> InputError:
    """Return the error for an operation whose operand was written to."""
    return InputError(
        f"{value._call.title}: {operation.text}",
        expected=f"no write in place into its operand{until}",
        got="one",
        fix="Write into a clone.",
    )


def _form_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype without memory."""
    if type(tensor) is not PendingValue:
        return tensor
    if not tensor._form.is_meta:
        tensor._form = torch.empty(tensor._form.shape, dtype=tensor._form.dtype, device="meta")
    return tensor._form


# ---------------------------------------------------------------------- the exchange


def exchange_pending(call: RowsCall) -> None:
    """Exchange all sums of a call that are pending, and run the operators that wait for them.

    Raises:
        RankMismatchError: on every rank, if the sums or the operators on them differ.

    Communication: ``SharedExchange.run``.
    """
    exchange = _Exchange(call)
    if exchange.sums:
        exchange.finish(exchange.run())


def close_call(call: RowsCall) -> None:
    """Exchange the sums that are still pending at the end of the formula. Collective.

    Raises:
        RankMismatchError: on every rank, if the number of exchanges or results, the sums, or the operators on them differ.

    Communication: one handshake, and one sum per dtype for sums that do not fit into it. If the previous call has ended with the same sums
        and these do not fit, only the sums. The host waits for an accelerator.
    """
    exchange = _Exchange(call)
    if not exchange.sums:
        call.meet_at_end(call.comparison_at_end())
        return
    exchange.finish(exchange.run_at_end())


class _Exchange:
    """One exchange of all sums that are pending.

    Args:
        call: Their call. Its list of pending values is emptied.

    Attributes:
        sums: The sums.
    """

    def __init__(self, call: RowsCall) -> None:
        waiting, call.waiting.values = call.waiting.values, []
        if call.is_over:  # the formula has failed
            waiting = []
        self._waiting: list[PendingValue] = waiting
        self.sums = [each for each in waiting if each._operation is None]
        self._shared = SharedExchange(call, [_part_of(each) for each in self.sums])

    def run(self) -> list[Tensor]:
        """Return the values of the sums. Communication: ``SharedExchange.run``."""
        return self._shared.run(self._operations())

    def run_at_end(self) -> list[Tensor]:
        """Return the values of the sums, from the exchange at the end of the formula. Communication: ``close_call``."""
        shared, call = self._shared, self._shared.call
        own = shared.own()
        end = call.comparison_at_end(shared.lines(), {**shared.must_match(), **self._operations()})
        found = call.listed_at_end(end, own)
        if found is None:
            return shared.values(call.meet_at_end(end, shared.payload(), own))
        shared.note()
        return found

    def _operations(self) -> dict[str, object]:
        """Return the operators on sums, which ranks compare."""
        texts = [f"#{each._number}: {each._operation.text}" for each in self._waiting if each._operation is not None]
        return {"operations on sums": "; ".join(texts)}

    def finish(self, values: Sequence[Tensor]) -> None:
        """Resolve all pending values, from the values of the sums."""
        for each, value in zip(self.sums, values, strict=True):
            each._value = value
        with contextlib.ExitStack() as stack:
            if torch_compat.are_saved_tensors_hooked():
                # a checkpoint counts the tensors that its region saves
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged))
            stack.enter_context(precision.without_autocast({each._device.type for each in self._waiting}))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            for each in self._waiting:
                _resolve(each)


def _resolve(pending: PendingValue) -> None:
    """Compute the plain tensor that replaces a pending value."""
    operation = pending._operation
    if operation is None:
        assert pending._value is not None
        with torch.enable_grad():
            pending._plain = _Known.apply(pending) if pending._needs_grad else pending._value  # type: ignore[no-untyped-call]
    else:
        for tensor, version in operation.versions:
            if tensor._version != version:
                raise _written(pending, operation, " before the result is used")
        args, kwargs = mapped(plain_of, (operation.args, operation.kwargs))
        with torch.set_grad_enabled(operation.has_grad_mode):
            pending._plain = operation.func(*args, **kwargs)
    assert pending._plain is not None
    pending._version_of_plain = pending._plain._version
    pending._part = pending._operation = None


def _part_of(pending: PendingValue) -> Part:
    assert pending._part is not None
    assert pending._place is not None
    return Part(pending._part, pending._place, pending._kind)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
