"""One process's part of a run of `parity`: a training loop of the user's, or one around the user's step, recorded as a fit is.

Gradients are taken when the optimizer steps, parameters right after it: they are what the step used and what it made. The
one process runs the same code on the plain model, with ``no_sync`` and the switches of ``fully_shard`` there and without effect.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_ddp_losses.audit import ablations
from lightning_ddp_losses.audit.rank_record import BatchRecord, ModuleInfo, RankRecord, Writer, tensor_digest
from lightning_ddp_losses.audit.recorder import (
    followed_layers,
    gradient_fingerprints,
    load_start_,
    local_pair_losses,
    norm_classes,
    parameter_owners,
)
from lightning_ddp_losses.audit.replay import (
    AuditTarget,
    Run,
    batch_digest,
    count_rows,
    map_batch_tensors,
    save_batch,
)
from lightning_ddp_losses.audit.worker import joined_ranks
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.nests import children_of, rebuild_nest
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import InputError, expect

_SEED = 0  # of every process, before the model is built and again before it trains
_WRAPPERS = ("module", "_orig_mod", "_forward_module")  # what wrappers add to the names of parameters
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
PRECISIONS = {torch.float64: "64-true", torch.float32: "32-true", torch.bfloat16: "bf16-true", torch.float16: "16-true"}
"""Lightning's names of the dtypes that a loop may have."""


@dataclass
class LoopTarget(AuditTarget):
    """A training loop whose ranks are compared with one process.

    Attributes:
        build: Makes the model, or the model and a function that makes its optimizer.
        step: From model and batch to the loss; None: ``loop`` is given.
        loop: A whole optimizer step, from model, optimizer and micro-batches.
        batches: Batches of each rank, or a function that makes those of one.
        wrap: ``"ddp"``, ``"fully_shard"``, None, or a function.
        accumulate: Micro-batches to an optimizer step.
        join: Dimension along which ranks' tensors are parts of one, or a nest of such like a batch; None: the same on each rank.
        dtype: Dtype of parameters and batches; None: as they are.
        autocast: Dtype of autocast; None: without.
    """

    build: Callable[[], Any] = nn.Identity
    step: Callable[..., Any] | None = None
    loop: Callable[..., Any] | None = None
    batches: Any = field(default_factory=list)
    wrap: Any = "ddp"
    accumulate: int = 1
    join: Any = 0
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @property
    def precision(self) -> str:
        """Lightning's name of the precision."""
        if self.autocast is not None:
            return PRECISIONS[self.autocast].replace("true", "mixed")
        return PRECISIONS[self.dtype or torch.float32]


def perform_loop(target: LoopTarget, run: Run, folder: Path, rank: int) -> None:
    """Do one process's part of ``run`` in a process of its own: join the ranks, build, train, leave."""
    with joined_ranks(target, run, folder, rank):
        # a wrapper that outlives its group may wait for gloo's threads for ever; an error's frames hold it
        try:
            _Training(target, run, folder, rank).train()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            gc.collect()


def rows_first(batch: Any, join: Any, *, back: bool = False) -> Any:
    """Return a batch whose tensors have the dimension that ``join`` names in the first place, or put it ``back``."""
    if isinstance(batch, Tensor):
        if not join or not batch.ndim:
            return batch
        return batch.movedim(0, join) if back else batch.movedim(join, 0)
    children = children_of(batch)
    if children is None:
        return batch
    of_children = [join] * len(children)
    if children_of(join) is not None:
        dims = dict(children_of(join) or ())
        of_children = [dims.get(key, 0) for key, _ in children]
    moved = [rows_first(child, dim, back=back) for (_, child), dim in zip(children, of_children, strict=True)]
    return rebuild_nest(batch, moved)


