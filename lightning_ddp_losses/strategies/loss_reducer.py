"""The losses' gradients: one mean over ranks, by name, once per synchronising backward.

Whatever this rank called, and in whatever order: gradients are read from the live module after backward, so parameters that were
created, replaced or unfrozen after the wrap take part, and no hook can be lost. It covers every trainable parameter that the model's
own DDP does not reduce (nor a shard, nor one the user told DDP to ignore).

Every gradient has its mean when ``reduce`` returns, at one place, when autograd's backward is through:

0. ``EarlyGradients``, an optimisation, and the only one: what was complete when the call check was exchanged. It has said which
   gradients are there; few bytes on the CPU travelled in it, other small ones on the CPU left in a bucket then, beside the rest of
   backward. They are put in place, if none of them changed since. Else:
1. One flat buffer of [a has-gradient flag per parameter | small gradients of the losses that may have some]. On an accelerator the
   flags travel by handshake (host to host), so that nothing waits for the device.
2. Flags must sum to 0 or W: else the same error on every rank.
3. What was not in 0 or 1, each gradient over ``LARGE_BYTES`` in its own memory.

What step 0 is worth, beside ``ddp`` (``ddp_find_unused_parameters`` for two losses that alternate): steps interleaved on 2 ranks, a busy
machine of 2 cores; processor time more per step, and the ratio of wall times (torch 2.13, Lightning 2.6.6; 2026).

| module | A/A | with step 0, in which small gradients leave early | inline ones only | without |
|---|---|---|---|---|
| ArcFace (inline) | 0.0 ms, 1.00 | 1.8 ms, 1.16 | 2.1 ms, 1.18 | 2.3 ms, 1.23 |
| 3 losses (a bucket) | 0.1 ms, 0.98 | 3.3 ms, 1.21 | 5.0 ms, 1.30 | 5.0 ms, 1.30 |
| 2 losses that alternate (inline) | 0.0 ms, 1.00 | 1.5 ms, 1.13 | 1.6 ms, 1.13 | 1.9 ms, 1.13 |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.precision import parameters_of
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.raw_collectives import host_bytes
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import LossCallError, RankMismatchError, format_error
from lightning_ddp_losses.strategies.gradient_buckets import (
    EarlyGradients,
    GradientBucket,
    SeenGradient,
    gradient_flag,
    launch_in_place,
)

LARGE_BYTES = 1 << 20
_EXACT_WORLD = 256  # bfloat16 counts flags exactly up to here


class ReducedParameter(NamedTuple):
    """A parameter that the strategy reduces by itself.

    Attributes:
        name: In the module.
        parameter: As the module holds it now.
        owner: Index of its loss, -1 for a parameter outside all losses.
    """

    name: str
    parameter: nn.Parameter
    owner: int


class ReducedParameters:
    """Every trainable parameter that the model's own DDP does not reduce, nor a shard, nor one the user told DDP to ignore.

    Args:
        module: The live LightningModule.
        reduced_elsewhere: Parameters that the model's DDP reduces.
        ignored: Names that the user told DDP to leave alone.
        first_bucket: Bytes of gradient of which the model's DDP sends nothing before all are ready.

    Attributes:
        elsewhere: Parameters that the model's DDP reduces now.
        frozen: Names of those that it reduced before they were frozen.
    """

    def __init__(
        self,
        module: nn.Module,
        reduced_elsewhere: Sequence[Tensor],
        ignored: Sequence[str] = (),
        *,
        first_bucket: int = 0,
    ) -> None:
        self._module = module
        self.leave_out(reduced_elsewhere, first_bucket)
        self.frozen: list[str] = []
        self._ignored = frozenset(ignored)
        self._equal_on_all_ranks: dict[str, nn.Parameter] = {}
        self._losses: list[str] = []
        self._candidates: list[ReducedParameter] = []
        self._signature: tuple[object, ...] = ()
        self._description = ""

    def leave_out(self, reduced_elsewhere: Sequence[Tensor], first_bucket: int) -> None:
        """Leave parameters to the model's DDP from now on."""
        self.first_bucket = first_bucket
        # the tensors are kept, not only their ids: an id may be taken again
        self.elsewhere = {id(p): p for p in reduced_elsewhere}
        self._module_parameters: list[Tensor] = []

    def watch(self, losses: Sequence[str]) -> None:
        """Say what the losses are called; what exists now counts as synchronised."""
        self._losses = list(losses)
        self._module_parameters = []
        self._equal_on_all_ranks.update({p.name: p.parameter for p in self.now()})

    def now(self) -> list[ReducedParameter]:
        """Return them, sorted by name. Names are looked up anew only where the module holds other parameters than before."""
        held = parameters_of(self._module)
        if len(held) != len(self._module_parameters) or not all(map(is_, held, self._module_parameters)):
            self._candidates = self._find()
            self._module_parameters = held
        return [c for c in self._candidates if c.parameter.requires_grad or c.parameter.grad is not None]

    def _find(self) -> list[ReducedParameter]:
        found = []
        for name, parameter in self._module.named_parameters():
            if id(parameter) in self.elsewhere or name in self._ignored or shard_of(parameter) is not None:
                continue
            owners = [i for i, loss in enumerate(self._losses) if name.startswith(f"{loss}.")]
            found.append(ReducedParameter(name, parameter, next(iter(owners), -1)))
        return sorted(found, key=lambda p: p.name)

    def describe(self, parameters: Sequence[ReducedParameter]) -> str:
        """Return names, shapes and dtypes, short."""
        signature = tuple((p.name, p.parameter.shape, p.parameter.dtype) for p in parameters)
        if signature != self._signature or not self._description:
            self._signature = signature
            text = "; ".join(f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in signature)
            self._description = f"{text[:200]} #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
        return self._description

    def find_new(self, parameters: Sequence[ReducedParameter]) -> list[ReducedParameter]:
        """Return those that appeared, or were replaced, since they were last known to be equal on all ranks."""
        return [p for p in parameters if self._equal_on_all_ranks.get(p.name) is not p.parameter]

    def admit(self, new: Sequence[ReducedParameter]) -> None:
        """Take parameters that appeared after the wrap, if they are equal on all ranks.

        Raises:
            RankMismatchError: on every rank, where they are not.

        Communication: one handshake.
        """
        own = [hashlib.sha256(host_bytes(p.parameter.cpu())).hexdigest() for p in new]
        payloads = handshake.all_gather("new parameters", {}, json.dumps(own).encode())
        columns = zip(*map(json.loads, payloads), strict=True)
        differ = [f"`{p.name}`" for p, column in zip(new, columns, strict=True) if len(set(column)) > 1]
        if differ:
            raise RankMismatchError(
                "parameters created or replaced after the wrap",
                expected="equal values on all ranks",
                got=f"different values of {', '.join(differ)}",
                fix="Create them in __init__ or configure_model, where they are broadcast, or from the same seed on every rank.",
                collective=True,
            )
        self._equal_on_all_ranks.update({p.name: p.parameter for p in new})


