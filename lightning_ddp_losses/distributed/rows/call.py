"""`RowsCall`: one evaluation of a formula on the rows of all ranks, and the four exchanges that it consists of.

Values of the formula are of two kinds. *Rows* are divided among the ranks, in rank order. *Plain* tensors are equal on all ranks. Six
linear maps convert one kind to the other (``maps``). Each is the transpose of another one, so backward, and backward of backward, consist
of the same six maps:

| map | from | to | backward |
|---|---|---|---|
| ``add`` | this rank's part of a sum | the sum, plain | ``share`` |
| ``share`` | plain | the same tensor, as an operand of this rank's rows | ``add`` |
| ``gather`` | rows | all rows, plain | ``cut`` |
| ``cut`` | plain (G, ...) | this rank's rows of it | ``gather`` |
| ``collect`` | rows | all rows, as an operand of this rank's rows | ``scatter`` |
| ``scatter`` | this rank's part of a sum (G, ...) | this rank's rows of the sum | ``collect`` |

Everything after a sum is computed in full on every rank, so every rank has its whole gradient. Sums of the formula are pending until a
value is required, and share an exchange (``pending``). The same applies to sums of backward (``maps``).

Each exchange begins with a handshake, unless it is a sum that an earlier call with the same signature has made too (``listed``). The
handshake compares the operation, the line of the program, the operations since the last exchange with their numbers, and a fingerprint of
each plain tensor on the CPU that was combined with rows. Small amounts of data on the CPU are sent in the handshake. Fingerprints of
tensors on an accelerator are compared at the end of the call, for which the host waits once.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import host_bytes, tensor_of_bytes
from lightning_ddp_losses.distributed.rows.listed import ExchangeList, exchange_digest
from lightning_ddp_losses.distributed.user_line import callers, package_of, shown_line
from lightning_ddp_losses.errors import InputError, RankMismatchError

_FINGERPRINT_BYTES = 3 * torch.float64.itemsize
_MOST_KEPT = 4096
_FUNCTION_CODE = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_CHECKPOINT_MODULE = "torch.utils.checkpoint"
_OWN_PACKAGES = ("torch", "lightning_ddp_losses")
_COPIED = "This operator has copied rows of all ranks, so the write would be lost. Write into a clone, or before it."
SHARED_OR_NOT = (
    "Whether its result is a copy depends on the number of rows, so this rank would write into other memory than one process. "
    "Write into a clone: .clone() in its place."
)
"""Advice for results that share memory differently than in one process."""


class Exchanged(NamedTuple):
    """One exchange of a call.

    Attributes:
        kind: ``"sum"``, ``"rows"`` or ``"counts"``.
        operator: The operator that it belongs to.
        line: The line of the loss.
        numbers: The maximum number of elements that a rank sends.
    """

    kind: str
    operator: str
    line: str
    numbers: int


class Watched(NamedTuple):
    """Memory that must not be written to, since the write would be lost.

    Attributes:
        tensor: A tensor in that memory.
        version: Its version when it was created.
        operator: The operator that created it.
        line: The line of the loss.
        content: Fingerprint of a plain tensor on the CPU, because a write through ``.data`` does not change the version. If empty, the
            content is not compared.
        fix: What to do instead.
    """

    tensor: Tensor
    version: int
    operator: str
    line: str
    content: bytes
    fix: str = _COPIED


class Comparison(NamedTuple):
    """What ranks compare in an exchange.

    Attributes:
        what: The operation.
        compared: Values that must be equal on all ranks, by name.
        plain: Plain tensors that must be equal on all ranks.
    """

    what: str
    compared: dict[str, object]
    plain: list[Tensor]

    @property
    def text(self) -> str:
        """The operation and the values, one per line."""
        return "\n".join([self.what, *(f"{name}={value}" for name, value in self.compared.items())])


class EndOfCall(NamedTuple):
    """What ranks compare at the end of a formula.

    Attributes:
        comparison: The result, and everything since the last exchange.
        on_device: The plain tensors on an accelerator that were combined with rows.
        prints: Their fingerprints.
    """

    comparison: Comparison
    on_device: list[Tensor]
    prints: bytes


class PlainTensors:
    """Plain tensors that were combined with rows, until ranks compare them.

    Attributes:
        by_id: Those since the last exchange.
        on_host: Earlier ones on the CPU, and their fingerprints. Their exchanges did not have a handshake.
        on_device: All of the call that are on an accelerator, and their fingerprints.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Tensor] = {}
        self.on_host: list[tuple[Tensor, bytes]] = []
        self.on_device: list[tuple[Tensor, Tensor]] = []