class _Training:
    """A loop on one rank of a run, and its record."""

    def __init__(self, target: LoopTarget, run: Run, folder: Path, rank: int) -> None:
        self.target, self.run, self.rank = target, run, rank
        self.writer, self.record = Writer(folder, rank), RankRecord()
        self.dtype = torch.float64 if "precision" in run.without else target.dtype
        self._clipped: dict[str, int] = {}  # fingerprints of gradients that are about to be clipped

    @property
    def _where(self) -> str:
        return f"rank {self.rank}" if self.run.ranks else "the one process"

    # ------------------------------------------------------------------ before the first step

    def _build(self) -> None:
        """Build model and optimizer, from the weights that the ranks' own run has; note what they are."""
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        _seed(_SEED)
        model, make_optimizer = self._built()
        model.train()
        if self.run.start:
            load_start_(model, self.run, self.rank)
        elif self.run.ranks:
            refuse_unequal_build(model)
        if self.run.perturb is not None:
            ablations.perturb_module_(model, ablations.unit_roundoff(model, self.target.precision), self.run.perturb)
        self.writer.write(0, "initial", [*model.named_parameters(), *model.named_buffers()])
        self.record.norms_at_wrap = norm_classes(model)
        # the optimizer comes after the wrap
        self.inner, self.model = model, self._wrapped(model)
        self.optimizer = make_optimizer(self.model)
        self._check_optimizer()
        self.record.module_info = self._describe()

    def _built(self) -> tuple[nn.Module, Callable[[nn.Module], Optimizer]]:
        found = self.target.build()
        model, make_optimizer = found if isinstance(found, tuple) else (found, _default_optimizer)
        expect(isinstance(model, nn.Module), "build()", expected="a model", got=type(model).__name__)
        expect(
            not isinstance(make_optimizer, Optimizer),
            "build()",
            expected="a function that makes the optimizer after the wrap",
            got=f"an optimizer made before it ({type(make_optimizer).__name__})",
            fix="return model, lambda model: torch.optim.SGD(model.parameters(), 0.1)",
        )
        return model if self.dtype is None else model.to(self.dtype), make_optimizer

    def _wrapped(self, model: nn.Module) -> Any:
        wrap = self.target.wrap
        if not self.run.ranks:
            return _as_if_wrapped(model)
        if wrap == "ddp":
            return DistributedDataParallel(model)
        if wrap == "fully_shard":
            return fully_shard(model)
        return model if wrap is None else wrap(model)

    def _named(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names that they have in the plain model."""
        return {_plain_name(name): parameter for name, parameter in self.model.named_parameters()}

    def _check_optimizer(self) -> None:
        known = set(map(id, self._named().values()))
        held = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        expect(
            all(id(parameter) in known for parameter in held),
            f"build(), on {self._where}",
            expected="an optimizer of the wrapped model's parameters",
            got="one of other parameters: those of before the wrap, or of another model",
            fix="Make it from the model that the function gets: lambda model: SGD(model.parameters(), 0.1).",
        )

    def _describe(self) -> ModuleInfo:
        named, modules = self._named(), dict(self.inner.named_modules())
        held = set(map(id, chain.from_iterable(group["params"] for group in self.optimizer.param_groups)))
        self.record.parameter_order = list(named)
        self.record.parameter_count = sum(parameter.numel() for parameter in named.values())
        drops = compat.DROPOUT_TYPES
        return ModuleInfo(
            owners=parameter_owners(self.inner, list(named)),
            unoptimized=[name for name, p in named.items() if p.requires_grad and id(p) not in held],
            module_types={name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in modules.items() if name},
            pair_losses=local_pair_losses(self.inner),
            dropout=[name for name, m in modules.items() if isinstance(m, drops) and getattr(m, "p", False)],
            accumulate=self.target.accumulate,
            precision=self.target.precision,
            optimizers=[type(self.optimizer).__name__],
        )

    # ------------------------------------------------------------------ training

    def train(self) -> None:
        """Build, make the steps, and write down what they do."""
        self._build()
        size = max(1, self.target.accumulate * self.run.accumulate)
        batches = self._batches()
        _seed(_SEED if self.run.seed is None else self.run.seed)
        with self._recorded():
            for step in range(1, self.run.steps + 1):
                micro_batches = []
                for _ in range(size):
                    batch = next(batches, None)
                    needed = f"{size * self.run.steps} batches ({self.run.steps} steps of {size})"
                    expect(
                        batch is not None, f"batches, on {self._where}", expected=needed, got="fewer", error=InputError
                    )
                    micro_batches.append(batch)
                self._make_step(step, [self._given(batch, step) for batch in micro_batches])
        self.writer.write_record(self.record)

    def _batches(self) -> Iterator[Any]:
        """Return this process's batches, with the rows of their tensors first."""
        if not self.run.plans:
            own = self.target.batches
            if callable(own):
                return (rows_first(batch, self.target.join) for batch in own(self.rank, self.run.ranks))
            return iter(own[self.rank])
        planned = chain.from_iterable(self.run.plans[self.rank])
        return (self._perturbed(batch.load(), index) for index, batch in enumerate(planned))

    def _perturbed(self, batch: Any, index: int) -> Any:
        if self.run.perturb is None:
            return batch
        unit = ablations.unit_roundoff(nn.Module(), self.target.precision)
        return ablations.perturb_batch(batch, unit, self.run.perturb * 1000 + index)

    def _given(self, batch: Any, step: int) -> Any:
        """Record a batch and return it as the loop gets it."""
        if self.dtype is not None:
            dtype = self.dtype
            batch = map_batch_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
        found = BatchRecord(0, step, count_rows(batch))
        if not self.run.plans:  # the user's own data: what replays will need
            path = self.writer.home / f"batch-{len(self.record.batches)}.pkl"
            save_batch(batch, path)
            found.file, found.digest = str(path), batch_digest(batch)
        self.record.batches.append(found)
        return rows_first(batch, self.target.join, back=True)

    def _make_step(self, step: int, micro_batches: list[Any]) -> None:
        """Make one optimizer step, of the user's loop or of ours around the user's step."""
        if "batch_norm" in self.run.without:
            ablations.batch_norm_to_eval_mode_(self.inner)
        if step == 1:
            self.record.norms_in_training = norm_classes(self.inner)
        before = ablations.rng_digest()
        with contextlib.ExitStack() as conditions:
            if "randomness" in self.run.without:
                conditions.enter_context(ablations.MeanDraws())  # type: ignore[no-untyped-call]
            if self.target.loop is not None:
                with self._precision():
                    loss = _loss_of(self.target.loop(self.model, self.optimizer, micro_batches))
                losses: list[float | None] = [None if loss is None else float(loss.detach())] * len(micro_batches)
            else:
                losses = self._accumulate(micro_batches)
        self.record.losses += losses
        self.record.used_rng += [ablations.rng_digest() != before] * len(micro_batches)
        expect(
            self.record.steps == step,
            f"loop, on {self._where}",
            expected="one optimizer.step() for each call",
            got=f"{self.record.steps - step + 1}",
            fix="Give the optimizer steps to `steps=`, and the micro-batches of each to `accumulate=`.",
        )

    def _accumulate(self, micro_batches: Sequence[Any]) -> list[float | None]:
        """Back-propagate the mean of the micro-batches' losses, as Lightning does, and step."""
        assert self.target.step is not None
        self.optimizer.zero_grad()
        losses: list[float | None] = []
        for index, batch in enumerate(micro_batches):
            with self._synchronised(index == len(micro_batches) - 1):
                with self._precision():
                    loss = _loss_of(self.target.step(self.model, batch))
                is_loss = loss is not None and loss.requires_grad and loss.numel() == 1
                got = "something else" if loss is None else f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                what, expected = f"step, on {self._where}", 'a scalar tensor with gradient, or a dict with "loss"'
                expect(is_loss, what, expected=expected, got=got, error=InputError)
                assert loss is not None
                (loss / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        self.optimizer.step()
        return losses

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Reduce gradients in the last micro-batch only, if the wrapper can wait."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        waiting = not last and hasattr(self.model, "no_sync")
        with self.model.no_sync() if waiting else contextlib.nullcontext():
            yield

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        device = next(self.inner.parameters(), torch.empty(0)).device.type
        on = self.target.autocast is not None and "precision" not in self.run.without
        return torch.autocast(device, dtype=self.target.autocast, enabled=on)

    # ------------------------------------------------------------------ recording

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record what the optimizer uses and makes, and gradients that are clipped."""
        with contextlib.ExitStack() as hooks:
            hooks.callback(self.optimizer.register_step_pre_hook(self._record_gradients).remove)
            hooks.callback(self.optimizer.register_step_post_hook(self._record_parameters).remove)
            if self.run.trace:
                hooks.enter_context(followed_layers(self.inner, self.record, self.run.trace))
            for name in _CLIPS:
                plain = getattr(nn.utils, name)
                hooks.callback(setattr, nn.utils, name, plain)
                setattr(nn.utils, name, self._noted(plain))
            yield

    def _noted(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._clipped = gradient_fingerprints(self._named())
            return clip(*args, **kwargs)

        return noted

    def _record_gradients(self, *_: Any) -> None:
        named = {name: p for name, p in self._named().items() if p.requires_grad}
        self.record.steps += 1
        self.writer.write(self.record.steps, "gradient", [(name, p.grad) for name, p in named.items()])
        used = gradient_fingerprints(named) if self.run.ranks else {}
        clipped = {"reduced": self._clipped} if self._clipped else {}
        self.record.fingerprints.append({**clipped, "hooked": used, "used": used})
        self.record.learning_rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
        self._clipped = {}

    def _record_parameters(self, *_: Any) -> None:
        self.writer.write(self.record.steps, "parameter", self._named().items())
        self.writer.write(self.record.steps, "buffer", self.inner.named_buffers())


# ---------------------------------------------------------------------- models


def refuse_unequal_build(model: nn.Module) -> None:
    """Refuse a model that is not the same on every rank.

    Raises:
        InputError: The first parameter or buffer that differs, with its first value on each rank.

    Communication: one gather of names and digests.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = [(name, tensor_digest(tensor), tensor.flatten()[:1].tolist()) for name, tensor in named.items()]
    payloads = handshake.all_gather("build()", {}, json.dumps(own).encode())
    found = [[tuple(entry) for entry in json.loads(sent)] for sent in payloads]
    nothing: tuple[str, str, list[float]] = ("nothing", "", [])
    for column in zip_longest(*found, fillvalue=nothing):
        if len({entry[:2] for entry in column}) > 1:
            raise InputError(
                "build()",
                expected="the same parameters and buffers on every rank",
                ranks=[f"`{name}`, first value {value}" for name, _, value in column],
                fix="Build the model alike on every rank: without seeds, files or sizes that depend on the rank.",
            )


def _as_if_wrapped(model: nn.Module) -> nn.Module:
    """Give the plain model what loops call on a wrapper, without effect."""
    extras = {"no_sync": contextlib.nullcontext, "module": model}
    extras |= {name: _nothing for name in dir(FSDPModule) if name.startswith(("set_", "reshard", "unshard"))}
    model.__dict__.update({name: extra for name, extra in extras.items() if not hasattr(model, name)})
    return model


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _default_optimizer(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
