"""`parity`: the audit for any training loop. N ranks run the user's step or loop, and one process runs it on the joined rows.

Gradients are recorded when the optimizer steps, and parameters immediately after the step. The one process runs the same code on the plain
model, to which ``no_sync`` and the methods of ``fully_shard`` are added without effect.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_ddp_losses.audit.api import compare_with_one
from lightning_ddp_losses.audit.rank_record import RankRecord, tensor_digest
from lightning_ddp_losses.audit.recorder import CLIPS, Recorder, loss_of, norm_classes, optimized, wrap_function
from lightning_ddp_losses.audit.replay import Run, Target, count_rows, map_batch_tensors, take_rows
from lightning_ddp_losses.audit.report import AuditReport
from lightning_ddp_losses.core.inputs import children_of, leaves, rebuild_nest
from lightning_ddp_losses.core.precision import as_dtype, cast_module_
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import InputError, expect, expect_count, expect_option

_SEED = 0  # of every process, before the model is built and again before it trains
_WRAPPERS = ("module", "_orig_mod", "_forward_module")  # parts that wrappers add to the names of parameters
PRECISIONS = {torch.float64: "64-true", torch.float32: "32-true", torch.bfloat16: "bf16-true", torch.float16: "16-true"}
"""Lightning's names of the dtypes that a loop may have."""


