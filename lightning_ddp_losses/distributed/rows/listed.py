"""The exchanges of a formula's call, which ranks agree on before they begin, so that the sums among them do not need a handshake.

The first call with a signature and these numbers of rows records its exchanges: what ranks compare in each of them, and the sizes of its
sums. The next call compares a digest of the lists in its opening handshake. If it is equal on all ranks, every rank follows the list. A sum
is then one collective of the listed size with two more numbers: whether this rank has left the list, in this exchange or an earlier one. A
rank whose next exchange is another one (or which fails, or returns too early) takes part in the listed one with zeros, so collectives
always have equal sizes.

On the CPU all ranks read these two numbers with the sum. If a rank has left, all ranks repeat the exchange with a handshake: it succeeds if
all of them left for the same exchange (a branch on a global value), and the new list is recorded. Otherwise all ranks raise the error with
their lines. On an accelerator only ranks that leave read the numbers immediately, since reading waits for the device. If some ranks leave,
they take part in the remaining exchanges of the list with zeros, and all ranks raise the error at the end of the call.

The exchange at the end of the call is in the list if its sums are too large for its handshake. It then also compares a digest of the plain
tensors that were combined with rows. If the digests differ, all ranks repeat it with a handshake, which names the tensor.

Exchanges of rows and counts, and of backward, always begin with a handshake. (Sums of backward are mostly small and sent in theirs, and a
list would have to be followed until an unknown time, because ranks may skip backward or repeat it.)
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import add_over_ranks_, as_bytes, start_gather, wait, wide_dtype
from lightning_ddp_losses.errors import DDPLossError, PeerError

SUM, STACK = "sum", "stack"
"""How the parts of all ranks are combined: as their sum, or stacked as (W, ...)."""

_DIGEST_BYTES = 16
NO_LIST = bytes(_DIGEST_BYTES)
"""Sent as the digest by a rank that does not have a list."""

_FLAG_BYTES = 8  # the two flags in front of gathered parts, which stay aligned
_MOST_SIGNATURES = 64  # of a group
_MOST_LISTS = 16  # of a signature
_MOST_LEFT = 4  # number of successive calls that leave their list, after which the signature does not get another one


class Form(NamedTuple):
    """What a rank sends for one sum.

    Attributes:
        shape: Shape of the part.
        dtype: Its dtype.
        device: Its device.
        kind: ``SUM`` or ``STACK``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str

    @property
    def num_bytes(self) -> int:
        """Size of the part."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def zeros(self) -> Tensor:
        """Return the part of a rank that does not have one."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Listed(NamedTuple):
    """One exchange of a list.

    Attributes:
        text: What ranks compare in its handshake.
        forms: What a rank sends. Empty if the exchange begins with a handshake in every call.
        is_small: Whether the parts are gathered on the CPU, which takes less time than adding them.
        is_last: Whether it is the exchange at the end of the call, which also compares a digest.
    """

    text: str
    forms: tuple[Form, ...] = ()
    is_small: bool = False
    is_last: bool = False

    @property
    def is_on_host(self) -> bool:
        """Whether the flags can be read without waiting for an accelerator."""
        return all(form.device.type == "cpu" for form in self.forms)


class _Lists:
    """The lists of the calls with one signature, by the numbers of rows of all ranks.

    Attributes:
        by_rows: The lists.
        digest: Digest of all lists.
        times_left: Number of successive calls that have left their list.
        times_last_left: Number of successive calls that have left it in the exchange at their end.
    """

    def __init__(self) -> None:
        self.by_rows: dict[bytes, tuple[Listed, ...]] = {}
        self.digest = NO_LIST
        self.times_left = self.times_last_left = 0
        self._digests: dict[bytes, bytes] = {}

    def store(self, rows: bytes, exchanges: Sequence[Listed]) -> None:
        """Store the exchanges of a call, unless all of them begin with a handshake, or calls always differ."""
        self.by_rows.pop(rows, None)
        self._digests.pop(rows, None)
        if self.times_left < _MOST_LEFT and any(each.forms for each in exchanges):
            if len(self.by_rows) == _MOST_LISTS:
                oldest = next(iter(self.by_rows))
                del self.by_rows[oldest], self._digests[oldest]
            texts = [f"{each.text}\n{_text_of(each.forms)} {each.is_small}" for each in exchanges]
            self.by_rows[rows] = tuple(exchanges)
            self._digests[rows] = exchange_digest("\n\n".join(texts).encode())
        self.digest = NO_LIST
        if self.by_rows:
            self.digest = exchange_digest(b"".join(rows + digest for rows, digest in self._digests.items()))