class LossReducer:
    """Means the gradients of the parameters that the model's DDP leaves out.

    Args:
        parameters: Those parameters.
        wire_dtype: dtype on the wire; None: each gradient's own, and at least float32 for small ones.

    Attributes:
        parameters: Those parameters.
    """

    def __init__(self, parameters: ReducedParameters, wire_dtype: torch.dtype | None = None) -> None:
        self.parameters, self._wire_dtype = parameters, wire_dtype
        self._may_leave_early = True
        self._early: EarlyGradients | None = None
        self._backward_parameters: Sequence[ReducedParameter] = ()
        self._unwritten: list[SeenGradient] = []
        self._all_belong_to_losses = False

    # ------------------------------------------------------------------ in backward: what is complete leaves early

    def start_backward(self, parameters: Sequence[ReducedParameter], called: Sequence[bool]) -> None:
        """Look at the gradients before backward, to know later which of them it has written.

        Args:
            parameters: As they are in this backward.
            called: Per loss, whether it ran on this rank.
        """
        self._backward_parameters = parameters
        # what belongs to no loss gets its gradient later
        self._all_belong_to_losses = all(p.owner >= 0 for p in parameters)
        self._unwritten = [
            SeenGradient(p.parameter)
            for p in parameters
            if p.owner >= 0 and called[p.owner] and p.parameter.requires_grad
        ]

    def is_complete(self) -> bool:
        """Say whether backward has written the gradients of all losses that ran: each once, when all that comes into it is there."""
        while self._unwritten and self._unwritten[-1].has_changed():
            self._unwritten.pop()
        return not self._unwritten and self._all_belong_to_losses

    def pack(self) -> bytes:
        """Return for the call check's handshake which gradients are there, and few bytes of them; nothing where some are yet to come."""
        self._early = None
        parameters = self._backward_parameters
        if not parameters or not self._may_leave_early or not self.is_complete():
            return b""
        tensors = [p.parameter for p in parameters]
        is_small = [_is_small(p) for p in parameters]
        dtype = self._bucket_dtype(tensors)
        is_inline = (
            all(is_small)
            and self._flags_in_bucket(parameters)
            and EarlyGradients.num_bytes(tensors, dtype) <= handshake.inline_capacity()
        )
        self._early = EarlyGradients(tensors, dtype, is_inline=is_inline, is_small=is_small)
        return self._early.pack()

    def receive(self, payloads: Sequence[bytes | memoryview]) -> None:
        """Take what all ranks packed; it counts only where all of them packed something."""
        if self._early is not None and all(payloads):
            self._early.start(payloads)
        else:
            self._early = None

    def _take_early(self, parameters: Sequence[ReducedParameter]) -> EarlyGradients | None:
        """Return what left early, if no gradient has changed since.

        A hook, or a backward inside of backward (checkpointing), may have added to a gradient after it was packed. On all ranks then, or
        the handshake that says so meets another one, and is an error on every rank.
        """
        early, self._early = self._early, None
        if early is None:
            return None
        grown = early.find_grown()
        if not grown:
            return early
        names = ", ".join(parameters[i].name for i in grown)
        handshake.all_gather("gradients that grew after their losses", {"parameters": names})
        early.discard()
        self._may_leave_early = False  # it would happen again
        return None

    # ------------------------------------------------------------------ after backward

    def reduce(
        self, parameters: Sequence[ReducedParameter] | None = None, expected: Sequence[bool] | None = None
    ) -> None:
        """Replace each gradient by its mean over ranks.

        Args:
            parameters: As they are in this backward; None: they are looked up.
            expected: Per loss, whether its parameters may hold gradients, as all ranks have agreed; None: all may.

        Raises:
            LossCallError: on every rank, when a parameter has a gradient on some ranks only.

        Communication: one all-reduce, one more for each gradient over ``LARGE_BYTES``; on an accelerator one handshake.
        """
        world_size = process_groups.world_size()
        self._unwritten = []  # it holds gradients, which must not outlive the step
        if parameters is None:
            parameters = self.parameters.now()
        if not parameters or world_size == 1:
            self._early = None
            return
        flags = [gradient_flag(p.parameter.grad) for p in parameters]
        # 0. the ranks know already which gradients are there
        early = self._take_early(parameters)
        if early is not None:
            sums = early.sums
        # 1. else flags, and small gradients with them
        elif self._flags_in_bucket(parameters):
            reduced = [_is_small(p) and (expected is None or p.owner < 0 or expected[p.owner]) for p in parameters]
            bucket = self._small_bucket([p for p, packed in zip(parameters, reduced, strict=True) if packed], flags)
            bucket.launch()
            sums = bucket.finish()
        else:
            reduced = [False] * len(parameters)
            sums = self._sum_flags_by_handshake(parameters, flags)
        # 2. every gradient is there on all ranks, or on none
        if any(total not in (0, world_size) for total in sums):
            raise partial_gradients([p.name for p in parameters], flags)
        if early is not None:
            reduced = early.finish()
        # 3. what is left, all at once
        rest = [p for p, total, done in zip(parameters, sums, reduced, strict=True) if total and not done]
        self._reduce_present(rest)

    def _reduce_present(self, parameters: Sequence[ReducedParameter]) -> None:
        """Mean gradients that are there on all ranks."""
        small = [p for p in parameters if _is_small(p)]
        works: list[Callable[[], object]] = []
        if small:
            bucket = self._small_bucket(small)
            bucket.launch()
            works.append(bucket.finish)
        for p in parameters:
            if not _is_small(p):
                assert p.parameter.grad is not None
                works.append(launch_in_place(p.parameter.grad, self._wire_dtype))
        for finish in works:
            finish()

    def _small_bucket(self, reduced: Sequence[ReducedParameter], flags: Sequence[int] = ()) -> GradientBucket:
        parameters = [p.parameter for p in reduced]
        return GradientBucket(parameters, self._bucket_dtype(parameters), flags)

    def _bucket_dtype(self, parameters: Sequence[Tensor]) -> torch.dtype:
        if self._wire_dtype is not None and process_groups.world_size() <= _EXACT_WORLD:
            return self._wire_dtype
        dtype = torch.float32
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype

    @staticmethod
    def _flags_in_bucket(parameters: Sequence[ReducedParameter]) -> bool:
        # to read them back from an accelerator would wait for it
        return all(p.parameter.device.type == "cpu" for p in parameters)

    def _sum_flags_by_handshake(self, parameters: Sequence[ReducedParameter], flags: Sequence[int]) -> list[int]:
        must_match = {"parameters": self.parameters.describe(parameters)}
        payloads = handshake.all_gather("gradients", must_match, json.dumps(flags).encode())
        return [sum(column) for column in zip(*map(json.loads, payloads), strict=True)]


