"""The losses' gradients: one mean over ranks, by name, once per synchronising backward.

Gradients are read from the live module after backward, so parameters that were created, replaced or unfrozen after the wrap take part, and
no hook can be lost. The reduction covers every trainable parameter that the model's own DDP does not reduce (nor a shard, nor one that
DDP ignores by the user's choice). Every gradient has its mean when ``reduce`` returns:

0. The call check of this backward carries a has-gradient flag per parameter, and on the CPU the small gradients too if they are few bytes.
   Larger ones on the CPU leave as soon as all flags are known, next to the rest of backward. This counts if the gradients of all losses
   that ran are complete by then on every rank, and do not change later.
1. Else one flat buffer of [flags | small gradients of the losses that may have some]. On an accelerator flags travel from host to host
   instead, without a wait for the device.
2. Flags must sum to 0 or W: else the same error on every rank.
3. The remaining gradients, all at once. Each one over ``LARGE_BYTES`` is reduced in its own memory.

``ModelReduction`` tells exact values how the model itself is reduced.
"""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_ddp_losses.core.compat import tensor_version
from lightning_ddp_losses.core.precision import parameters_of
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.global_values import gradient_reduction_of, reduced_by
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import LossCallError, RankMismatchError, format_error
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

LARGE_BYTES = 1 << 20
_EXACT_WORLD = 256  # bfloat16 counts flags exactly up to here


class ReducedParameter(NamedTuple):
    """A parameter that the strategy reduces by itself.

    Attributes:
        name: Name in the module.
        parameter: Current parameter of the module.
        owner: Index of its loss, -1 for a parameter outside all losses.
    """

    name: str
    parameter: nn.Parameter
    owner: int


class ReducedParameters:
    """Trainable parameters that the model's own DDP does not reduce. Shards and names that the user excluded are left out.

    Args:
        module: The live LightningModule.
        reduced_elsewhere: Parameters that the model's DDP reduces.
        ignored: Names that the user excluded from DDP.
        first_bucket: Bytes of gradient that must be ready before the model's DDP sends any.

    Attributes:
        elsewhere: Parameters that the model's DDP reduces now.
        frozen: Names of those that it reduced before they were frozen.
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
        self.leave_out(reduced_elsewhere, first_bucket)
        self.frozen: list[str] = []
        self._ignored = frozenset(ignored)
        self._equal_on_all_ranks: dict[str, nn.Parameter] = {}
        self._losses: list[str] = []
        self._candidates: list[ReducedParameter] = []
        self._described: tuple[object, str] = (None, "")

    def leave_out(self, reduced_elsewhere: Sequence[Tensor], first_bucket: float) -> None:
        """Leave parameters to the model's DDP from now on."""
        self.first_bucket = first_bucket
        # the tensors are kept, not only their ids: an id may be taken again
        self.elsewhere = {id(p): p for p in reduced_elsewhere}
        self._module_parameters: list[Tensor] = []

    def watch(self, losses: Sequence[str]) -> None:
        """Set the names of the losses. Existing parameters count as synchronised."""
        self._losses = list(losses)
        self._module_parameters = []
        self._equal_on_all_ranks.update({p.name: p.parameter for p in self.now()})

    def now(self) -> list[ReducedParameter]:
        """Return the parameters, sorted by name. Names are looked up again only if the module holds other parameters than before."""
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
        if signature != self._described[0]:
            text = "; ".join(f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in signature)
            self._described = signature, f"{text[:200]} #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
        return self._described[1]

    def find_new(self, parameters: Sequence[ReducedParameter]) -> list[ReducedParameter]:
        """Return those that appeared, or were replaced, since they were last known to be equal on all ranks."""
        return [p for p in parameters if self._equal_on_all_ranks.get(p.name) is not p.parameter]

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
        self._equal_on_all_ranks.update({p.name: p.parameter for p in new})


class _SeenGradient(NamedTuple):
    """A parameter's gradient at some time. The tensor is held: another one could get its id when it is gone."""

    parameter: nn.Parameter
    grad: Tensor | None
    version: int

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _SeenGradient:
        """Note the gradient as it is now."""
        grad = parameter.grad
        return cls(parameter, grad, 0 if grad is None else tensor_version(grad))

    def has_changed(self) -> bool:
        """Return whether the gradient was replaced or written to since."""
        grad = self.parameter.grad
        return grad is not self.grad or (grad is not None and tensor_version(grad) != self.version)


@dataclass
class _SentGradients:
    """The gradients that left in the call check, or right after it.

    Attributes:
        flags: Flags of all parameters.
        parameters: Parameters with gradients that have left.
        seen: All gradients as they were then. Empty on an accelerator, where only flags leave.
        mean: Function that waits for the mean of the gradients. None if no gradient has left.
    """

    flags: list[int]
    parameters: list[nn.Parameter]
    seen: list[_SeenGradient]
    mean: Callable[[], Tensor] | None = None

    def changed(self, parameters: Sequence[ReducedParameter], flags: Sequence[int]) -> str:
        """Return the names of the gradients that changed since."""
        changed = [s.has_changed() for s in self.seen] or [a != b for a, b in zip(self.flags, flags, strict=True)]
        return ", ".join(p.name for p, has_changed in zip(parameters, changed, strict=True) if has_changed)