class UnsentSums:
    """The pending values of one call.

    Attributes:
        values: Sums that have not been exchanged yet, and the operators that wait for them (``pending``).
        number_of_values: Number of pending values so far.
        in_backward: Sums of backward that have not been exchanged yet (``maps``).
        first_node: Number of the first node of the call in the graph.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.number_of_values = 0
        self.in_backward: list[Any] = []
        self.first_node = torch_compat.next_node()


class RowsCall:
    """One evaluation of a formula on the rows of all ranks.

    Args:
        title: Name of the loss in messages.
        group: Process group. None is the world.
        signature: What identifies the calls that make the same exchanges, equal on all ranks.

    Attributes:
        exchanges: The list of exchanges that ranks follow or record.
        exchanged: The exchanges so far, forward and backward.
        is_over: True after the formula has returned. From then on, rows stored by the formula can only be used by a checkpoint in backward.
        has_grad_mode: Whether gradients were enabled when the call began.
        waiting: Values that wait for an exchange.
    """

    def __init__(self, title: str, group: Group, signature: str) -> None:
        self.title, self.group = title, group
        self.exchanges = ExchangeList(signature, group)
        self.rank = process_groups.rank(group)
        self.world_size = process_groups.world_size(group)
        self.exchanged: list[Exchanged] = []
        self.is_over = False
        self.has_grad_mode = torch.is_grad_enabled()
        self.waiting = UnsentSums()
        self._operations: list[str] = []
        self._plain = PlainTensors()
        self._watched: list[Watched] = []
        self._arguments: list[tuple[str, Tensor, int]] = []
        self._watched_rows: set[tuple[int, int]] = set()

    # ------------------------------------------------------------------ what ranks compare

    def note_operation(self, text: str) -> None:
        """Record an operation and its numbers, which the next exchange compares."""
        self._operations.append(text)

    def note_plain(self, tensor: Tensor) -> None:
        """Record a plain tensor that is combined with rows. The next exchange compares it, or the end of the call on an accelerator."""
        self._plain.by_id[id(tensor)] = tensor
        if not _is_on_host(tensor) and not self.is_over:
            self._plain.on_device.append((tensor, _fingerprint(tensor)))

    def watch(self, tensor: Tensor, operator: str) -> None:
        """Raise an error at the end of the call if this plain tensor has been written to."""
        content = host_bytes(_fingerprint(tensor)) if tensor.is_cpu else b""
        self._watched.append(Watched(tensor, tensor._version, operator, line_of_loss(), content))

    def watch_rows(self, local: Tensor, operator: str, fix: str = _COPIED) -> None:
        """Raise an error at the end of the call if these rows have been written to."""
        key = id(local), local._version
        if key not in self._watched_rows:
            self._watched_rows.add(key)
            self._watched.append(Watched(local, local._version, operator, line_of_loss(), b"", fix))

    def watch_argument(self, name: str, rows: Tensor) -> None:
        """Raise an error at the end of the call if this rank's rows of an argument have been written to."""
        self._arguments.append((name, rows, rows._version))

    def refuse_lost_writes(self) -> None:
        """Reject a call that has written into an argument, or into memory that does not belong to the rows.

        Raises:
            InputError: naming the argument, or the operator whose result was written to.
        """
        for name, rows, version in self._arguments:
            if rows._version != version:
                raise InputError(
                    f"{self.title}: argument {name}",
                    expected="no write in place into an argument",
                    got="one",
                    fix="Use the operator without the underscore, or write into a clone.",
                )
        watched, self._watched = self._watched, []
        for tensor, version, operator, line, content, fix in watched:
            if tensor._version != version or (content and host_bytes(_fingerprint(tensor)) != content):
                raise InputError(
                    f"{self.title}: {operator}",
                    expected="no write in place into its result, or into the rows that it was made of",
                    got=f"one, after {line}",
                    fix=fix,
                )

    def comparison(self, what: str, line: str, must_match: dict[str, object]) -> Comparison:
        """Return what ranks compare in the next exchange. It includes the operations and plain tensors since the last one."""
        plain, self._plain.by_id = list(self._plain.by_id.values()), {}
        operations, self._operations = self._operations, []
        compared = {
            "at": line,
            **must_match,
            "operations since the last exchange": "; ".join(operations),
            "tensors that rows have met": "; ".join(_form_of(tensor) for tensor in plain),
        }
        return Comparison(f"{self.title}: {what}", compared, plain)

    def listed_sums(self, comparison: Comparison, parts: Sequence[tuple[Tensor, str]]) -> list[Tensor] | None:
        """Return the combined parts of all ranks if the list of exchanges contains this one. If None, ranks must meet in a handshake.

        The fingerprints of plain tensors are compared in the next handshake, at the end of the call at the latest.

        Communication: ``ExchangeList.sums``.
        """
        found = self.exchanges.sums(comparison.text, parts)
        if found is not None:
            self._plain.on_host += _fingerprints_of(comparison.plain)
        return found

    def meet(
        self, comparison: Comparison, payload: bytes = b"", parts: Sequence[tuple[Tensor, str]] = ()
    ) -> list[bytes]:
        """Begin an exchange with all ranks, and return their payloads in rank order. Collective.

        Args:
            comparison: What ranks compare.
            payload: This rank's bytes.
            parts: This rank's parts of sums, and how each is combined. Sums can be exchanged without a handshake in the next call.

        Raises:
            RankMismatchError: on every rank, if operations, lines, shapes or plain tensors differ.

        Communication: one handshake.
        """
        self.exchanges.before_handshake(comparison.text)
        payloads = self._handshake(comparison, payload)
        self.exchanges.record(comparison.text, parts)
        return payloads

    def _handshake(self, comparison: Comparison, payload: bytes) -> list[bytes]:
        """Send a comparison to all ranks, and return their payloads."""
        prints, self._plain.on_host = self._plain.on_host + _fingerprints_of(comparison.plain), []
        own = b"".join(content for _, content in prints)
        compared = comparison.compared
        if self.exchanges.divergence:
            compared = {**compared, "left the list of exchanges": self.exchanges.divergence}
        try:
            payloads = handshake.all_gather(comparison.what, compared, own + payload, group=self.group)
            self._refuse_other_plain([tensor for tensor, _ in prints], payloads)
        except Exception:
            self.exchanges.stop()
            raise
        return [sent[len(own) :] for sent in payloads]

    def comparison_at_end(self, lines: str = "", must_match: dict[str, object] | None = None) -> EndOfCall:
        """Return what ranks compare at the end of the formula. The host waits for an accelerator.

        Args:
            lines: Lines of the sums that are part of this exchange.
            must_match: Properties of these sums that must be equal on all ranks.
        """
        met, self._plain.on_device = self._plain.on_device, []
        prints = b""
        if met:
            prints = host_bytes(torch.stack([found.to(met[0][1].device) for _, found in met]).cpu().double())
        compared = {"exchanges": len(self.exchanged), "on a device": len(met), **(must_match or {})}
        return EndOfCall(self.comparison("result", lines, compared), [tensor for tensor, _ in met], prints)

    def listed_at_end(self, end: EndOfCall, parts: Sequence[tuple[Tensor, str]]) -> list[Tensor] | None:
        """Return the combined parts of all ranks if the list of exchanges contains the one at the end. If None, ranks must meet.

        Communication: ``ExchangeList.sums``.
        """
        if not self.exchanges.contains_last():
            return None
        on_host = self._plain.on_host + _fingerprints_of(end.comparison.plain)
        digest = exchange_digest(b"".join([end.prints, *(content for _, content in on_host)]))
        found = self.exchanges.sums(end.comparison.text, parts, digest)
        if found is not None:
            self.exchanges.store()
        return found

    def meet_at_end(
        self, end: EndOfCall, payload: bytes = b"", parts: Sequence[tuple[Tensor, str]] = ()
    ) -> list[bytes]:
        """Begin the exchange at the end of the formula, which also compares the plain tensors on an accelerator. Collective.

        Args:
            end: What ranks compare.
            payload: This rank's parts of the sums that are sent in the handshake.
            parts: This rank's parts of all sums, and how each is combined.

        Returns:
            The payloads of all ranks.

        Raises:
            RankMismatchError: on every rank, if the number of exchanges, results or plain tensors differ.

        Communication: one handshake.
        """
        comparison = end.comparison
        text = comparison.text
        self.exchanges.before_handshake("")
        if self.exchanges.have_some_left():
            comparison.compared["a rank has left the list of exchanges"] = "yes"
        payloads = self._handshake(comparison, end.prints + payload)
        self._refuse_other_plain(end.on_device, payloads)
        self.exchanges.record_last(text, parts)
        self.exchanges.store()
        return [sent[len(end.prints) :] for sent in payloads]

    def _refuse_other_plain(self, tensors: Sequence[Tensor], payloads: Sequence[bytes]) -> None:
        """Reject plain tensors whose values differ between the ranks. All ranks reach the same result.

        Args:
            tensors: The tensors on this rank.
            payloads: The fingerprints of these tensors from each rank.
        """
        for number, tensor in enumerate(tensors):
            start = number * _FINGERPRINT_BYTES
            sent = [payload[start : start + _FINGERPRINT_BYTES] for payload in payloads]
            if len(set(sent)) == 1:
                continue
            table = tensor_of_bytes(sent).view(torch.float64).view(len(sent), 3)
            rounding = 16 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
            atol = rounding * float(table[:, 2].max())
            if torch.allclose(table, table[:1].expand_as(table), rtol=0, atol=atol):
                continue
            raise RankMismatchError(
                f"{self.title}: a tensor {_form_of(tensor)} that is no argument, and meets rows of all ranks",
                expected="the same values on every rank",
                ranks=[f"sum {numbers[0]:.6g}" for numbers in table.tolist()],
                fix="Hand in each tensor that has rows as an argument. What else the formula uses must be equal on all ranks.",
                collective=True,
            )

    # ------------------------------------------------------------------ exchanges, without gradients

    def count(self, rows: int, operator: str) -> tuple[int, ...]:
        """Return the numbers of rows of all ranks. Communication: one handshake."""
        line = line_of_loss()
        payloads = self.meet(self.comparison(f"rows of {operator}", line, {}), rows.to_bytes(8, "little"))
        self.exchanged.append(Exchanged("counts", operator, line, 1))
        return tuple(int.from_bytes(sent, "little") for sent in payloads)


