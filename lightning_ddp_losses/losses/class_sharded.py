"""`ClassShardedLoss`: a classification loss whose class weight is divided over the ranks, evaluated chunk by chunk.

A million classes of 128 numbers are half a gigabyte of weight and as much of gradient on every rank, and DDP sends all of it
at every step. Here each rank holds C / W classes; what travels is embeddings and three numbers per row.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``D`` embedding size, ``C`` classes, ``c`` classes
on this rank, ``K`` weight rows per class (sub-centers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.configuration import configuration_digest
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, InputError, format_error
from lightning_ddp_losses.losses.class_heads import head_of, penalty_of
from lightning_ddp_losses.losses.gathered_call import GlobalTuples, miner_counts, miner_weights
from lightning_ddp_losses.losses.global_batch import refuse_unfit
from lightning_ddp_losses.losses.partial_fc import SampledClasses, refuse_options
from lightning_ddp_losses.losses.sharded_softmax import Held, row_losses
from lightning_ddp_losses.losses.sharded_weight import ClassWeight, empty_loss, refuse_joint_draws, weight_of

_NAMED = "rows named by the miner"  # how often
_CHUNK_BYTES = 2 << 20  # of logits at a time: what a core's cache holds


if TYPE_CHECKING:
    from lightning_ddp_losses.distributed.process_groups import Group
    from lightning_ddp_losses.distributed.shard import ClassShard
    from lightning_ddp_losses.losses.class_heads import Head
    from lightning_ddp_losses.losses.sharded_softmax import Held


class ClassLogits:
    """What a class-sharded loss knows besides its loss."""

    if TYPE_CHECKING:
        _head: Head
        _group: Group
        _classes: int
        _title: str
        shard: ClassShard

        def _prepare(self, embeddings: Tensor) -> None: ...
        def _all_classes(self, rows: int, element_bytes: int, device: torch.device) -> Held: ...
        def _weight_rows(self) -> Tensor: ...

    @torch.no_grad()
    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Logits of all classes, as the loss's own ``get_logits``: for few classes or few rows.

        Args:
            embeddings: (B, D).

        Returns:
            (B, C), for this rank's rows.

        Communication: frame, gather of the embeddings, one exchange of G x c logits. Every rank must call it.
        """
        everyone, counts = self._gather_rows(embeddings)
        parts = [logits for _, logits in self._blocks(everyone)]
        own = torch.cat(parts, 1) if parts else everyone.new_zeros(len(everyone), 0)
        if process_groups.world_size(self._group) == 1:
            return own
        rows = counts[process_groups.rank(self._group)]
        sizes = self._classes_per_rank()
        flat = raw_collectives.all_to_all(
            [block.reshape(-1) for block in torch.split(own, counts)], [rows * n for n in sizes], self._group
        )
        return torch.cat([part.view(rows, n) for part, n in zip(flat, sizes, strict=True)], 1)

    @torch.no_grad()
    def predict(self, embeddings: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """The k most likely classes of each row, best first.

        Args:
            embeddings: (B, D).
            k: At most C; the same on every rank.

        Returns:
            Their logits (B, k) and their labels (B, k), for this rank's rows.

        Communication: frame, gather of the embeddings, two exchanges of G x k numbers. Every rank must call it.
        """
        if not isinstance(k, int) or not 1 <= k <= self._classes:
            error = format_error(f"{self._title}: k", expected=f"1 to {self._classes}", got=repr(k))
            handshake.raise_on_all_ranks(InputError(error), self._title, group=self._group)
        everyone, counts = self._gather_rows(embeddings, k)
        best = everyone.new_full((len(everyone), k), -torch.inf)
        labels = torch.full(best.shape, -1, dtype=torch.int64, device=best.device)
        factor = self._head.shown
        for start, shown in self._blocks(everyone):
            logits = shown / factor
            names = torch.arange(start, start + logits.shape[1], device=best.device).expand_as(logits)
            best, place = torch.cat([best, logits], 1).topk(k, 1)
            labels = torch.cat([labels, names], 1).gather(1, place)
        if process_groups.world_size(self._group) > 1:
            world, rows = process_groups.world_size(self._group), counts[process_groups.rank(self._group)]
            found = []
            for tensor in (best, labels):
                parts = [block.reshape(-1) for block in torch.split(tensor, counts)]
                found.append(
                    torch.cat(
                        [p.view(rows, k) for p in raw_collectives.all_to_all(parts, [rows * k] * world, self._group)], 1
                    )
                )
            best, place = found[0].topk(k, 1)
            labels = found[1].gather(1, place)
        return best * factor, labels

    def _gather_rows(self, embeddings: Tensor, k: int = 0) -> tuple[Tensor, list[int]]:
        self._prepare(embeddings)
        dtype = precision.compute_dtype([embeddings, self._weight_rows()])
        bundle = gather_batch(
            f"{self._title}: logits", {"embeddings": embeddings.to(dtype)}, {"k": k}, group=self._group
        )
        return bundle.tensors[0], bundle.counts[0]

    def _blocks(self, everyone: Tensor) -> Iterator[tuple[int, Tensor]]:
        """First class and logits, as the loss shows them, of each chunk of the classes held."""
        rows, scale = self._head.prepare(everyone)
        held = self._all_classes(len(everyone), everyone.element_size(), everyone.device)
        for start, _, block in held.chunks(self._weight_rows()):
            with precision.full_precision(everyone.dtype, [everyone.device.type]):
                logits = self._head.logits(rows, scale, block.to(everyone.dtype)) * self._head.shown
            yield self.shard.start + start, logits

    def _classes_per_rank(self) -> list[int]:
        world = process_groups.world_size(self._group)
        return [type(self.shard).of_rank(self._classes, world, rank).classes for rank in range(world)]


class ClassShardedLoss(SampledClasses, ClassLogits, ClassWeight):
    """A loss with one weight row (or several) per class, each rank holding its own classes.

    Equivalent to: ``loss(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process that holds the whole
    weight, for pytorch-metric-learning's ArcFaceLoss, CosFaceLoss, SubCenterArcFaceLoss, LargeMarginSoftmaxLoss, SphereFaceLoss,
    NormalizedSoftmaxLoss, ProxyNCALoss and SoftTripleLoss. The margin is theirs, and the gradient goes through it.

    The weight keeps its name and layout (``W`` (D, c K), ``fc``, ``proxies``). Ranks hold consecutive blocks of ``ceil(C / W)`` classes.
    Made before the ranks exist, as in a LightningModule's ``__init__``, the loss is divided when they do: by
    ``strategy="ddp_losses"``, or at the first call. In one process it is the chunked evaluation alone.

    Args:
        loss: An instance; its weight is copied from the group's rank 0 and sliced. ``build`` never holds the whole.
        chunk_size: Classes whose logits are alive at a time; None: as many as fit 2 MiB.
        sample_rate: Below 1, a step looks at the batch's own classes and random others, this share of the held ones
            (PartialFC's sampling). Rows not looked at keep weight and optimizer state: the optimizer must be attached
            (``attach``; the strategy does it). Its count of steps is the weight's as a whole.
        unbiased: Weigh the sampled negatives by one over their probability.
        group: Process group that divides the classes; None is the world. Where it is a part (the ranks of a node), every part holds all
            classes, the loss is still that of the rows of all ranks, and the weight's gradient is averaged over its replicas here.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank; logging it needs no ``sync_dist``.

    Gradient:
        The weight's is complete for the rows held and must not be averaged (the strategy leaves it alone; outside Lightning keep
        the loss out of ``DistributedDataParallel``). The encoder's is the one-process gradient after DDP's mean.

    Communication:
        Frame, gather of the embeddings, gather of 3 G numbers; one exchange of G x D in backward. Nothing depends on C. With replicas, a
        frame and a gather of the losses between them, and the mean of the weight's gradient.

    Raises:
        ConfigurationError: a loss, regulariser or distance that cannot be divided; more ranks than classes; a bad chunk.
        InputError: on every rank, for labels out of range or a wrong width on any rank. Where the batch is on an accelerator the range is
            read at the first call only, as that waits for it; from then on a label out of range makes the loss NaN on every rank.
        RankMismatchError: on every rank, when configurations, dtypes or widths differ, or when all ranks hold the same rows.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import ArcFaceLoss
        >>> loss = ClassShardedLoss.build(ArcFaceLoss, num_classes=1000, embedding_size=8)
        >>> value = loss(torch.randn(4, 8), torch.tensor([0, 7, 99, 999]))
    """

    sees_global_batch = True

    def __init__(
        self,
        loss: nn.Module,
        *,
        chunk_size: int | None = None,
        sample_rate: float = 1.0,
        unbiased: bool = False,
        group: Group = None,
    ) -> None:
        weight = weight_of(loss)
        self._set_up(loss, weight.shape, chunk_size, sample_rate, unbiased, group)
        self._register(weight.detach())
        if process_groups.is_distributed():
            self.shard_classes()

    @classmethod
    def build(
        cls,
        loss_class: type[nn.Module],
        *,
        num_classes: int,
        embedding_size: int,
        chunk_size: int | None = None,
        sample_rate: float = 1.0,
        unbiased: bool = False,
        seed: int | None = None,
        group: Group = None,
        **options: Any,
    ) -> ClassShardedLoss:
        """The loss from its class, without ever holding the whole weight.

        Args:
            loss_class: One of the supported classes.
            num_classes: C.
            embedding_size: D.
            chunk_size: As in the constructor.
            sample_rate: As in the constructor.
            unbiased: As in the constructor.
            seed: Of the initial weight, which is the same for any number of ranks; None: drawn from torch's generator, rank 0's
                counts.
            group: As in the constructor.
            **options: Of the loss class (``margin``, ``scale``, ``weight_init_func``, ...).
        """
        try:
            template = empty_loss(loss_class, num_classes, embedding_size, options)
            head = head_of(template)
        except (TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"ClassShardedLoss.build({getattr(loss_class, '__name__', loss_class)}): {error}"
            ) from None
        refuse_joint_draws(template)
        shape = [embedding_size, embedding_size]
        shape[head.class_dim] = num_classes * head.per_class
        made = cls.__new__(cls)
        made._set_up(template, torch.Size(shape), chunk_size, sample_rate, unbiased, group)
        made._seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        held = list(shape)
        held[head.class_dim] = 0
        made._register(getattr(template, head.weight_name).detach().new_empty(held))
        if process_groups.is_distributed():
            made.shard_classes()
        return made

    def _set_up(
        self,
        loss: Any,
        whole_shape: torch.Size,
        chunk_size: int | None,
        sample_rate: float,
        unbiased: bool,
        group: Group,
    ) -> None:
        penalty = penalty_of(loss, head_of(loss).per_class)
        refuse_unfit(loss, "auto", "own_slice")
        ClassWeight.__init__(self, loss, whole_shape, group)
        refuse_options(self._classes, chunk_size, sample_rate, regularised=penalty is not None)
        self._penalty = penalty
        self.chunk_size = chunk_size
        self._set_up_sampling(sample_rate, unbiased)
        self._fingerprint = ""
        self._coefficients = UpstreamGradWatch()
        self._reading = inputs.ValueReading()

    # ------------------------------------------------------------------ forward

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
        """The global loss.

        Args:
            embeddings: (B, D); halves are computed in float32.
            labels: (B,), integers from 0 to C - 1.
            indices_tuple: A miner's pairs or triplets of local rows; as in PML they weigh the rows.
        """
        self._prepare(embeddings, labels, classified=True)
        try:
            value: Tensor = autograd_graph.run_full_precision(
                self, self._forward, (embeddings, labels, indices_tuple), {}
            )
        except Exception as error:  # what all ranks raise alike passes through
            handshake.raise_on_all_ranks(error, self._title, group=self._group)
        autograd_graph.remember_global_value(value)
        watched: Tensor = self._coefficients.watch(value, group=self._group)
        return watched

    def _prepare(self, embeddings: Tensor, labels: Tensor | None = None, *, classified: bool = False) -> None:
        """Divide if that is not done, and refuse what this rank cannot take, together with the peers."""
        self.shard_classes()
        try:
            width = self._whole_shape[1 - self._head.class_dim]
            inputs.check_embeddings(self._title, embeddings, width)
            if classified:
                read = self._reading.next_call((embeddings, labels))
                inputs.check_labels(self._title, labels, len(embeddings), self._classes, read_values=read)
            if classified and self.sampler is not None and self._attached is None and torch.is_grad_enabled():
                raise ConfigurationError(
                    f"{self._title}: sample_rate",
                    expected="an optimizer that steps only the sampled rows",
                    got="none attached",
                    fix="Call loss.attach(optimizer) once, or train with strategy='ddp_losses', which does it.",
                )
        except DDPLossError as error:
            handshake.raise_on_all_ranks(error, self._title, group=self._group)

    def _forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any) -> Tensor:
        bundle = self._gather(embeddings, labels.to(torch.int64), indices_tuple)
        everyone, all_labels = bundle.tensors[:2]
        rows, scale = self._head.prepare(everyone)
        held = self._held(all_labels, len(everyone), everyone.element_size())
        losses, terms, counts = row_losses(held, rows, scale, self._weight_rows())
        if self.loss.collect_stats and hasattr(self.loss, "avg_angle"):
            self.loss.avg_angle = float(counts[3]) / max(len(everyone), 1)
        named = list(bundle.tensors[2:])
        if isinstance(indices_tuple, GlobalTuples):
            indices_tuple.check(self._title, len(everyone))
            named = [self._counts(indices_tuple, len(everyone))]
        if self._replicas is not None:
            batches = {"losses": losses, "labels": all_labels} | ({_NAMED: named[0]} if named else {})
            world = gather_batch(f"{self._title}: replicas", batches, {}, backward="own_slice", group=self._replicas)
            losses, all_labels, *named = world.tensors
        if named:
            losses = losses * miner_weights(named[0], losses.dtype)
        return self._reduce(losses, terms, counts, everyone, all_labels)

    def _gather(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any) -> GatheredBatch:
        batches = {"embeddings": embeddings, "labels": labels}
        if indices_tuple is not None and not isinstance(indices_tuple, GlobalTuples):
            batches[_NAMED] = self._counts(indices_tuple, len(labels))
        self._fingerprint = self._fingerprint or configuration_digest(self.loss)
        must_match = {
            "classes": self._classes,
            "sampling": "none" if self._samples is None else f"{self._samples.rate} {self._samples.unbiased}",
            "configuration": self._fingerprint,
            "miner": type(indices_tuple).__name__,
            "coefficient of the last backward": self._coefficients.take(),
        }
        bundle = gather_batch(self._title, batches, must_match, extra=self._stamp(), group=self._group)
        if len(bundle.tensors[0]) == 0:
            raise InputError(f"{self._title}: rows", expected="at least one on some rank", got="none", collective=True)
        self._refuse_equal(bundle.extras)
        return bundle

    def _counts(self, indices_tuple: Any, rows: int) -> Tensor:
        only_anchors = self._head.weight_name == "proxies"  # PML's ProxyNCA counts anchors alone
        try:
            return miner_counts(indices_tuple, rows, only_anchors=only_anchors, title=self._title)
        except InputError as error:
            handshake.raise_on_all_ranks(error, self._title, group=self._group)

    def _held(self, labels: Tensor, rows: int, element_bytes: int) -> Held:
        """What this rank looks at in a step."""
        shard = self.shard
        local = torch.where((labels >= shard.start) & (labels < shard.stop), labels - shard.start, -1)
        chunk = self._chunk(rows, element_bytes)
        if self._samples is None:
            return Held(self._head, local, chunk, None, None, self._penalty, self._group, self._replicas)
        chosen, local, log_weight = self._draw(self._samples, local)
        return Held(
            self._head, local, chunk, chosen, log_weight, None, self._group, self._replicas, note=self._note_touched
        )

    def _chunk(self, rows: int, element_bytes: int) -> int:
        return self.chunk_size or max(16, _CHUNK_BYTES // (max(rows, 1) * element_bytes * self._head.per_class))

    def _all_classes(self, rows: int, element_bytes: int, device: torch.device) -> Held:
        nobody = torch.full((rows,), -1, device=device)
        return Held(self._head, nobody, self._chunk(rows, element_bytes), group=self._group)

    def _weight_rows(self) -> Tensor:
        return self.weight.t() if self._head.class_dim else self.weight

    def _reduce(self, losses: Tensor, terms: Tensor, counts: Tensor, everyone: Tensor, labels: Tensor) -> Tensor:
        """PML's own reducer on the losses of all rows, which every rank knows, and its regularisers."""
        index = torch.arange(len(losses), device=losses.device)
        if self._head.weight_name == "proxies":  # PML's ProxyNCA leaves out rows whose probability rounds to zero
            kept = torch.exp(-losses.detach()) != 0
            losses, index = losses[kept], index[kept]
        found: dict[str, Any] = {"loss": {"losses": losses, "indices": index, "reduction_type": "element"}}
        if self._penalty is not None:
            value = self._penalty.value(terms, counts[1])
            found["weight_reg_loss"] = {"losses": value, "indices": None, "reduction_type": "already_reduced"}
        self.loss.add_embedding_regularization_to_loss_dict(found, everyone)
        reduced: Tensor = self.loss.reducer(found, everyone, labels)
        return reduced
