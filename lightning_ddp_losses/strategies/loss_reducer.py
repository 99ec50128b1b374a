"""The losses' gradients: one mean over ranks, by name, once per synchronising backward.

Gradients are read from the live module after backward, so parameters that were created, replaced or unfrozen after the wrap take part, and
no hook can be lost. The reduction covers every trainable parameter that the model's own DDP does not reduce (nor a shard, nor one that
DDP ignores by the user's choice). What follows from their names, shapes, dtypes and devices is decided once, in a `ReductionPlan`. Each
backward compares these, and makes another plan if one has changed. Every gradient has its mean when ``reduce`` returns:

0. The call check of this backward carries a has-gradient flag per parameter, and on the CPU the small gradients too if they are few bytes.
   Larger ones on the CPU are sent as soon as all flags are known, while backward continues. The result is used if the gradients of all
   losses that ran were complete on every rank, and did not change later.
1. Otherwise one flat buffer of [flags | small gradients of the losses that may have some]. On an accelerator flags travel from host to host
   instead, without a wait for the device.
2. Flags must sum to 0 or W; otherwise every rank raises the same error.
3. The remaining gradients, together. Each one over ``LARGE_BYTES`` is reduced in its own memory.

``ModelReduction`` tells exact values how the model itself is reduced.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from operator import and_, attrgetter, gt, ne
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_ddp_losses.core.modules import ModuleContents
from lightning_ddp_losses.core.torch_compat import tensor_version
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.global_values import gradient_reduction_of, reduced_by
from lightning_ddp_losses.distributed.messages import Agreement
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import LossCallError, RankMismatchError, format_error
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

LARGE_BYTES = 1 << 20
_EXACT_WORLD = 256  # bfloat16 counts flags exactly up to here
_KIND = attrgetter("shape", "dtype", "device")


class ReducedParameter(NamedTuple):
    """A parameter that the strategy reduces, and not DDP.

    Attributes:
        name: Name in the module.
        parameter: Current parameter of the module.
        owner: Index of its loss, -1 for a parameter outside all losses.
    """

    name: str
    parameter: nn.Parameter
    owner: int


class ReductionPlan:
    """The parameters of a backward, and what follows from them. It is reused while their names, shapes, dtypes and devices are the same.

    Args:
        reduced: Parameters, sorted by name.
        new: Those of them that are not known to be equal on all ranks.
        frozen: Names of parameters that the model's DDP reduced before they were frozen.

    Attributes:
        reduced: Parameters, sorted by name.
        new: Those of them that are not known to be equal on all ranks.
        parameters: The parameters without their names.
        is_small: For each, whether its gradient shares a buffer with others.
        is_on_host: Whether gradients can be read without waiting for an accelerator.
        is_of_losses: Whether each belongs to a loss. The gradient of another one may arrive at the end of backward.
        calls: What the ranks agree on in the call check.
        flags: What they agree on where flags have a separate handshake.
    """

    def __init__(
        self, reduced: Sequence[ReducedParameter], new: Sequence[ReducedParameter], frozen: Sequence[str]
    ) -> None:
        self.reduced, self.new = reduced, new
        self.parameters = [p.parameter for p in reduced]
        self.is_small = [p.nbytes <= LARGE_BYTES for p in self.parameters]
        self.is_on_host = _are_on_host(self.parameters)
        self.is_of_losses = all(p.owner >= 0 for p in reduced)
        text = "; ".join(f"{p.name} {tuple(p.parameter.shape)} {p.parameter.dtype}" for p in reduced)
        described = f"{text[:200]} #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
        must_match = {
            "trainable parameters outside the model's DDP": described,
            "new parameters": ", ".join(p.name for p in new) or "none",
            "parameters frozen since the model was wrapped": ", ".join(frozen) or "none",
        }
        self.calls = Agreement("backward", must_match)
        self.flags = Agreement("gradients", {"parameters": described})

    def marked(self, marks: Iterable[object]) -> list[nn.Parameter]:
        """Return the parameters that have a mark."""
        return list(itertools.compress(self.parameters, marks))


class ReducedParameters:
    """Trainable parameters that the model's own DDP does not reduce. Shards and names that the user excluded are left out.

    Args:
        module: The live LightningModule.
        reduced_elsewhere: Parameters that the model's DDP reduces.
        ignored: Names that the user excluded from DDP.
        first_bucket: Bytes of gradient that must be ready before the model's DDP sends any.

    Attributes:
        elsewhere: Parameters that the model's DDP reduces now.
    """

    def __init__(
        self,
        module: nn.Module,
        reduced_elsewhere: Sequence[Tensor],
        ignored: Collection[str] = (),
        *,
        first_bucket: float = 0,
    ) -> None:
        self._module = module
        self._ignored = frozenset(ignored)
        self._frozen: list[str] = []
        self._equal_on_all_ranks: dict[str, nn.Parameter] = {}
        self._losses: list[str] = []
        self._candidates: list[ReducedParameter] = []
        self._identities: list[tuple[str, int, int]] = []
        self._signature: object = None
        self._plan = ReductionPlan([], [], [])
        self.leave_out(reduced_elsewhere, first_bucket)

    def leave_out(self, reduced_elsewhere: Sequence[Tensor], first_bucket: float, frozen: Sequence[str] = ()) -> None:
        """Leave parameters to the model's DDP from now on.

        Args:
            reduced_elsewhere: Parameters that it reduces.
            first_bucket: Bytes of gradient that must be ready before it sends any.
            frozen: Names of those that it reduced until they were frozen.
        """
        self.first_bucket = first_bucket
        # the tensors are kept, not only their ids: an id may be taken again
        self.elsewhere = {id(p): p for p in reduced_elsewhere}
        self._frozen += frozen
        self._plan_anew()

    def watch(self, losses: Sequence[str]) -> None:
        """Set the names of the losses. Existing parameters count as synchronised."""
        self._losses = list(losses)
        self._plan_anew()
        self._count_as_equal(self.plan().reduced)

    def _count_as_equal(self, reduced: Sequence[ReducedParameter]) -> None:
        self._equal_on_all_ranks.update({p.name: p.parameter for p in reduced})
        self._plan_anew()

    def _plan_anew(self) -> None:
        self._contents = ModuleContents(self._module)
        self._signature = None

    def plan(self) -> ReductionPlan:
        """Return the plan of the trainable parameters: the last one, unless something that it follows from has changed."""
        # FSDP replaces parameters of the model in each step, and none of these. The plan holds its parameters, so no new one gets their ids
        if self._contents.refresh():
            self._candidates = self._find()
            self._identities = [(c.name, id(c.parameter), c.owner) for c in self._candidates]
        parameters = [c.parameter for c in self._candidates]
        # a frozen one may hold a gradient from before
        takes_part = [p.requires_grad or p.grad is not None for p in parameters]
        signature = self._identities, takes_part, [*map(_KIND, parameters)]
        if signature != self._signature:
            self._signature = signature
            reduced = list(itertools.compress(self._candidates, takes_part))
            new = [p for p in reduced if self._equal_on_all_ranks.get(p.name) is not p.parameter]
            self._plan = ReductionPlan(reduced, new, self._frozen)
        return self._plan

    def _find(self) -> list[ReducedParameter]:
        found = []
        for name, parameter in self._module.named_parameters():
            if id(parameter) in self.elsewhere or name in self._ignored or shard_of(parameter) is not None:
                continue
            owners = [i for i, loss in enumerate(self._losses) if name.startswith(f"{loss}.")]
            found.append(ReducedParameter(name, parameter, next(iter(owners), -1)))
        return sorted(found, key=lambda p: p.name)

    def admit(self, new: Sequence[ReducedParameter]) -> None:
        """Take parameters that appeared after the wrap, if they are equal on all ranks.

        Raises:
            RankMismatchError: on every rank, if they are not.

        Communication: one handshake.
        """
        own = [hashlib.sha256(raw_collectives.host_bytes(p.parameter.cpu())).hexdigest() for p in new]
        columns = zip(*handshake.all_gather_json("new parameters", {}, own), strict=True)
        differ = [f"`{p.name}`" for p, column in zip(new, columns, strict=True) if len(set(column)) > 1]
        if differ:
            raise RankMismatchError(
                "parameters created or replaced after the wrap",
                expected="equal values on all ranks",
                got=f"different values of {', '.join(differ)}",
                fix="Create them in __init__ or configure_model, where they are broadcast, or from the same seed on every rank.",
                collective=True,
                page="F05",
            )
        self._count_as_equal(new)


class Gradients:
    """The gradients of a plan's parameters at one time. The tensors are held: another one could get the id of one that is gone.

    Attributes:
        flags: 0 without a gradient, 1 with one, more than all ranks together for a sparse one, which cannot be reduced.
    """

    def __init__(self, plan: ReductionPlan) -> None:
        self._tensors = [parameter.grad for parameter in plan.parameters]
        self._versions: list[int] = []
        self.flags: list[int] = []
        for grad in self._tensors:
            flag = version = 0
            if grad is not None:
                version = tensor_version(grad)
                flag = process_groups.world_size() + 1 if grad.is_sparse else 1
            self._versions.append(version)
            self.flags.append(flag)

    def changed_since(self, before: Gradients) -> list[bool]:
        """Return for each gradient whether it was replaced or written to since another time."""
        pairs = zip(self._tensors, self._versions, before._tensors, before._versions, strict=True)
        return [grad is not earlier or version != old for grad, version, earlier, old in pairs]


@dataclass
class _SentGradients:
    """The gradients that were sent in the call check, or right after it.

    Attributes:
        seen: All gradients at that time.
        flags: Their flags, as bytes.
        parameters: Parameters with small gradients that were sent. None on an accelerator, where only flags are sent.
        dtype: Dtype of those gradients on the wire.
        mean: Function that waits for their mean. None if no gradient was sent.
    """

    seen: Gradients
    flags: bytes
    parameters: list[nn.Parameter] | None = None
    dtype: torch.dtype = torch.float32
    mean: Callable[[], Tensor] | None = None

    def changed(self, now: Gradients) -> list[bool]:
        """Return for each gradient whether it has changed. On an accelerator only its presence is compared."""
        if self.parameters is not None:
            return now.changed_since(self.seen)
        return list(map(ne, now.flags, self.seen.flags))


class LossReducer:
    """Means the gradients of the parameters that the model's DDP leaves out.

    Args:
        parameters: Those parameters.
        wire_dtype: dtype on the wire. If None, each gradient's own dtype, and at least float32 for small ones.

    Attributes:
        parameters: Those parameters.
    """

    def __init__(self, parameters: ReducedParameters, wire_dtype: torch.dtype | None = None) -> None:
        self.parameters, self._wire_dtype = parameters, wire_dtype
        self._before: Gradients | None = None
        self._called: Sequence[bool] = ()
        self._sent: _SentGradients | None = None

    # ------------------------------------------------------------------ in the call check

    def start_backward(self, before: Gradients, called: Sequence[bool]) -> None:
        """Note the gradients that a backward is to write.

        Args:
            before: Gradients before it.
            called: Per loss, whether it ran on this rank.
        """
        self._sent = self._before = None
        self._called = called
        # without a call, a gradient that is there shows that losses of an earlier forward may get theirs at any time
        if any(called) or not any(before.flags):
            self._before = before

    def pack(self, plan: ReductionPlan) -> bytes:
        """Return this rank's part of the call check: flags, and few bytes of gradients. Empty if some gradients are still missing."""
        before, self._before = self._before, None
        if not plan.parameters or not plan.is_of_losses or process_groups.world_size() == 1:
            return b""
        seen = Gradients(plan)
        if max(seen.flags) > 1:  # sparse: an error after backward
            return b""
        flags = array("I", seen.flags).tobytes()
        if not plan.is_on_host:
            self._sent = _SentGradients(seen, flags)
            return flags
        is_awaited = [self._called[p.owner] and p.parameter.requires_grad for p in plan.reduced]
        if before is None or any(map(gt, is_awaited, seen.changed_since(before))):
            return b""
        small = plan.marked(map(and_, seen.flags, plan.is_small))
        dtype = self._dtype_of(small)
        self._sent = _SentGradients(seen, flags, small, dtype)
        num_bytes = sum(p.numel() for p in small) * dtype.itemsize
        if small and len(flags) + num_bytes <= handshake.inline_capacity():
            return flags + raw_collectives.host_bytes(_flat_gradients(small, dtype))
        return flags

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Take the parts of all ranks. They count only if every rank has sent the same flags."""
        sent = self._sent
        if sent is None:
            return
        start = len(sent.flags)
        if not all(payload.startswith(sent.flags) for payload in payloads):
            self._sent = None
        elif len(payloads[0]) > start:
            rows = bytearray().join([payload[start:] for payload in payloads])
            gathered = torch.frombuffer(rows, dtype=sent.dtype).view(len(payloads), -1)
            sent.mean = functools.partial(gathered.mean, 0)
        elif sent.parameters:
            sent.mean = raw_collectives.start_mean(_flat_gradients(sent.parameters, sent.dtype))

    # ------------------------------------------------------------------ after backward

    def reduce(self, plan: ReductionPlan | None = None, expected: Sequence[bool] | None = None) -> None:
        """Replace each gradient by its mean over ranks.

        Args:
            plan: Parameters of this backward. If None, they are looked up.
            expected: Per loss, whether its parameters may hold gradients, as agreed between the ranks. If None, all may.

        Raises:
            LossCallError: on every rank, when a parameter has a gradient on some ranks only.
            RankMismatchError: on every rank, when gradients changed after the call check on some ranks only. PeerError on ranks that met
                nobody.

        Communication: at most one all-reduce, one more for each gradient over ``LARGE_BYTES``. On an accelerator at most one handshake.
        """
        world_size = process_groups.world_size()
        if plan is None:
            plan = self.parameters.plan()
        if not plan.parameters or world_size == 1:
            return
        now = Gradients(plan)
        sent, self._sent = self._sent, None
        # 1. gradients that the call check has settled. Or flags, on the host with small gradients
        if sent is not None:
            changed = sent.changed(now)
            is_reduced = self._finish_sent(sent, plan, is_valid=not any(changed))
            if not any(changed):
                return
            names = ", ".join(p.name for p in itertools.compress(plan.reduced, changed))
            agreement = Agreement("gradients that changed after the call check", {"parameters": names})
            # peers without a change do not call this, so the wait is shorter than the group's timeout
            sums = _sum_flags(agreement, now.flags, handshake.PEER_TIMEOUT)
        elif plan.is_on_host:
            is_expected = [expected is None or p.owner < 0 or expected[p.owner] for p in plan.reduced]
            is_reduced = list(map(and_, plan.is_small, is_expected))
            small = plan.marked(is_reduced)
            mean = raw_collectives.start_mean(_flat_gradients(small, self._dtype_of(small), now.flags))()
            sums = [round(value * world_size) for value in mean[: len(now.flags)].tolist()]
            _write_mean_(mean[len(now.flags) :], small)
        else:
            sums = _sum_flags(plan.flags, now.flags)
            is_reduced = [False] * len(sums)
        # 2. every gradient is there on all ranks, or on none
        if any(total not in (0, world_size) for total in sums):
            raise partial_gradients([p.name for p in plan.reduced], now.flags)
        # 3. the remaining gradients
        self._reduce_now(plan, [total > 0 and not done for total, done in zip(sums, is_reduced, strict=True)])

    def _finish_sent(self, sent: _SentGradients, plan: ReductionPlan, *, is_valid: bool) -> list[bool]:
        """Reduce the gradients that all ranks had at the call check. They are not written if some have changed after it.

        A rank with changed gradients first takes part in its peers' reduction, with zeros for a gradient that has vanished, because
        peers may not have this change. Its handshake is then paired with their handshake for the same change, or with their next one,
        which is an error on every rank.

        Returns:
            Whether each gradient was reduced in this function, and not in the call check.
        """
        remains = [flag == 1 for flag in sent.seen.flags]
        if sent.mean is not None:
            mean = sent.mean()
            if sent.parameters and is_valid:
                _write_mean_(mean, sent.parameters)
            remains = list(map(gt, remains, plan.is_small))
        self._reduce_now(plan, remains)
        return remains

    def _reduce_now(self, plan: ReductionPlan, marks: Sequence[bool]) -> None:
        """Replace marked gradients by their means, together. A gradient that is None counts as zeros, and remains None."""
        small = plan.marked(map(and_, marks, plan.is_small))
        wait_for_small = raw_collectives.start_mean(_flat_gradients(small, self._dtype_of(small))) if small else None
        # a large one in its own memory, where dtypes allow
        started: list[tuple[Tensor, Callable[[], Tensor]]] = []
        for parameter in plan.marked(map(gt, marks, plan.is_small)):
            grad = parameter.grad
            own = torch.zeros_like(parameter) if grad is None or grad.is_sparse else grad.detach()
            on_wire = own if self._wire_dtype is None else own.to(self._wire_dtype)
            started.append((own, raw_collectives.start_mean(on_wire.contiguous())))
        if wait_for_small is not None:
            _write_mean_(wait_for_small(), small)
        for own, wait in started:
            mean = wait()
            if mean.data_ptr() != own.data_ptr():
                own.copy_(mean)

    def _dtype_of(self, parameters: Sequence[nn.Parameter]) -> torch.dtype:
        """Return the dtype of a flat buffer, which counts flags exactly."""
        if self._wire_dtype is not None and process_groups.world_size() <= _EXACT_WORLD:
            return self._wire_dtype
        return functools.reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)


def _sum_flags(agreement: Agreement, flags: Sequence[int], timeout: timedelta | None = None) -> list[int]:
    """Return the flags summed over ranks. Communication: one handshake, of ranks with the same parameters."""
    pending = handshake.start(agreement, {}, json.dumps(flags).encode())
    pending.receive(timeout)
    return [sum(column) for column in zip(*map(json.loads, pending.finish()), strict=True)]


def _are_on_host(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether gradients can be read without waiting for an accelerator."""
    return all(p.device.type == "cpu" for p in parameters)