class ExchangeList:
    """The exchanges of one call.

    Args:
        signature: What identifies the calls that follow one list, equal on all ranks.
        group: Process group. None is the world.

    Attributes:
        digest: Digest of the lists that this rank has recorded for this signature. ``NO_LIST`` if there are none.
        divergence: Where this rank has left the list while other ranks followed it, in words. Empty otherwise.
    """

    def __init__(self, signature: str, group: Group) -> None:
        self._group = group
        lists_of_group = process_groups.internal_groups(group).notes.setdefault(ExchangeList, {})
        if signature not in lists_of_group:
            if len(lists_of_group) == _MOST_SIGNATURES:
                del lists_of_group[next(iter(lists_of_group))]
            lists_of_group[signature] = _Lists()
        self._lists: _Lists = lists_of_group[signature]
        self._rows = b""
        self._expected: tuple[Listed, ...] = ()
        self._channel = handshake.Channel.of(group, "handshakes")
        self._before: Callable[[], None] | None = None
        self._exchanges: list[Listed] = []
        self._is_open = True
        self._is_followed = False
        self._has_left = self._has_left_last = False
        self._have_some_left = False
        self._unread: list[Tensor] = []
        self.digest = self._lists.digest
        self.divergence = ""

    # ------------------------------------------------------------------ begin and end of the call

    def begin(self, digests: Sequence[bytes], rows: bytes) -> None:
        """Follow the list of earlier calls if all ranks have the same one. From now on a handshake of another operation leaves it.

        Args:
            digests: The digests of all ranks.
            rows: The numbers of rows of all ranks.
        """
        self._rows = rows
        if self.digest != NO_LIST and len(set(digests)) == 1:
            self._expected = self._lists.by_rows.get(rows, ())
        self._is_followed = bool(self._expected)
        self._before, self._channel.before_message = self._channel.before_message, self._make_way

    def fail(self, error: Exception) -> None:
        """Leave the list after an error of this rank, so that the other ranks receive it in their next handshake."""
        has_reached_all = getattr(error, "collective", False) or isinstance(error, PeerError)
        if has_reached_all or handshake.was_reported_in(self._channel.group, error):
            return
        with contextlib.suppress(RuntimeError):  # this rank's own error is the one to raise
            self.leave()

    def end(self) -> None:
        """Stop following the list at the end of the call."""
        self._is_open = self._is_followed = False
        self._channel.before_message = self._before

    def store(self) -> None:
        """Record the exchanges of this call as the list of the next one. Called at the end of a call without an error."""
        lists = self._lists
        if self._is_followed:
            lists.times_left = lists.times_last_left = 0
            return
        lists.times_last_left += self._has_left_last
        lists.times_left += self._has_left and not self._has_left_last
        lists.store(self._rows, self._exchanges)

    def stop(self) -> None:
        """Stop following the list after an error that all ranks raise."""
        self._is_followed = False

    def have_some_left(self) -> bool:
        """Return whether some ranks have left the list. Waits for an accelerator if there were sums on it."""
        unread, self._unread = self._unread, []
        if unread and bool((torch.stack(unread)[:, 1] > 0).any()):
            self._have_some_left = True
        return self._have_some_left

    # ------------------------------------------------------------------ exchanges

    def contains_last(self) -> bool:
        """Return whether the next exchange of the list is the one at the end of the call."""
        listed = self._next()
        return self._is_followed and listed is not None and listed.is_last

    def sums(self, text: str, parts: Sequence[tuple[Tensor, str]], digest: bytes = NO_LIST) -> list[Tensor] | None:
        """Return the combined parts of all ranks if this is the next exchange of the list. None if a handshake is required.

        Args:
            text: What ranks compare.
            parts: This rank's parts, and how each is combined.
            digest: Digest of what must be equal on all ranks. Only the last exchange compares it.

        Raises:
            PeerError: if a rank does not take part.

        Communication: one collective for few bytes on the CPU, otherwise one for each dtype and device of the parts.
        """
        if not self._is_open or not self._is_followed:
            return None
        forms = tuple(_form_of(tensor, kind) for tensor, kind in parts)
        listed = self._next()
        if listed is None or listed.text != text or listed.forms != forms:
            self.leave()
            return None
        found = self._send(listed, [tensor for tensor, _ in parts], stays=1, has_left=0, digest=digest)
        if listed.is_last and self.have_some_left():
            self._stop_in(listed)
            return None
        if found is not None:
            self._exchanges.append(listed)
        return found

    def before_handshake(self, text: str) -> None:
        """Leave the list unless its next exchange is this one, which begins with a handshake. An empty text is the end of the call."""
        if not self._is_followed:
            return
        listed = self._next()
        if listed is None and not text:
            return
        if listed is None or listed.text != text or listed.forms:
            self.leave()

    def record_last(self, text: str, parts: Sequence[tuple[Tensor, str]]) -> None:
        """Record the exchange at the end of the call, unless it consists of the handshake only, or mostly differs."""
        self.record(text, parts)
        listed = self._exchanges.pop()
        if not listed.is_small and self._lists.times_last_left < _MOST_LEFT:
            self._exchanges.append(listed._replace(is_last=True))

    def record(self, text: str, parts: Sequence[tuple[Tensor, str]] = ()) -> None:
        """Record an exchange that began with a handshake."""
        if not self._is_open:
            return
        forms = tuple(_form_of(tensor, kind) for tensor, kind in parts)
        num_bytes = sum(form.num_bytes for form in forms)
        listed = Listed(text, forms)
        if listed.is_on_host and num_bytes <= handshake.inline_capacity(self._group) // 2:
            listed = listed._replace(is_small=True)
        self._exchanges.append(listed)

    def leave(self) -> None:
        """Take part in the next exchange of the list with zeros, and in all others if other ranks follow the list.

        Communication: that of these exchanges. None if the next one begins with a handshake, or if all are complete.
        """
        if not self._is_followed:
            return
        remaining = self._expected[len(self._exchanges) :]
        self._stop_in(self._next())
        for number, listed in enumerate(remaining):
            if not listed.forms:
                return
            is_first = number == 0
            self._send(listed, [form.zeros() for form in listed.forms], stays=0 if is_first else 1, has_left=1)
            if listed.is_on_host:
                return
            flags = self._unread.pop().tolist()
            if is_first and flags[0] == 0:
                return
            if not self.divergence:
                place = len(self._exchanges) + 1
                self.divergence = f"before exchange {place}, {', '.join(listed.text.splitlines()[:2])}"

    def _make_way(self) -> None:
        """Leave the list before a handshake, unless the other ranks also begin one: it is of this list, or of another operation."""
        listed = self._next()
        if listed is not None and listed.forms:
            self.leave()

    def _next(self) -> Listed | None:
        """Return the next exchange of the list. None if all are complete."""
        done = len(self._exchanges)
        return self._expected[done] if done < len(self._expected) else None

    # ------------------------------------------------------------------ collectives

    @torch.no_grad()
    def _send(
        self, listed: Listed, parts: Sequence[Tensor], *, stays: int, has_left: int, digest: bytes = NO_LIST
    ) -> list[Tensor] | None:
        """Return the combined parts of all ranks, or None if a rank has left the list."""
        before, self._channel.before_message = self._channel.before_message, None
        try:
            if self._channel.pending is not None:
                self._channel.pending.finish()
            if listed.is_small:
                return self._gather(listed, parts, stays, has_left)
            numbers = [stays, has_left, *(_numbers_of(digest) if listed.is_last else ())]
            return self._add(listed, parts, numbers)
        except DDPLossError:
            self.stop()
            raise
        finally:
            self._channel.before_message = before

    def _gather(self, listed: Listed, parts: Sequence[Tensor], stays: int, has_left: int) -> list[Tensor] | None:
        """Gather small parts on the CPU, and combine them in rank order."""
        flags = torch.zeros(_FLAG_BYTES, dtype=torch.uint8)
        flags[0], flags[1] = stays, has_left
        message = torch.cat([flags, *(as_bytes(part) for part in parts)])
        gathered, work = start_gather(message, group=self._channel.group)
        with self._naming_lost_peers(listed):
            wait(work)
        if self._is_left(gathered[:, :2].sum(0)):
            return None
        found, start = [], _FLAG_BYTES
        for form in listed.forms:
            stop = start + form.num_bytes
            sent = gathered[:, start:stop].contiguous().view(-1).view(form.dtype).view(len(gathered), *form.shape)
            if form.kind == SUM:
                sent = sent.sum(0, dtype=wide_dtype(form.dtype)).to(form.dtype)
            found.append(sent)
            start = stop
        return found

    def _add(self, listed: Listed, parts: Sequence[Tensor], numbers_first: Sequence[int]) -> list[Tensor] | None:
        """Add parts of one dtype and device at a time. The first sum begins with the flags and the numbers of the digest."""
        world_size, rank = process_groups.world_size(self._group), process_groups.rank(self._group)
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, form in enumerate(listed.forms):
            together.setdefault((form.dtype, form.device), []).append(number)
        found: dict[int, Tensor] = {}
        # if there are sums on an accelerator, the flags are in the first of these
        in_order = sorted(together.items(), key=lambda item: item[0][1].type == "cpu")
        for place, ((dtype, device), numbers) in enumerate(in_order):
            # 1. this rank's parts and flags
            pieces = [torch.tensor(numbers_first, dtype=wide_dtype(dtype), device=device)]
            for number in numbers:
                part = parts[number]
                if listed.forms[number].kind == STACK:
                    slots = part.new_zeros(world_size, *part.shape)
                    slots[rank] = part
                    part = slots
                pieces.append(part.reshape(-1).to(wide_dtype(dtype)))
            flat = torch.cat(pieces)
            # 2. their sum
            with self._naming_lost_peers(listed):
                add_over_ranks_(flat, self._group)
            if place == 0:
                flags = _flags_of(flat[: len(numbers_first)], world_size)
                if listed.is_on_host and self._is_left(flags):
                    return None
                if not listed.is_on_host:
                    self._unread.append(flags)
            # 3. the sum of each part
            values = torch.split(flat, [piece.numel() for piece in pieces])[1:]
            for number, value in zip(numbers, values, strict=True):
                form = listed.forms[number]
                shape = (world_size, *form.shape) if form.kind == STACK else form.shape
                # not views of one tensor, whose versions would count each other's writes
                found[number] = value.view(shape).to(dtype).data
        return [found[number] for number in range(len(parts))]

    @contextlib.contextmanager
    def _naming_lost_peers(self, listed: Listed) -> Iterator[None]:
        """Raise an error of gloo as a `PeerError`."""
        try:
            yield
        except RuntimeError as error:  # for a timeout or a closed connection
            where = ", ".join(listed.text.splitlines()[:2])
            raise handshake.missing_peers_error(error, where, self._channel.group) from error

    def _is_left(self, flags: Tensor) -> bool:
        """Return whether a rank has left the list. This rank then leaves it too, because all ranks have read the same flags."""
        if not flags[1] > 0:
            return False
        self._stop_in(self._next())
        return True

    def _stop_in(self, listed: Listed | None) -> None:
        """Stop following the list in this exchange of it, which this rank or another one has left."""
        self._is_followed, self._has_left = False, True
        self._has_left_last = listed is not None and listed.is_last