class LossReducer:
    """Means the gradients of the parameters that the model's DDP leaves out.

    Args:
        parameters: Those parameters.
        wire_dtype: dtype on the wire. None: each gradient's own, and at least float32 for small ones.

    Attributes:
        parameters: Those parameters.
    """

    def __init__(self, parameters: ReducedParameters, wire_dtype: torch.dtype | None = None) -> None:
        self.parameters, self._wire_dtype = parameters, wire_dtype
        self._unwritten: list[_SeenGradient] | None = None
        self._sent: _SentGradients | None = None

    # ------------------------------------------------------------------ in the call check

    def start_backward(self, parameters: Sequence[ReducedParameter], called: Sequence[bool]) -> None:
        """Note the gradients that a backward is to write.

        Args:
            parameters: Parameters of this backward.
            called: Per loss, whether it ran on this rank.
        """
        self._sent = self._unwritten = None
        # without a call, a gradient that is there shows that losses of an earlier forward may get theirs at any time
        if any(called) or all(p.parameter.grad is None for p in parameters):
            self._unwritten = [
                _SeenGradient.of(p.parameter)
                for p in parameters
                if p.owner >= 0 and called[p.owner] and p.parameter.requires_grad
            ]

    def pack(self, parameters: Sequence[ReducedParameter]) -> bytes:
        """Return this rank's part of the call check: flags, and few bytes of gradients. Empty if some are yet to come."""
        unwritten, self._unwritten = self._unwritten, None
        # a parameter of no loss gets its gradient later
        if not parameters or any(p.owner < 0 for p in parameters) or process_groups.world_size() == 1:
            return b""
        flags = _flags_of(parameters)
        if max(flags) > 1:  # sparse: an error after backward
            return b""
        if not _are_on_host(parameters):
            self._sent = _SentGradients(flags, [], [])
            return _packed(flags)
        if unwritten is None or not all(seen.has_changed() for seen in unwritten):
            return b""
        small = [p.parameter for p, flag in zip(parameters, flags, strict=True) if flag and _is_small(p)]
        self._sent = _SentGradients(flags, small, [_SeenGradient.of(p.parameter) for p in parameters])
        payload = _packed(flags)
        num_bytes = sum(p.numel() for p in small) * self._dtype_of(small).itemsize
        if small and len(payload) + num_bytes <= handshake.inline_capacity():
            payload += raw_collectives.host_bytes(_flat(small, self._dtype_of(small)))
        return payload

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Take the parts of all ranks. They count only if every rank has sent the same flags."""
        sent = self._sent
        if sent is None:
            return
        start, own = len(_packed(sent.flags)), sent.parameters
        if len({payload[:start] for payload in payloads}) > 1:
            self._sent = None
        elif len(payloads[0]) > start:
            rows = bytearray().join([payload[start:] for payload in payloads])
            gathered = torch.frombuffer(rows, dtype=self._dtype_of(own)).view(len(payloads), -1)
            sent.mean = functools.partial(gathered.mean, 0)
        elif own:
            sent.mean = raw_collectives.start_mean(_flat(own, self._dtype_of(own)))

    # ------------------------------------------------------------------ after backward

    def reduce(
        self, parameters: Sequence[ReducedParameter] | None = None, expected: Sequence[bool] | None = None
    ) -> None:
        """Replace each gradient by its mean over ranks.

        Args:
            parameters: Parameters of this backward. None: they are looked up.
            expected: Per loss, whether its parameters may hold gradients, as all ranks have agreed. None: all may.

        Raises:
            LossCallError: on every rank, when a parameter has a gradient on some ranks only.
            RankMismatchError: on every rank, when gradients changed after the call check on some ranks only. PeerError on ranks that met
                nobody.

        Communication: at most one all-reduce, one more for each gradient over ``LARGE_BYTES``. On an accelerator at most one handshake.
        """
        world_size = process_groups.world_size()
        if parameters is None:
            parameters = self.parameters.now()
        if not parameters or world_size == 1:
            return
        flags = _flags_of(parameters)
        is_reduced = [False] * len(parameters)
        sent, self._sent = self._sent, None
        # 1. gradients that the call check has settled. Or flags, on the host with small gradients
        if sent is not None:
            sums, is_reduced = self._finish_sent(sent, parameters, flags)
        elif _are_on_host(parameters):
            is_reduced = [_is_small(p) and (expected is None or p.owner < 0 or expected[p.owner]) for p in parameters]
            small = [p.parameter for p, packed in zip(parameters, is_reduced, strict=True) if packed]
            mean = raw_collectives.start_mean(_flat(small, self._dtype_of(small), flags))()
            sums = [round(value * world_size) for value in mean[: len(flags)].tolist()]
            _write_mean_(mean[len(flags) :], small)
        else:
            sums = self._sum_flags("gradients", self.parameters.describe(parameters), flags)
        # 2. every gradient is there on all ranks, or on none
        if any(total not in (0, world_size) for total in sums):
            raise partial_gradients([p.name for p in parameters], flags)
        # 3. the remaining gradients
        self._reduce_now([p for p, total, done in zip(parameters, sums, is_reduced, strict=True) if total and not done])

    def _finish_sent(
        self, sent: _SentGradients, parameters: Sequence[ReducedParameter], flags: Sequence[int]
    ) -> tuple[list[int], list[bool]]:
        """Reduce the gradients that all ranks had at the call check, and compare those that changed since.

        A rank with changed gradients first takes part in its peers' reduction, with zeros for a gradient that has vanished: they may
        not know of the change. Its handshake then meets theirs of the same change, or their next one, and that is an error on every rank.

        Returns:
            The flags summed over ranks, and whether each gradient has its mean.
        """
        changed = sent.changed(parameters, flags)
        in_check = [sent.mean is not None and _is_small(p) for p in parameters]
        if sent.mean is not None:
            mean = sent.mean()
            if not changed:
                _write_mean_(mean, sent.parameters)
        is_agreed = [flag == 1 and not done for flag, done in zip(sent.flags, in_check, strict=True)]
        self._reduce_now([p for p, agreed in zip(parameters, is_agreed, strict=True) if agreed])
        if not changed:
            return [flag * process_groups.world_size() for flag in flags], [True] * len(parameters)
        what = "gradients that changed after the call check"
        # peers without a change do not come: this rank does not wait for them as long as its group would
        return self._sum_flags(what, changed, flags, handshake.PEER_TIMEOUT), is_agreed

    def _reduce_now(self, parameters: Sequence[ReducedParameter]) -> None:
        """Replace gradients by their means, all at once. One that is gone counts as zeros, and stays gone."""
        small = [p.parameter for p in parameters if _is_small(p)]
        wait_for_small = raw_collectives.start_mean(_flat(small, self._dtype_of(small))) if small else None
        # a large one in its own memory, where dtypes allow
        started: list[tuple[Tensor, Callable[[], Tensor]]] = []
        for p in parameters:
            if not _is_small(p):
                grad = p.parameter.grad
                own = torch.zeros_like(p.parameter) if grad is None or grad.is_sparse else grad.detach()
                on_wire = own if self._wire_dtype is None else own.to(self._wire_dtype)
                started.append((own, raw_collectives.start_mean(on_wire.contiguous())))
        if wait_for_small is not None:
            _write_mean_(wait_for_small(), small)
        for own, wait in started:
            mean = wait()
            if mean.data_ptr() != own.data_ptr():
                own.copy_(mean)

    def _sum_flags(self, what: str, names: str, flags: Sequence[int], timeout: timedelta | None = None) -> list[int]:
        """Return the flags summed over ranks. Communication: one handshake, of ranks with the same parameters."""
        pending = handshake.start(what, {"parameters": names}, json.dumps(flags).encode())
        pending.receive(timeout)
        return [sum(column) for column in zip(*map(json.loads, pending.finish()), strict=True)]

    def _dtype_of(self, parameters: Sequence[nn.Parameter]) -> torch.dtype:
        """Return the dtype of a flat buffer, which counts flags exactly."""
        if self._wire_dtype is not None and process_groups.world_size() <= _EXACT_WORLD:
            return self._wire_dtype
        return functools.reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)


def _are_on_host(parameters: Sequence[ReducedParameter]) -> bool:
    """Return whether gradients can be read without waiting for an accelerator."""
    return all(p.parameter.device.type == "cpu" for p in parameters)


def _flat(parameters: Sequence[nn.Parameter], dtype: torch.dtype, flags: Sequence[int] = ()) -> Tensor:
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


def _flags_of(parameters: Sequence[ReducedParameter]) -> list[int]:
    """Return 0 without a gradient, 1 with one, more than all ranks together for a sparse one, which cannot be reduced."""
    sparse = process_groups.world_size() + 1
    grads = [p.parameter.grad for p in parameters]
    return [0 if grad is None else sparse if grad.is_sparse else 1 for grad in grads]


def _packed(flags: Sequence[int]) -> bytes:
    return array("I", flags).tobytes()


def _is_small(reduced: ReducedParameter) -> bool:
    return reduced.parameter.nbytes <= LARGE_BYTES


def partial_gradients(names: Sequence[str], flags: Sequence[int]) -> LossCallError:
    """Return the error for gradients that ranks hold differently. Communication: one handshake, which all ranks come to."""
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