def _flat_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype, flags: Sequence[int] = ()) -> Tensor:
    """Return flags and gradients in one buffer. A parameter without a dense gradient adds zeros."""
    device = parameters[0].device if parameters else torch.device("cpu")
    pieces = [torch.tensor(flags, dtype=dtype, device=device)] if flags else []
    for parameter in parameters:
        grad = parameter.grad
        own = parameter.new_zeros(parameter.numel()) if grad is None or grad.is_sparse else grad.reshape(-1)
        pieces.append(own.detach().to(dtype))
    return torch.cat(pieces)


def _write_mean_(mean: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Write a flat mean into the gradients. A parameter without a dense gradient keeps none."""
    offset = 0
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            grad.detach().copy_(mean[offset : offset + parameter.numel()].view(grad.shape))
        offset += parameter.numel()


def partial_gradients(names: Sequence[str], flags: Sequence[int]) -> LossCallError:
    """Return the error for gradients that exist on some ranks only. Collective; communication: one handshake."""
    columns = zip(*handshake.all_gather_json("gradients that differ", {}, list(flags)), strict=True)
    parts: list[str] = []
    fixes: dict[str, None] = {}  # each once, in order
    for name, column in zip(names, columns, strict=True):
        if max(column) > 1:
            words, expected = ["no gradient", "dense", "sparse"], "dense"
            fix = "Build the module with sparse=False: what a loss owns is averaged over the ranks as dense tensors."
        elif len(set(column)) > 1:
            words, expected = ["no gradient", "gradient"], "on every rank or on none"
            fix = "Use the parameter in the loss of every rank (times 0 where it should not count), or on none."
        else:
            continue
        fixes[fix] = None
        ranks = [words[min(flag, 2)] for flag in column]
        parts.append(format_error(f"gradient of `{name}`", expected=expected, ranks=ranks))
    return LossCallError("\n".join([*parts, *fixes]), collective=True)


class ModelReduction(FitPart):
    """Lets exact values make up for the reduction of the model, in each training step.

    Losses outside the model are not reduced so: means over ranks, and class shards. Their gradients get the inverse when autograd has
    made them.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._reduced: list[tuple[str, nn.Module]] = []  # divided modules: to find them takes long
        self._scale = 1.0
        self._hooked: list[Tensor] = []

    def on_train_start(self) -> None:
        """Compare the ranks. Communication: one handshake, if a rank holds parts of the model."""
        if self.fit.strategy.divides_model:
            self._reduced = list(self.fit.module.named_modules())
            must_match = {"gradients end as": gradient_reduction_of(self._reduced)}
            handshake.all_gather_between_steps("the model's gradients", must_match)
            self._reduced = [(name, module) for name, module in self._reduced if isinstance(module, FSDPModule)]

    def training_step(self) -> AbstractContextManager[None]:
        """Let exact values read the reduction, which the user may set at any time."""
        ddp = self.fit.strategy.wrapped_model  # another one since parameters were frozen
        if ddp is not None:  # a mean, or what a hook returns: nothing to undo
            return reduced_by(lambda: gradient_reduction_of([("", ddp)]))
        reduction = gradient_reduction_of(self._reduced)
        self._scale = 1.0 if reduction is None else reduction.scale
        if self._scale != 1.0:
            self._watch_others()
        return reduced_by(lambda: reduction)

    def _watch_others(self) -> None:
        """Undo the scale in the gradients of all parameters that the model does not hold."""
        known = set(map(id, self._hooked))
        for name, parameter in self.fit.module.named_parameters():
            is_ours = name not in self.fit.strategy.divided_parameters and parameter.requires_grad
            if is_ours and id(parameter) not in known:
                self._hooked.append(parameter)
                self.undo.callback(parameter.register_hook(self._unscaled).remove)  # type: ignore[no-untyped-call]

    def _unscaled(self, grad: Tensor) -> Tensor:
        return grad if self._scale == 1.0 else grad / self._scale