def parity(
    build: Callable[[], Any],
    step: Callable[..., Any] | None = None,
    batches: Any = None,
    *,
    loop: Callable[..., Any] | None = None,
    ranks: int = 2,
    wrap: str | Callable[[nn.Module], Any] | None = "ddp",
    accumulate: int = 1,
    splits: str | Sequence[int] = "even",
    join: Any = "rows",
    dtype: torch.dtype | None = torch.float64,
    precision: torch.dtype | None = None,
    randomness: Literal["rank", "global", "by_row"] = "rank",
    steps: int | None = None,
    timeout_seconds: float = 60.0,
) -> AuditReport:
    """Train a few steps with any training loop on N ranks and in one process, and compare every gradient.

    The one process runs without a process group (or with a group of one if the loop requires it), with the plain model, the same weights,
    and the ranks' batches joined in rank order. Gradients are compared before the optimizer uses them, and parameters after its step.
    Processes are forked, so that functions in a notebook, in ``__main__`` or inside other functions work.

    Args:
        build: Returns the model, which must be equal on all ranks, or the model and a function that creates its optimizer after the wrap:
            ``(model, lambda model: SGD(model.parameters(), 0.1))``.
        step: Maps model and batch to the loss: a scalar, or a dict with ``"loss"``. The loss divided by ``accumulate`` is back-propagated.
        batches: Global batches, one for each micro-batch, or a function of ``(rank, world)`` that returns the batches of a rank.
        loop: A whole optimizer step instead of ``step``: ``loop(model, optimizer, micro_batches)``, with one ``optimizer.step()``.
            It divides by ``len(micro_batches)``, because the one process may receive all rows as one batch.
        ranks: Number of ranks.
        wrap: ``"ddp"``, ``"fully_shard"``, None, or a function that wraps the model.
        accumulate: Number of micro-batches per optimizer step.
        splits: Rows of a global batch for each rank: ``"even"``, ``"uneven"``, or the numbers.
        join: With ``"rows"``, tensors are split and joined along their first dimension. Otherwise a dimension, or a nest with the structure
            of a batch and the dimension of each tensor (0 if it is not given). If the dimension is None, every rank receives the whole
            tensor.
        dtype: Dtype of parameters and batches. If None, they are not converted.
        precision: Dtype of autocast (``torch.bfloat16``, ``torch.float16``), with a ``dtype`` other than float64.
        randomness: ``"global"``: ranks draw the random numbers that one process draws (``global_randomness`` around each micro-batch, or
            around the loop), from generators that are used for nothing else. ``"by_row"``: the same, with the numbers of
            ``DDPLossStrategy(randomness="by_row")``, in one process too. ``"rank"``: each rank draws from its own generators, and the
            report states whether that explains a difference.
        steps: Number of optimizer steps. If None, all global batches are used, or one step is made if ``batches`` is a function.
        timeout_seconds: Time limit of each run.

    Returns:
        The report. In a test, call its ``raise_if_different()``.

    Raises:
        AuditError: a run failed, died or took too long. The rank and its stack are in the text.
        ConfigurationError: options that cannot work.
        InputError: batches that cannot be cut, a step without a scalar loss, models that differ by rank.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import parity
        >>> batches = [{"x": torch.randn(8, 3), "y": torch.randn(8, 1)}]
        >>> def step(model, batch):
        ...     return (model(batch["x"]) - batch["y"]).square().mean()
        >>> parity(lambda: torch.nn.Linear(3, 1), step, batches).equal
        True
    """
    # options that cannot work
    expect_count("parity(ranks=...)", ranks, at_least=2)
    expect_count("parity(accumulate=...)", accumulate)
    given = sum(each is not None for each in (step, loop))
    expect(
        given == 1,
        "parity",
        expected="one of step and loop",
        got=f"{given} of them",
        fix="Pass step, from model and batch to the loss, or loop, a whole optimizer step.",
    )
    if not callable(wrap):
        expect_option("parity(wrap=...)", wrap, ("ddp", "fully_shard", None))
    expect_option("parity(dtype=...)", dtype, (*PRECISIONS, None))
    expect_option("parity(randomness=...)", randomness, ("rank", "global", "by_row"))
    expect_option("parity(precision=...)", precision, (torch.bfloat16, torch.float16, None))
    expected, fix = "another dtype with it: autocast leaves float64 alone", "Add dtype=torch.float32."
    is_used = precision is None or dtype != torch.float64
    expect(is_used, "parity(precision=...)", expected=expected, got="dtype=torch.float64", fix=fix)
    # the ranks' batches
    dims = 0 if join == "rows" else join
    if not callable(batches):
        given_batches = _listed(batches)
        steps = steps or max(1, len(given_batches) // accumulate)
        batches = _of_ranks(given_batches, steps * accumulate, ranks, splits, dims)
    name = wrap if isinstance(wrap, str) else getattr(wrap, "__name__", "no wrapper")

    options = (build, step, loop, batches, wrap, accumulate, dims, dtype, precision)
    target = LoopTarget(name, timeout_seconds, randomness, *options)
    return compare_with_one("parity", target, ranks, steps or 1)


def _listed(batches: Any) -> list[Any]:
    """Return global batches as a list."""
    is_list = isinstance(batches, Iterable) and not isinstance(batches, (Tensor, dict))
    expected = "a list of global batches, or a function of (rank, world)"
    expect(
        is_list,
        "parity(batches=...)",
        expected=expected,
        got=type(batches).__name__,
        fix="Put a single batch in a list: batches=[batch].",
    )
    return list(batches)


def _of_ranks(given: Sequence[Any], count: int, ranks: int, splits: str | Sequence[int], join: Any) -> list[list[Any]]:
    """Split global batches into the batches of each rank."""
    got, fix = f"{len(given)}", "Each micro-batch is one entry."
    what = "parity(batches=...)"
    expect(len(given) >= count, what, expected=f"{count} global batches", got=got, fix=fix, error=InputError)
    of_ranks: list[list[Any]] = [[] for _ in range(ranks)]
    for index, batch in enumerate(given[:count]):
        moved = rows_first(batch, join)
        rows, start = _rows_of(moved, f"batches[{index}]"), 0
        for own, size in zip(of_ranks, _sizes(rows, ranks, splits), strict=True):
            own.append(take_rows(moved, range(start, start + size)))
            start += size
    return of_ranks


def _rows_of(batch: Any, what: str) -> int:
    """Return the number of rows of a global batch, which must be equal for all of its tensors."""
    lengths = {path: leaf.shape[0] for path, leaf in leaves(batch, what) if isinstance(leaf, Tensor) and leaf.ndim}
    fix = 'Give join= the dimension of each tensor, such as {"x": 0, "mask": 1}, and None for what every rank gets.'
    is_common = len(set(lengths.values())) == 1
    expect(is_common, what, expected="tensors with a common first dimension", got=lengths, fix=fix, error=InputError)
    return next(iter(lengths.values()))


def _sizes(rows: int, ranks: int, splits: str | Sequence[int]) -> list[int]:
    """Return how many rows each rank gets."""
    expect(
        rows >= ranks,
        "batches",
        expected=f"a row for each of {ranks} ranks",
        got=rows,
        error=InputError,
        fix="Give batches with more rows, or use fewer ranks.",
    )
    if not isinstance(splits, str):
        sizes = list(splits)
        fits = len(sizes) == ranks and sum(sizes) == rows and min(sizes) >= 0
        expected = f"{ranks} numbers that add up to {rows}"
        expect(
            fits,
            "parity(splits=...)",
            expected=expected,
            got=sizes,
            error=InputError,
            fix="Give one number of rows for each rank, or 'even' or 'uneven'.",
        )
        return sizes
    expect_option("parity(splits=...)", splits, ("even", "uneven"))
    if splits == "even":
        fix = "Take splits='uneven' or numbers, or leave rows out."
        expected = f"a multiple of {ranks} rows"
        expect(rows % ranks == 0, "batches", expected=expected, got=rows, fix=fix, error=InputError)
        return [rows // ranks] * ranks
    # each rank has one share more than the previous rank, and at least one row
    shares = [1 + (rows - ranks) * (rank + 1) * 2 // (ranks * (ranks + 1)) for rank in range(ranks)]
    return [*shares[:-1], rows - sum(shares[:-1])]


# ---------------------------------------------------------------------- one process of a run


@dataclass
class LoopTarget(Target):
    """A training loop that is run on ranks and in one process.

    Attributes:
        build: Makes the model, or the model and a function that makes its optimizer.
        step: Function from model and batch to the loss. None if ``loop`` is given.
        loop: A whole optimizer step, given model, optimizer and micro-batches.
        batches: Batches of each rank, or a function that returns the batches of one rank.
        wrap: ``"ddp"``, ``"fully_shard"``, None, or a function.
        accumulate: Number of micro-batches per optimizer step.
        join: Dimension of the rows, or a nest with the dimension of each tensor. If None, the same tensor is used on each rank.
        dtype: Dtype of parameters and batches. If None, they are not converted.
        autocast: Dtype of autocast, or None without autocast.
    """

    build: Callable[[], Any]
    step: Callable[..., Any] | None
    loop: Callable[..., Any] | None
    batches: Any
    wrap: Any
    accumulate: int
    join: Any
    dtype: torch.dtype | None
    autocast: torch.dtype | None

    by_trainer = False

    @property
    def draws_by_window(self) -> bool:
        """Whether the rows of all micro-batches of a step can share a draw. False if a loop processes all of them."""
        return self.loop is None

    @property
    def precision(self) -> str:
        """Lightning's name of the precision."""
        if self.autocast is not None:
            return PRECISIONS[self.autocast].replace("true", "mixed")
        return PRECISIONS[self.dtype or torch.float32]

    def train(self, run: Run, folder: Path, rank: int) -> RankRecord:
        """Build the model, train it, and return the record."""
        # an error's frames keep the wrapper alive, which may wait for gloo's threads forever after its group was destroyed
        try:
            return _Training(self, run, folder, rank).train()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            gc.collect()


class _Shared:
    """A tensor that is complete on every rank. Code that splits and joins rows does not treat it as a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"a tensor with the digest {tensor_digest(self.tensor)}"

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]


def rows_first(batch: Any, join: Any, *, back: bool = False) -> Any:
    """Move the dimension that ``join`` names to the first place in each tensor of a batch, or put it ``back``."""
    if isinstance(batch, _Shared):
        return batch.tensor
    if isinstance(batch, Tensor):
        if not batch.ndim:
            return batch
        if join is None:
            return _Shared(batch)
        fits = isinstance(join, int) and -batch.ndim <= join < batch.ndim
        expected = f"a dimension of a tensor of shape {tuple(batch.shape)}, or None"
        expect(
            fits,
            "parity(join=...)",
            expected=expected,
            got=repr(join),
            error=InputError,
            fix="Name the dimension of the rows, or None for a tensor that every rank gets whole.",
        )
        return batch.movedim(0, join) if back else batch.movedim(join, 0)
    children = children_of(batch)
    if children is None:
        return batch
    of_children = _dims_of_children(children, join)
    moved = [rows_first(child, dim, back=back) for (_, child), dim in zip(children, of_children, strict=True)]
    return rebuild_nest(batch, moved)


def row_places(batch: Any, join: Any) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of a batch, each with the dimension of its rows, or None if every rank has the whole tensor."""
    if isinstance(batch, Tensor):
        dim = join if batch.ndim else None
        return [(batch, dim)]
    found = []
    children = children_of(batch) or []
    for (_, child), dim in zip(children, _dims_of_children(children, join), strict=True):
        found += row_places(child, dim)
    return found


def _dims_of_children(children: Sequence[tuple[str, Any]], join: Any) -> list[Any]:
    """Return the part of ``join`` that belongs to each part of a nest."""
    dims = children_of(tuple(join) if isinstance(join, list) else join)
    if dims is None:
        return [join] * len(children)
    return [dict(dims).get(key, 0) for key, _ in children]


class _Training(Recorder):
    """A loop in one process of a run, and its record."""

    def __init__(self, target: LoopTarget, run: Run, folder: Path, rank: int) -> None:
        super().__init__(run, folder, rank)
        self.target = target
        self.dtype = torch.float64 if "precision" in run.without else target.dtype
        self._where = f"rank {rank}" if run.ranks else "the one process"

    # ------------------------------------------------------------------ before the first step

    def _build(self) -> None:
        """Build model and optimizer with the initial weights of the ranks' run, and describe them."""
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        seed_everything(_SEED, verbose=False)
        model, make_optimizer = self._built()
        model.train()
        if self.run.ranks and self.run.start is None:
            refuse_unequal_build(model)
        self.start(model, self.target.precision)
        self.record.norms_at_wrap = norm_classes(model)
        # the optimizer is created after the wrap
        self.inner, self.model = model, self._wrapped(model)
        self.optimizer = make_optimizer(self.model)
        self._check_optimizer()
        named = self._named()
        self.record.parameter_order = list(named)
        accumulate, precision = self.target.accumulate, self.target.precision
        self.describe(self.inner, named, [self.optimizer], accumulate=accumulate, precision=precision)

    def _built(self) -> tuple[nn.Module, Callable[[nn.Module], Optimizer]]:
        found = self.target.build()
        model, make_optimizer = found if isinstance(found, tuple) else (found, lambda it: SGD(it.parameters(), lr=0.1))
        expect(
            isinstance(model, nn.Module),
            "build()",
            expected="a model",
            got=type(model).__name__,
            fix="Return the model, or the model and a function that makes its optimizer.",
        )
        expect(
            not isinstance(make_optimizer, Optimizer),
            "build()",
            expected="a function that makes the optimizer after the wrap",
            got=f"an optimizer made before it ({type(make_optimizer).__name__})",
            fix="return model, lambda model: torch.optim.SGD(model.parameters(), 0.1)",
        )
        if self.dtype is not None:
            cast_module_(model, self.dtype)
        return model, make_optimizer

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
        """Return the parameters by their names in the plain model."""
        named = {}
        for path, parameter in self.model.named_parameters():
            named[".".join(part for part in path.split(".") if part not in _WRAPPERS)] = parameter
        return named

    def _check_optimizer(self) -> None:
        known = set(map(id, self._named().values()))
        expect(
            all(id(parameter) in known for parameter in optimized([self.optimizer]).values()),
            f"build(), on {self._where}",
            expected="an optimizer of the wrapped model's parameters",
            got="one of other parameters: those of before the wrap, or of another model",
            fix="Make it from the model that the function gets: lambda model: SGD(model.parameters(), 0.1).",
        )

    # ------------------------------------------------------------------ training

    def train(self) -> RankRecord:
        """Build the model, make the steps, and return the record."""
        self._build()
        size = max(1, self.target.accumulate * self.run.accumulate)
        batches = self._batches()
        seed_everything(_SEED, verbose=False)
        self.seed_draws()
        self._hook_steps()
        for step in range(1, self.run.steps + 1):
            micro_batches = list(islice(batches, size))
            needed = f"{size * self.run.steps} batches ({self.run.steps} steps of {size})"
            enough = len(micro_batches) == size
            expect(
                enough,
                f"batches, on {self._where}",
                expected=needed,
                got="fewer",
                error=InputError,
                fix="Give more batches, or lower steps or accumulate.",
            )
            self._make_step(step, [self._given(batch, step) for batch in micro_batches])
        return self.record

    def _batches(self) -> Iterator[Any]:
        """Return this process's batches, with the rows of their tensors first."""
        if not self.run.plans:
            own = self.target.batches
            if callable(own):
                return (rows_first(batch, self.target.join) for batch in own(self.rank, self.run.ranks))
            return iter(own[self.rank])
        return map(self.replayed_batch, enumerate(chain.from_iterable(self.run.plans[self.rank])))

    def _given(self, batch: Any, step: int) -> Any:
        """Record a batch, and return it in the form that the loop receives."""
        batch = map_batch_tensors(batch, self._cast)
        self.record_batch(batch, step, count_rows(batch))
        return map_batch_tensors(rows_first(batch, self.target.join, back=True), self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else as_dtype(tensor, self.dtype)

    def _make_step(self, step: int, micro_batches: list[Any]) -> None:
        """Make one optimizer step: the user's loop, or a loop around the user's step."""
        with self.conditions(self.inner, len(micro_batches)):
            if self.target.loop is None:
                losses = self._accumulate(self.target.step, micro_batches)
            else:
                numbers = range(len(self.record.losses), len(self.record.batches))
                with self._draws_for(micro_batches, numbers, ends=True), self._precision():
                    loss = loss_of(self.target.loop(self.model, self.optimizer, micro_batches))
                losses = [None if loss is None else float(loss.detach())] * len(micro_batches)
        self.record.losses += losses
        expect(
            self.record.steps == step,
            f"loop, on {self._where}",
            expected="one optimizer.step() for each call",
            got=f"{self.record.steps - step + 1}",
            fix="Give the optimizer steps to `steps=`, and the micro-batches of each to `accumulate=`.",
        )

    def _accumulate(self, step: Any, micro_batches: Sequence[Any]) -> list[float | None]:
        """Back-propagate the mean of the micro-batches' losses, like Lightning, and step."""
        self.optimizer.zero_grad()
        losses: list[float | None] = []
        for index, batch in enumerate(micro_batches):
            with self._synchronised(index == len(micro_batches) - 1):
                number = len(self.record.losses) + index
                with self._draws_for([batch], [number]), self._precision():
                    loss = loss_of(step(self.model, batch))
                is_loss = loss is not None and loss.requires_grad and loss.numel() == 1
                got = "something else" if loss is None else f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                what, expected = f"step, on {self._where}", 'a scalar tensor with gradient, or a dict with "loss"'
                expect(
                    is_loss,
                    what,
                    expected=expected,
                    got=got,
                    error=InputError,
                    fix="Return the loss before item() or detach(). Average it to one number if it has several.",
                )
                assert loss is not None
                with self.backward_draws():
                    (loss / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        self.optimizer.step()
        return losses

    def _draws_for(
        self, batches: Sequence[Any], numbers: Sequence[int], *, ends: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward on these batches, given their numbers among the recorded batches."""
        join = self.target.join
        places: list[tuple[Tensor, int | None]] = [(buffer, None) for buffer in self.inner.buffers()]
        for batch in batches:
            places += row_places(batch, join)
        rows = [rows_first(batch, join) for batch in batches]
        return self.forward_draws(rows, places, numbers, ends=ends)

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Reduce gradients only in the last micro-batch, if the wrapper supports this."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        is_waiting = not last and hasattr(self.model, "no_sync")
        return self.model.no_sync() if is_waiting else contextlib.nullcontext()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        device = next(self.inner.parameters(), torch.empty(0)).device.type
        on = self.target.autocast is not None and "precision" not in self.run.without
        return torch.autocast(device, dtype=self.target.autocast, enabled=on)

    # ------------------------------------------------------------------ hooks, which are never removed

    def _hook_steps(self) -> None:
        """Record gradients and parameters of each optimizer step, and gradients before they are clipped."""
        self.follow_layers(self.inner)
        self.optimizer.register_step_pre_hook(self._record_gradients)
        self.optimizer.register_step_post_hook(self._record_parameters)
        for name in CLIPS:
            wrap_function(nn.utils, name, before=lambda: self.see_gradients("reduced", self._named()))

    def _record_gradients(self, *_: Any) -> None:
        named = {name: parameter for name, parameter in self._named().items() if parameter.requires_grad}
        self.record_gradients(named, self.optimizer)

    def _record_parameters(self, *_: Any) -> None:
        named = self._named()
        self.record_used(named)
        self.record_parameters(self.record.steps, named, self.inner)


# ---------------------------------------------------------------------- models


def refuse_unequal_build(model: nn.Module) -> None:
    """Reject a model that differs between ranks.

    Raises:
        InputError: with the first parameter or buffer that differs, and its first value on each rank.

    Communication: one gather of names and digests.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = [(name, tensor_digest(tensor), str(tensor.flatten()[:1].tolist())) for name, tensor in named.items()]
    found = [list(map(tuple, sent)) for sent in handshake.all_gather_json("build()", {}, own)]
    nothing = ("nothing", "", "[]")
    for column in zip_longest(*found, fillvalue=nothing):
        if len({entry[:2] for entry in column}) > 1:
            raise InputError(
                "build()",
                expected="the same parameters and buffers on every rank",
                ranks=[f"`{name}`, first value {value}" for name, _, value in column],
                fix="Build the model alike on every rank: without seeds, files or sizes that depend on the rank.",
            )


def _as_if_wrapped(model: nn.Module) -> nn.Module:
    """Add the methods of wrappers to the plain model, without effect."""
    extras = {"no_sync": contextlib.nullcontext, "module": model}
    switches = [name for name in dir(FSDPModule) if name.startswith(("set_", "reshard", "unshard"))]
    extras |= dict.fromkeys(switches, lambda *_, **__: None)
    model.__dict__.update({name: extra for name, extra in extras.items() if not hasattr(model, name)})
    return model
