"""`GlobalBatchLoss`: any loss, evaluated as if on the concatenated global batch, with the exact gradient.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``D`` embedding size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.losses import CrossBatchMemory
from pytorch_metric_learning.miners import BaseMiner
from pytorch_metric_learning.reducers import DoNothingReducer
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from lightning_ddp_losses.core import autograd_graph, inputs
from lightning_ddp_losses.core.configuration import configuration_digest
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import Backward
from lightning_ddp_losses.distributed.gathered_batch import Choice, GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.losses import anchor_tuples as pml_rows
from lightning_ddp_losses.losses.evaluations import (
    PartialsExchange,
    elements_value,
    reduce_partials,
    rows_value,
    tiled_value,
)
from lightning_ddp_losses.losses.gathered_call import (
    PML_NAMES,
    Draws,
    GlobalTuples,
    PMLCall,
    TensorCall,
    by_name,
    same_draws,
)
from lightning_ddp_losses.losses.partial_sums import has_per_anchor
from lightning_ddp_losses.losses.pml_registry import MODES, Mode, allowed_modes, few_rows
from lightning_ddp_losses.losses.tiled import PAIR_LOSSES, tiled_plan
from lightning_ddp_losses.losses.torch_losses import torch_partial_sum

_VIEWS = ("embeddings", "ref_emb")  # what SelfSupervisedLoss takes, in this order
_QUEUED = ("embeddings", "labels", "indices_tuple", "enqueue_mask")  # what CrossBatchMemory takes
_PML = (pml.BaseMetricLossFunction, pml.BaseLossWrapper, pml.MultipleLosses)


class GlobalBatchLoss(WithProcessGroup, nn.Module):
    """A loss over the rows of all ranks.

    Equivalent to: ``loss(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process.

    Args:
        loss: Any loss module: pytorch-metric-learning's (PML), torch.nn's, your own.
        mode: ``"replicated"``: gather all rows, every rank computes the whole loss; exact for every deterministic loss.
            ``"rows"``: each rank computes its own anchors against all rows; for losses that are a sum over anchors.
            ``"elements"``: nothing is gathered; for losses that are a sum over samples. ``"auto"``: the cheapest that
            is exact for this loss and this call (``rows`` from a few dozen or hundred global rows on: fewer are computed whole).
        backward: ``"own_slice"``: every rank multiplies the returned loss by the same coefficient (else a wrong
            gradient). ``"sum"``: coefficients may differ by rank; costs a collective in backward.
        batch_dims: For losses that are not PML's: by argument position or name, which dimension counts samples (default
            0), or None for a tensor that is no batch.
        tile_bytes: In ``rows``, the most that one tile of distances may take. None: what is fast on the device. Rows are evaluated
            in tiles and once more in backward, so memory grows with G, not with its square.
        gather: ``"all"``: every rank holds all rows. ``"ring"``: in ``rows``, ranks pass their rows on, so that two ranks' rows are
            held at a time; for Contrastive, MultiSimilarity, NTXent and SupCon between the rows of one labelled batch.
        group: Process group; None is the world. In a part of it, a rank that does not come is noticed after the group's own time-out.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank, unscaled; logging it needs no ``sync_dist``.

    Gradient:
        After DDP's mean over ranks, every parameter (of encoder and loss) holds the one-process gradient.

    Communication:
        ``elements`` 1 frame. ``replicated`` frame + gather, none in backward. ``rows`` frame + gather + frame; in backward none
        where ``evaluation`` is symmetric and the call has labels only, else 1. A ring: 2 frames, a gather of labels, and one (Contrastive)
        to three times W - 1 messages. Few rows on the CPU (``handshake.inline_capacity``) need no gather: they travel in the frame from the
        second call on.

    Raises:
        ConfigurationError: a mode that is not exact for the loss; a reduction that cannot be made global.
        InputError: on every rank, for embeddings of a wrong width or labels out of range on any rank (the range is read at the first call
            only where the batch is on an accelerator, as that waits for it).
        RankMismatchError: on every rank, when widths, dtypes, arguments or configurations differ.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import SupConLoss
        >>> loss = GlobalBatchLoss(SupConLoss())
        >>> value = loss(torch.randn(4, 8), torch.tensor([0, 0, 1, 1]))
    """

    sees_global_batch = True

    def __init__(
        self,
        loss: nn.Module,
        *,
        mode: Literal["auto", "replicated", "rows", "elements"] = "auto",
        backward: Backward = "own_slice",
        batch_dims: Mapping[int | str, int | None] | None = None,
        tile_bytes: int | None = None,
        gather: Literal["all", "ring"] = "all",
        group: Group = None,
    ) -> None:
        super().__init__()
        refuse_unfit(loss, mode, backward)
        refuse_tiles(loss, mode, tile_bytes, gather)
        self.loss = loss
        self.mode = mode
        self.backward = backward
        self.batch_dims = dict(batch_dims or {})
        self.tile_bytes = tile_bytes
        self.gather = gather
        self._group = group
        self._fingerprint = ""
        self._draws = Draws()
        self._told = False
        self._coefficients = UpstreamGradWatch()
        self._reading = inputs.ValueReading()
        self._is_pml = isinstance(loss, _PML)
        memories = [m for m in loss.modules() if isinstance(m, pml.CrossBatchMemory)]
        self.queue_position = QueuePosition(memories) if memories else None

    def extra_repr(self) -> str:
        """The mode that runs, and how rows are evaluated."""
        mode = self.exact_modes()[0] if self.mode == "auto" else self.mode
        return f"mode={self.mode!r} ({mode}{f', {self.evaluation}' if mode == 'rows' else ''})"

    @property
    def evaluation(self) -> Literal["tiled, symmetric", "tiled", "row tiles"]:
        """How ``mode="rows"`` evaluates the loss as it is configured now; equal in value, different in memory.

        ``"tiled, symmetric"``: tiles of our own; no collective in backward where the rows of one batch are compared without a miner's
        tuples. ``"tiled"``: the same with one. ``"row tiles"``: pytorch-metric-learning's own formula on a few anchors at a time.
        """
        plan = tiled_plan(self.loss)
        if plan is None:
            return "row tiles"
        return "tiled, symmetric" if plan.symmetric else "tiled"

    def exact_modes(self) -> tuple[Mode, ...]:
        """Modes that are exact for this loss as it is configured now, cheapest first."""
        allowed = allowed_modes(self.loss)
        if self.backward == "sum":  # a share of the loss has no meaning of its own when ranks weigh it differently
            return ("replicated",)
        return tuple(
            m
            for m in MODES
            if m in allowed and (m == "replicated" or not self._is_pml or pml_rows.rows_are_exact(self.loss, m))
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The global loss.

        Args:
            args: For PML losses: embeddings (B, D), labels (B,) or None (with ``ref_emb``: each row its own identity,
                unique over all ranks), indices_tuple (local or from ``GlobalBatchMiner``), ref_emb, ref_labels,
                enqueue_mask. For others: their own arguments; tensors are batches along dim 0, 0-dim tensors are not.
            kwargs: The same by name.
        """
        try:
            self._check(args, kwargs)
        except InputError as error:
            handshake.raise_on_all_ranks(error, self._title, group=self._group)
        value = autograd_graph.run_full_precision(self, self._forward, args, kwargs)
        autograd_graph.remember_global_value(value)
        return value if self.backward == "sum" else self._coefficients.watch(value, group=self._group)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = self._reading.next_call((args, kwargs))
        inputs.check_inputs(self.loss, self._title, args, kwargs, read_values=read, refuse_nan=False, allow_empty=True)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        modes = self.exact_modes()
        mode = modes[0] if self.mode == "auto" else self.mode
        if mode not in modes:
            handshake.raise_on_all_ranks(not_exact(self._title, mode, modes), self._title, group=self._group)
        try:
            if self._is_pml:
                return self._pml(mode, by_name(self._title, self._names(args), args, kwargs))
            if mode == "elements":
                return self._torch_elements(args, kwargs)
            return self._whole(args, kwargs)
        except Exception as error:  # what all ranks raise alike passes through
            handshake.raise_on_all_ranks(error, self._title, group=self._group)

    # ------------------------------------------------------------------ PML

    def _names(self, args: tuple[Any, ...]) -> tuple[str, ...]:
        """What PML calls the arguments."""
        if isinstance(self.loss, pml.SelfSupervisedLoss):
            return _VIEWS
        if isinstance(self.loss, pml.CrossBatchMemory) and len(args) <= len(_QUEUED):
            return _QUEUED
        return PML_NAMES

    def _pml(self, mode: str, given: dict[str, Any]) -> Tensor:
        meeting = PartialsExchange(self._title, self._frame_of, self._group)
        if mode == "elements" and set(given) <= {"embeddings", "labels"} and self._has_rows(given):
            return elements_value(self.loss, given["embeddings"], given.get("labels"), meeting)
        fits = mode == "rows" and self._rows_fit(given)
        ring = self.gather == "ring"
        if ring and not self._is_symmetric(given):
            raise no_ring(self._title, "labels, and no references or tuples", sorted(given))

        def backward(counts: dict[str, list[int]]) -> Backward:
            return "sum" if mode == "rows" and not self._few(counts) else self.backward

        def gather(batches: dict[str, Tensor]) -> GatheredBatch:
            # in a ring all ranks' labels, and no more than the number of their rows
            return self._gather(batches, backward, counted=("embeddings",) if ring else ())

        call = PMLCall(self.loss, given, gather, process_groups.rank(self._group))
        self._warn_identities(call)
        fits = fits and not self._few(call.counts)
        plan = tiled_plan(self.loss) if fits else None
        if plan is not None and call.ref_labels is not None:
            symmetric = plan.is_symmetric(given)
            return tiled_value(
                self.loss, plan, call, meeting, symmetric=symmetric, tile_bytes=self.tile_bytes, ring=ring
            )
        if fits and call.rows_possible():
            return rows_value(self.loss, call, meeting, self.tile_bytes)
        if self.queue_position is not None:
            mask = call.arguments.get("enqueue_mask")  # only what it marks goes to the memory
            self.queue_position.check(call.total_rows if mask is None else int(mask.sum()), self._title)
        return self._on_all_rows(call.seed, call.arguments.values(), (), call.arguments)  # type: ignore[no-any-return]

    def _is_symmetric(self, given: dict[str, Any]) -> bool:
        plan = tiled_plan(self.loss)
        return plan is not None and plan.is_symmetric(given)

    def _has_rows(self, given: dict[str, Any]) -> bool:
        return isinstance(given.get("embeddings"), Tensor)

    def _few(self, counts: dict[str, list[int]]) -> bool:
        """So few rows over all ranks that every rank computes the whole loss; the same verdict on every rank."""
        chosen = self.mode == "rows" or self.gather == "ring"  # only what all ranks have agreed on; not tile_bytes
        return not chosen and sum(counts.get("embeddings", ())) <= few_rows(self.loss)

    def _rows_fit(self, given: dict[str, Any]) -> bool:
        # per anchor, PML counts a pair that a miner names twice once
        return "indices_tuple" not in given or not has_per_anchor(self.loss.reducer)

    def _warn_identities(self, call: PMLCall) -> None:
        """Hand-made labels of self-supervised use collide between ranks; all ranks see it, rank 0 says so, once."""
        if (
            self._told
            or self._draws.number > 3
            or "labels" not in call.given
            or process_groups.world_size(self._group) == 1
        ):
            return
        self._told = call.ranks_with_local_identities() > 1
        if self._told and process_groups.rank(self._group) == 0:
            warnings.warn(
                f"{self._title}: several ranks hand in the same labels 0, 1, 2, ...: rows of different ranks count as the same "
                "identity. If each row is its own identity, pass the second view as ref_emb and labels=None.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ others

    def _torch_elements(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        share = torch_partial_sum(self.loss, args, kwargs, process_groups.world_size(self._group))
        first = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        return reduce_partials(
            self.loss, [share], first, PartialsExchange(self._title, self._frame_of, self._group), empty=math.nan
        )

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = TensorCall(self._title, args, kwargs, self.batch_dims, lambda given: self._gather(given, self.backward))
        return self._on_all_rows(call.seed, call.batches, call.args, call.kwargs)

    # ------------------------------------------------------------------ shared

    def _on_all_rows(self, seed: int, batches: Iterable[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The loss itself, on the rows of all ranks."""
        with autograd_graph.inside_global_batch(), same_draws(self.loss, seed, batches):
            value = self.loss(*args, **kwargs)
        if self.queue_position is not None:
            self.queue_position.note()
        return value

    def _gather(
        self, batches: dict[str, Tensor], backward: Backward | Choice, counted: Sequence[str] = ()
    ) -> GatheredBatch:
        extra, must_match = self._draws.next(), self._agreed()
        return gather_batch(
            self._title, batches, must_match, backward=backward, extra=extra, counted=counted, group=self._group
        )

    def _frame_of(self, like: Tensor) -> dict[str, object]:
        return {**self._agreed(), "rows of embeddings": f"{('rows', *like.shape[1:])} {like.dtype} {like.device.type}"}

    def _agreed(self) -> dict[str, object]:
        if not self._fingerprint:
            self._fingerprint = configuration_digest(self.loss)
        must_match: dict[str, object] = {"mode": self.mode, "backward": self.backward, "gather": self.gather}
        must_match["configuration"] = self._fingerprint
        if self.backward == "own_slice":
            noted = self._coefficients.take()
            must_match["coefficient of the last backward (give backward='sum' where ranks shall differ)"] = noted
        return must_match

    @property
    def _title(self) -> str:
        return f"GlobalBatchLoss({type(self.loss).__name__})"


_PML_GATHERS = (DistributedLossWrapper, DistributedMinerWrapper)


def refuse_unfit(loss: nn.Module, mode: str, backward: str) -> None:
    """Refuse what cannot be made global, by name.

    Raises:
        ConfigurationError: no module, an unknown mode, a reduction that happens later, a mode that is not exact for the loss.
    """
    if not isinstance(loss, nn.Module):
        raise ConfigurationError("GlobalBatchLoss: loss", expected="a torch.nn.Module", got=repr(loss))
    if mode not in ("auto", *MODES):
        raise ConfigurationError("GlobalBatchLoss: mode", expected=f"'auto' or one of {MODES}", got=repr(mode))
    if backward not in ("own_slice", "sum"):
        raise ConfigurationError("GlobalBatchLoss: backward", expected="'own_slice' or 'sum'", got=repr(backward))
    inner = [m for m in loss.modules() if isinstance(getattr(m, "reducer", None), DoNothingReducer)]
    if inner:
        raise ConfigurationError(
            f"GlobalBatchLoss({type(loss).__name__}): reducer",
            expected="one that returns a number",
            got="DoNothingReducer, which returns a dict",
            fix="Give the loss the reducer that you apply afterwards.",
        )
    _refuse_global_parts(loss)
    if isinstance(loss, _Loss) and getattr(loss, "reduction", "mean") == "none":
        raise ConfigurationError(
            f"GlobalBatchLoss({type(loss).__name__}): reduction",
            expected="'mean' or 'sum'",
            got="'none'",
            fix="What is reduced later cannot be made global here; let the loss reduce.",
        )
    if mode != "auto" and mode not in allowed_modes(loss):
        raise not_exact(f"GlobalBatchLoss({type(loss).__name__})", mode, allowed_modes(loss))


def _refuse_global_parts(loss: nn.Module) -> None:
    """Rows that were gathered may not be gathered once more: every row would count W times."""
    for name, module in loss.named_modules():
        if getattr(module, "sees_global_batch", False) or isinstance(module, _PML_GATHERS):
            raise ConfigurationError(
                f"GlobalBatchLoss({type(loss).__name__})",
                expected="losses and miners that look at the rows they are given",
                got=f"{type(module).__name__}{f' in {name}' if name else ''}, which gathers the rows of all ranks by itself",
                fix="Leave out one of the two wrappers.",
            )


def refuse_tiles(loss: nn.Module, mode: str, tile_bytes: int | None, gather: str) -> None:
    """Refuse a tile of no size, and a ring that the loss cannot go round.

    Raises:
        ConfigurationError: with what, expected, got and what to do.
    """
    title = f"GlobalBatchLoss({type(loss).__name__})"
    if tile_bytes is not None and (isinstance(tile_bytes, bool) or not isinstance(tile_bytes, int) or tile_bytes < 1):
        raise ConfigurationError(
            f"{title}: tile_bytes", expected="a positive number of bytes, or None", got=repr(tile_bytes)
        )
    refuse_gather(title, gather)
    if gather == "ring":
        plan = tiled_plan(loss) if mode in ("auto", "rows") and allowed_modes(loss)[0] == "rows" else None
        if plan is None or not plan.symmetric or getattr(loss, "embedding_regularizer", None) is not None:
            names = sorted(cls.__name__ for cls, pair_loss in PAIR_LOSSES.items() if pair_loss.symmetric)
            raise no_ring(
                title, f"one of {', '.join(names)}, mode 'rows', without regulariser", "another configuration"
            )


def refuse_gather(title: str, gather: str) -> None:
    """Refuse a way for rows to travel that is not known.

    Raises:
        ConfigurationError: with what, expected and got.
    """
    if gather not in ("all", "ring"):
        raise ConfigurationError(f"{title}: gather", expected="'all' or 'ring'", got=repr(gather))


def no_ring(title: str, expected: object, got: object) -> ConfigurationError:
    """The error for rows that cannot be passed on."""
    return ConfigurationError(f"{title}: gather='ring'", expected=expected, got=got, fix="Use gather='all'.")


def not_exact(title: str, mode: str, modes: Sequence[str]) -> ConfigurationError:
    """The error for a mode that is not exact for a loss."""
    return ConfigurationError(
        f"{title}: mode",
        expected=f"one that is exact for this loss as configured: {', '.join(modes)}",
        got=repr(mode),
        fix="Use mode='auto', or declare the class with register_row_separable / register_element_wise.",
    )


class QueuePosition(nn.Module):
    """Where the next row of a ``CrossBatchMemory`` goes; PML keeps it in plain attributes, which no checkpoint saves.

    Args:
        memories: Of one loss, in the order of its modules.
    """

    position: torch.Tensor
    memories: list[CrossBatchMemory]

    def __init__(self, memories: list[CrossBatchMemory]) -> None:
        super().__init__()
        self.__dict__["memories"] = memories  # no submodules: they are registered beside this one
        self.register_buffer("position", torch.zeros(2 * len(memories), dtype=torch.int64))
        self.register_load_state_dict_post_hook(_restore)  # type: ignore[no-untyped-call]

    def check(self, rows: int, title: str) -> None:
        """Refuse a global batch that a memory cannot hold."""
        for memory in self.memories:
            if rows > memory.memory_size:
                raise InputError(
                    f"{title}: memory_size",
                    expected=f"at least the global batch of {rows} rows",
                    got=memory.memory_size,
                    fix="The memory takes the rows of all ranks; raise memory_size.",
                    collective=True,
                )

    def note(self) -> None:
        """Copy the memories' positions into the buffer."""
        self.position.copy_(torch.tensor([n for m in self.memories for n in (m.queue_idx, int(m.has_been_filled))]))


def _restore(module: nn.Module, _: Any) -> None:
    assert isinstance(module, QueuePosition)
    for memory, (index, filled) in zip(module.memories, module.position.view(-1, 2).tolist(), strict=True):
        memory.queue_idx, memory.has_been_filled = index, bool(filled)


class GlobalBatchMiner(WithProcessGroup, nn.Module):
    """A pytorch-metric-learning miner over the global batch.

    Equivalent to: ``miner(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process.

    Args:
        miner: Any miner of pytorch-metric-learning. A random one draws the same tuples on all ranks.
        group: Process group; None is the world.

    Returns:
        From ``forward``: tuples of global row numbers, equal on every rank, for ``GlobalBatchLoss(..., indices_tuple=...)``.

    Communication: one frame, and one gather of rows that are too many for it (``frames.room``); none in backward.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.miners import MultiSimilarityMiner
        >>> miner = GlobalBatchMiner(MultiSimilarityMiner())
        >>> tuples = miner(torch.randn(4, 8), torch.tensor([0, 0, 1, 1]))
    """

    sees_global_batch = True

    def __init__(self, miner: nn.Module, *, group: Group = None) -> None:
        super().__init__()
        if not isinstance(miner, BaseMiner):
            raise ConfigurationError(
                "GlobalBatchMiner: miner", expected="a miner of pytorch-metric-learning", got=repr(miner)
            )
        self.miner = miner
        self._group = group
        self._draws = Draws()
        self._fingerprint = ""

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> GlobalTuples:
        """Mine the global batch: embeddings (B, D), labels (B,), ref_emb, ref_labels."""
        return autograd_graph.run_full_precision(self, self._forward, args, kwargs)  # type: ignore[no-any-return]

    def _forward(self, *args: Any, **kwargs: Any) -> GlobalTuples:
        names = [name for name in PML_NAMES if name not in ("indices_tuple", "enqueue_mask")]
        title = f"GlobalBatchMiner({type(self.miner).__name__})"
        self._fingerprint = self._fingerprint or configuration_digest(self.miner)
        try:
            call = PMLCall(
                self.miner,
                by_name(title, names, args, kwargs),
                lambda batches: gather_batch(
                    title, batches, {"configuration": self._fingerprint}, extra=self._draws.next(), group=self._group
                ),
                process_groups.rank(self._group),
            )
            with same_draws(self.miner, call.seed, call.arguments.values()):
                return GlobalTuples.of(self.miner(**call.arguments), call.total_rows)
        except Exception as error:  # what all ranks raise alike passes through
            handshake.raise_on_all_ranks(error, title, group=self._group)