def _is_small(reduced: ReducedParameter) -> bool:
    return reduced.parameter.nbytes <= LARGE_BYTES


def partial_gradients(names: Sequence[str], flags: Sequence[int]) -> LossCallError:
    """Return the error for gradients that ranks hold differently. Communication: one handshake, which all ranks come to."""
    payloads = handshake.all_gather("gradients that differ", {}, json.dumps(list(flags)).encode())
    columns = zip(*map(json.loads, payloads), strict=True)
    parts: list[str] = []
    fixes: dict[str, None] = {}  # each once, in order
    for name, column in zip(names, columns, strict=True):
        if max(column) > 1:
            words = ["no gradient", "dense", "sparse"]
            expected = "dense"
            fixes[
                "Build the module with sparse=False: what a loss owns is averaged over the ranks as dense tensors."
            ] = None
        elif len(set(column)) > 1:
            words = ["no gradient", "gradient"]
            expected = "on every rank or on none"
            fixes["Use the parameter in the loss of every rank (times 0 where it should not count), or on none."] = None
        else:
            continue
        ranks = [words[min(flag, 2)] for flag in column]
        parts.append(format_error(f"gradient of `{name}`", expected=expected, ranks=ranks))
    return LossCallError("\n".join([*parts, *fixes]), collective=True)