def _numbers_of(digest: bytes) -> list[int]:
    """Return numbers of a digest whose sums over ranks show whether all are equal: its half bytes and their squares.

    The sums of so small numbers are exact in float32 for up to 74,000 ranks.
    """
    halves = [half for byte in digest for half in divmod(byte, 16)]
    return [*halves, *(half * half for half in halves)]


def _flags_of(sums: Tensor, world_size: int) -> Tensor:
    """Return how many ranks stay on the list, and how many have left it, (2,) float32. Digests that differ count as leaving.

    Args:
        sums: The flags and ``_numbers_of`` a digest, added over ranks. Without a digest there are two numbers.
        world_size: The number of ranks.
    """
    flags = sums[:2].abs().float()
    if len(sums) > 2:
        halves, squares = sums[2:].abs().double().chunk(2)
        # equal for equal numbers only (Cauchy and Schwarz)
        flags[1] += (squares * world_size - halves.square()).abs().sum()
    return flags


def exchange_digest(content: bytes) -> bytes:
    """Return a digest of some content."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _form_of(tensor: Tensor, kind: str) -> Form:
    return Form(tuple(tensor.shape), tensor.dtype, tensor.device, kind)


def _text_of(forms: Sequence[Form]) -> str:
    """Return forms as text. Devices of ranks have different numbers."""
    return "; ".join(f"{form.kind} {form.shape} {form.dtype} on {form.device.type}" for form in forms)
