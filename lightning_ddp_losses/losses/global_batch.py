"""`GlobalBatchLoss`: any loss, evaluated as if on the concatenated global batch, with the exact gradient.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``D`` embedding size.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import frames, graph, groups, inputs, numerics
from lightning_ddp_losses.bundles import Bundle, gather_bundle
from lightning_ddp_losses.coefficient import CoefficientWatch
from lightning_ddp_losses.collectives import Backward
from lightning_ddp_losses.configuration import digest
from lightning_ddp_losses.errors import InputError, format_error
from lightning_ddp_losses.groups import Group
from lightning_ddp_losses.losses import pml as pml_rows
from lightning_ddp_losses.losses.memory import QueuePosition
from lightning_ddp_losses.losses.pml_call import PML_NAMES, PMLCall
from lightning_ddp_losses.losses.randomness import pack_draw, same_draws, shared_seed
from lightning_ddp_losses.losses.reduction import Share, combine, has_per_anchor, pack_shares, split, unpack_shares
from lightning_ddp_losses.losses.refusals import not_exact, refuse_unfit
from lightning_ddp_losses.losses.table import MODES, Mode, allowed_modes
from lightning_ddp_losses.losses.torch_losses import torch_share

__all__ = ["GlobalBatchLoss"]

_VIEWS = ("embeddings", "ref_emb")  # what SelfSupervisedLoss takes, in this order
_PML = (pml.BaseMetricLossFunction, pml.BaseLossWrapper, pml.MultipleLosses)


class GlobalBatchLoss(nn.Module):
    """A loss over the rows of all ranks.

    Equivalent to: ``loss(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process.

    Args:
        loss: Any loss module: pytorch-metric-learning's (PML), torch.nn's, your own.
        mode: ``"replicated"``: gather all rows, every rank computes the whole loss; exact for every deterministic loss.
            ``"rows"``: each rank computes its own anchors against all rows; for losses that are a sum over anchors.
            ``"elements"``: nothing is gathered; for losses that are a sum over samples. ``"auto"``: the cheapest that
            is exact for this loss and this call.
        backward: ``"own_slice"``: every rank multiplies the returned loss by the same coefficient (else a wrong
            gradient). ``"sum"``: coefficients may differ by rank; costs a collective in backward.
        batch_dims: For losses that are not PML's: by argument position or name, which dimension counts samples (default
            0), or None for a tensor that is no batch.
        group: Process group; None is the world.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank, unscaled; logging it needs no ``sync_dist``.

    Gradient:
        After DDP's mean over ranks, every parameter (of encoder and loss) holds the one-process gradient.

    Communication:
        ``elements`` 1 frame. ``replicated`` frame + gather, none in backward. ``rows`` frame + gather + frame, 1 in backward.

    Raises:
        ConfigurationError: a mode that is not exact for the loss; a reduction that cannot be made global.
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
        group: Group = None,
    ) -> None:
        super().__init__()
        refuse_unfit(loss, mode, backward)
        self.loss = loss
        self.mode = mode
        self.backward = backward
        self.batch_dims = dict(batch_dims or {})
        self._group = group
        self._fingerprint = ""
        self._draws = 0
        self._told = False
        self._coefficients = CoefficientWatch()
        self._is_pml = isinstance(loss, _PML)
        if isinstance(loss, pml.CrossBatchMemory):
            self.queue_position = QueuePosition(loss)

    def extra_repr(self) -> str:
        """The mode that runs."""
        return f"mode={self.mode!r} ({self.exact_modes()[0]})"

    def exact_modes(self) -> tuple[Mode, ...]:
        """Modes that are exact for this loss as it is configured now, cheapest first."""
        allowed = allowed_modes(self.loss)
        split_up = not self._is_pml or pml_rows.rows_are_exact(self.loss)
        if self.backward == "sum":  # a share of the loss has no meaning of its own when ranks weigh it differently
            return ("replicated",)
        return tuple(m for m in MODES if m in allowed and (m == "replicated" or split_up))

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
            frames.fail_together(error, self._title, group=self._group)
        value = graph.run_wide(self, self._forward, args, kwargs)
        graph.note_global_value(value)
        return self._coefficients.watch(value)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_host = all(t.device.type == "cpu" for t in numerics.tensors_in((args, kwargs)))
        inputs.check_inputs(
            self.loss, self._title, args, kwargs, read_values=on_host, refuse_nan=False, allow_empty=True
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        modes = self.exact_modes()
        mode = modes[0] if self.mode == "auto" else self.mode
        if mode not in modes:
            frames.fail_together(not_exact(self._title, mode, modes), self._title, group=self._group)
        try:
            if self._is_pml:
                names = _VIEWS if isinstance(self.loss, pml.SelfSupervisedLoss) else PML_NAMES
                return self._pml(mode, dict(zip(names, args, strict=False)) | kwargs)
            if mode == "elements":
                return self._torch_elements(args, kwargs)
            return self._whole(args, kwargs)
        except Exception as error:  # what all ranks raise alike passes through
            frames.fail_together(error, self._title, group=self._group)

    # ------------------------------------------------------------------ PML

    def _pml(self, mode: str, given: dict[str, Any]) -> Tensor:
        given = {name: value for name, value in given.items() if value is not None}
        plain = set(given) <= {"embeddings", "labels"}
        if mode == "elements" and plain and self._has_rows(given):
            return self._elements(given)
        backward: Backward = "sum" if mode == "rows" else self.backward
        call = PMLCall(self.loss, given, lambda batches: self._gather(batches, backward), groups.rank(self._group))
        self._warn_identities(call)
        if mode == "rows" and self._rows_fit(given) and call.rows_possible():
            return self._rows(call)
        if isinstance(self.loss, pml.CrossBatchMemory):
            mask = call.arguments.get("enqueue_mask")  # only what it marks goes to the memory
            self.queue_position.check(call.total_rows if mask is None else int(mask.sum()), self._title)
        with same_draws(call.seed, call.arguments.values()):
            value = self.loss(**call.arguments)
        if isinstance(self.loss, pml.CrossBatchMemory):
            self.queue_position.note()
        return value  # type: ignore[no-any-return]

    def _has_rows(self, given: dict[str, Any]) -> bool:
        return isinstance(given.get("embeddings"), Tensor)

    def _rows_fit(self, given: dict[str, Any]) -> bool:
        # per anchor, PML counts a pair that a miner names twice once
        return "indices_tuple" not in given or not has_per_anchor(self.loss.reducer)

    def _warn_identities(self, call: PMLCall) -> None:
        """Hand-made labels of self-supervised use collide between ranks; all ranks see it, rank 0 says so, once."""
        if self._told or self._draws > 3 or "labels" not in call.given or groups.world_size(self._group) == 1:
            return
        self._told = call.ranks_with_local_identities() > 1
        if self._told and groups.rank(self._group) == 0:
            warnings.warn(
                f"{self._title}: several ranks hand in the same labels 0, 1, 2, ...: rows of different ranks count as the same "
                "identity. If each row is its own identity, pass the second view as ref_emb and labels=None.",
                stacklevel=2,
            )

    def _elements(self, given: dict[str, Any]) -> Tensor:
        embeddings, labels = given["embeddings"], given.get("labels")
        if embeddings.shape[0]:
            found = pml_rows.elements(self.loss, embeddings, labels)
        else:  # the terms that do not depend on rows still count, once
            found = pml_rows.elements(self.loss, embeddings, labels) if labels is not None else {}
        world = groups.world_size(self._group)
        return self._combine(split(self.loss.reducer, found, embeddings, labels, world), embeddings)

    def _rows(self, call: PMLCall) -> Tensor:
        given, out = call.given, call.arguments
        labels = given.get("labels", call.own_labels)
        found = pml_rows.row_elements(
            self.loss,
            given["embeddings"],
            labels,
            call.own_tuples(),
            out.get("ref_emb", out["embeddings"]),
            call.ref_labels,
        )
        world = groups.world_size(self._group)
        return self._combine(split(self.loss.reducer, found, given["embeddings"], labels, world), given["embeddings"])

    # ------------------------------------------------------------------ others

    def _torch_elements(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        share = torch_share(self.loss, args, kwargs, groups.world_size(self._group))
        first = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        return self._combine([share], first)

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named: dict[int | str, Any] = dict(enumerate(args))
        named.update(kwargs)
        for name, value in named.items():
            if self.batch_dims.get(name, 0) is not None and isinstance(value, (list, tuple, dict)):
                self._refuse_nested(name, value)
        dims = {k: self.batch_dims.get(k, 0) for k, v in named.items() if isinstance(v, Tensor) and v.ndim}
        batches = {str(k): named[k].movedim(d, 0) for k, d in dims.items() if d is not None}
        bundle = self._gather(batches, self.backward)
        for (key, dim), tensor in zip(((k, d) for k, d in dims.items() if d is not None), bundle.tensors, strict=True):
            named[key] = tensor.movedim(0, dim)
        positional = [named[i] for i in range(len(args))]
        with same_draws(shared_seed(bundle), bundle.tensors):
            return self.loss(*positional, **{k: v for k, v in named.items() if isinstance(k, str)})

    def _refuse_nested(self, name: int | str, value: Any) -> None:
        if any(t.ndim for t in numerics.tensors_in(value)):
            raise InputError(
                format_error(
                    f"{self._title}: argument {name}",
                    expected="a tensor",
                    got=f"a {type(value).__name__} of tensors, whose rows would stay on this rank",
                    fix=f"Pass the tensors one by one, or say that they are no batches: batch_dims={{{name!r}: None}}.",
                )
            )

    # ------------------------------------------------------------------ shared

    def _gather(self, batches: dict[str, Tensor], backward: Backward) -> Bundle:
        self._draws += 1
        extra = pack_draw(torch.initial_seed(), self._draws)
        return gather_bundle(self._title, batches, self._agreed(), backward=backward, extra=extra, group=self._group)

    def _combine(self, shares: list[Share], like: Tensor) -> Tensor:
        payloads = frames.exchange(self._title, self._frame_of(like), pack_shares(shares), group=self._group)
        return combine(shares, unpack_shares(payloads), self._group)

    def _frame_of(self, like: Tensor) -> dict[str, object]:
        return {**self._agreed(), "embeddings": f"{('rows', *like.shape[1:])} {like.dtype} {like.device.type}"}

    def _agreed(self) -> dict[str, object]:
        self._fingerprint = self._fingerprint or digest(self.loss)
        agreed: dict[str, object] = {"mode": self.mode, "backward": self.backward, "configuration": self._fingerprint}
        noted = self._coefficients.take()
        if self.backward == "own_slice":
            agreed["coefficient of the last backward (give backward='sum' where ranks shall differ)"] = noted
        return agreed

    @property
    def _title(self) -> str:
        return f"GlobalBatchLoss({type(self.loss).__name__})"