class Place(NamedTuple):
    """The origin of an exchange, which is named in the same way in forward and backward.

    Attributes:
        call: The call.
        operator: The operator.
        line: The line of the loss.
        in_backward: True if it is an exchange of gradients.
    """

    call: RowsCall
    operator: str
    line: str
    in_backward: bool = False

    def backward(self) -> Place:
        """Return the origin of the corresponding exchange in backward."""
        return self._replace(in_backward=not self.in_backward)


# ---------------------------------------------------------------------- lines and fingerprints


def line_of_loss(frame: FrameType | None = None) -> str:
    """Return the innermost line that belongs neither to torch nor to this package, with file, number, function and text."""
    for each in callers(frame or inspect.currentframe()):
        if package_of(each.f_code.co_filename) not in _OWN_PACKAGES:
            return shown_line(each, each.f_lineno)
    return ""


def is_in_custom_function() -> bool:
    """Return whether the formula is inside the forward of a custom ``autograd.Function``."""
    return any(frame.f_code is _FUNCTION_CODE for frame in _frames_of_formula())


def number_of_checkpoints() -> int:
    """Return the number of nested ``torch.utils.checkpoint`` calls that the formula is in."""
    found = 0
    for frame in _frames_of_formula():
        is_checkpoint = frame.f_code.co_name == "checkpoint"
        found += is_checkpoint and frame.f_globals.get("__name__") == _CHECKPOINT_MODULE
    return found


def _frames_of_formula() -> Iterator[FrameType]:
    """Yield the frames from here to the call of the formula."""
    for frame in callers(inspect.currentframe()):
        if frame.f_code.co_name == "evaluate_on_rows":
            return
        yield frame


def line_of_error(error: BaseException) -> str:
    """Return the line of the loss that an error was raised from."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        if package_of(traceback.tb_frame.f_code.co_filename) not in _OWN_PACKAGES:
            found = shown_line(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _form_of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum, a weighted sum and the sum of magnitudes of a tensor, (3,) float64 (float32 if the device lacks float64)."""
    flat = tensor.detach().resolve_conj()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    wide = flat.to(torch.float32 if flat.device.type == "mps" else torch.float64).reshape(-1)
    # an infinite sum would hide any difference
    wide = wide.nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)
    weights = _weights(wide.numel(), wide.dtype, wide.device)
    return torch.stack([wide.sum(), wide.dot(weights), wide.abs().sum()])


def _weights(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights of a fingerprint. On the CPU, those of few numbers are kept."""
    if device.type == "cpu" and numbers <= _MOST_KEPT:
        return _kept_weights(numbers, dtype)
    return torch.arange(1, numbers + 1, dtype=dtype, device=device).sin_()


@functools.lru_cache(maxsize=32)
def _kept_weights(numbers: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(1, numbers + 1, dtype=dtype).sin_()


def _fingerprints_of(tensors: Sequence[Tensor]) -> list[tuple[Tensor, bytes]]:
    """Return the tensors on the CPU with their fingerprints."""
    return [(tensor, host_bytes(_fingerprint(tensor))) for tensor in tensors if _is_on_host(tensor)]


def _is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor can be read without waiting for an accelerator."""
    return tensor.is_cpu
