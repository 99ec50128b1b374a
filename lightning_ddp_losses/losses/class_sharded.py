"""`ClassShardedLoss`: a classification loss with a class weight sharded over the ranks, evaluated chunk by chunk.

One million classes of 128 numbers take half a gigabyte for the weight and the same for its gradient on every rank, and DDP sends the whole
gradient at every step. Here each rank holds C / W classes, and only embeddings and three numbers per row are sent.

The loss consists of a ``ShardedWeight`` (``sharded_weight``: the classes of this rank), a head (``class_heads``: PML's logits), a
``ShardedSoftmax`` for each call (``sharded_softmax``, or ``ClassLogits`` without a gradient), and, with ``sample_rate`` below 1, a
``ClassSampler`` and a ``SampledRowOptimizer`` (``partial_fc``).

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``D`` embedding size, ``C`` classes, ``c`` classes
on this rank, ``K`` weight rows per class (sub-centers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_ddp_losses.core import autograd_graph, inputs, lightning_compat, precision, torch_compat
from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.core.signature import Plans
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.fingerprint import WeightFingerprints
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.global_values import (
    UpstreamGradWatch,
    current_window,
    micro_batch_to_match,
    reduction_to_match,
    remember_global_value,
)
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.shard import ClassShard, as_dtensor, mesh_of_shards, tag_shard, tags_kept
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, InputError, expect
from lightning_ddp_losses.losses.class_heads import head_of, penalty_of, refuse_options, refuse_with_replicas
from lightning_ddp_losses.losses.element_losses import partial_sums_of
from lightning_ddp_losses.losses.global_batch_options import refuse_unfit
from lightning_ddp_losses.losses.kernels.choice import CompileTiles, chosen, option_of, serves, tile_compiler
from lightning_ddp_losses.losses.partial_fc import ClassSampler, SampledRowOptimizer
from lightning_ddp_losses.losses.partial_sums import global_loss, sums_of_all_rows
from lightning_ddp_losses.losses.plans.shards import NAMED, ShardPlan, described_sampling
from lightning_ddp_losses.losses.plans.signatures import kind_of, signature_of
from lightning_ddp_losses.losses.pml_registry import can_split, collects_counts, is_separable, reduction_of
from lightning_ddp_losses.losses.products.forms import (
    ProductChoice,
    aligned_columns,
    refuse_products,
    rounds_rows,
    tile_budget,
)
from lightning_ddp_losses.losses.products.operands import Operand
from lightning_ddp_losses.losses.sharded_softmax import ClassLogits, RowLosses, ShardedSoftmax
from lightning_ddp_losses.losses.sharded_weight import LocalClasses, ShardedWeight
from lightning_ddp_losses.losses.tile_compiler import TileCompiler
from lightning_ddp_losses.losses.tuples import GlobalTuples, miner_counts, miner_weights

_HELD_CLASSES = "held classes"  # key in a state dict's metadata
_CHUNK_BYTES = 2 << 20  # size of the logits of a chunk, so that they fit into the cache of a core
_MIN_CHUNK = 16  # classes
# initializations that depend on all classes together
_JOINT_INITS = (nn.init.orthogonal_, nn.init.eye_, nn.init.dirac_, nn.init.sparse_)


class _Undrawn(NamedTuple):
    """Passed instead of a loss instance if the weight has not been drawn yet.

    Attributes:
        template: A loss with all options and ``num_classes``, and the weight of one class.
        seed: Seed from which the weight will be drawn.
    """

    template: Any
    seed: int


class ClassShardedLoss(WithProcessGroup, nn.Module):
    """A loss with one weight row (or several) per class, each rank holding its own classes.

    Equivalent to: ``loss(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process that holds the whole
    weight, for pytorch-metric-learning's ArcFaceLoss, CosFaceLoss, SubCenterArcFaceLoss, LargeMarginSoftmaxLoss, SphereFaceLoss,
    NormalizedSoftmaxLoss, ProxyNCALoss and SoftTripleLoss. Margins are computed by PML, and gradients are propagated through them.

    The weight keeps its name and layout (``W`` (D, c K), ``fc``, ``proxies``). Ranks hold consecutive blocks of ``ceil(C / W)`` classes.
    If the loss is constructed before the process group exists, as in a LightningModule's ``__init__``, it is sharded later: by
    ``strategy="ddp_losses"``, or in the first call. In one process, only the chunked evaluation applies.

    Args:
        loss: An instance. Its weight is copied from the group's rank 0 and sliced. Use ``build`` to avoid holding the whole weight.
        chunk_size: Number of classes whose logits are in memory at a time. If None, as many as fit 2 MiB, on an accelerator 256 MiB.
        sample_rate: Below 1, each step uses the classes of the batch and random other classes, in total this fraction of the rank's
            classes (PartialFC's sampling). Rows that were not used, or whose gradient was removed, keep their weight and optimizer state.
            This requires an attached optimizer (``attach``, or the strategy). Its step count applies to the weight as a whole. On an
            accelerator, at least as many classes are used as the global batch has rows, since the host does not wait for the number of
            classes in the batch.
        unbiased: Weight the sampled negatives by the inverse of their probability.
        products: Form of the products of embeddings and weight, if logits are one number times cosines (ArcFace, CosFace, NormalizedSoftmax
            with one center per class), as in ``ClipLoss``. ``"float32"``. ``"bf16"``: on tensor cores, into float32. Embeddings and
            weight rows that are not bfloat16 are rounded by 2^-9, except for the targets' logits, and the gradient of a product as well.
            ``"bf16x2"``: the gradient of a product is rounded by 2^-17. ``"bf16x3"`` and ``"bf16x6"``: rows and gradients are rounded by
            2^-17, or not more than in float32. ``"auto"``: bf16 if both are bfloat16, otherwise float32. float64 stays float64.
            ``get_logits`` and ``predict`` are float32.
        compile_tiles: How to compute the elementwise part of a chunk of classes, if logits are cosines times numbers, with one center per
            class. ``"auto"``: hand-written kernels if every rank has an NVIDIA GPU and triton, and there are at least 2^24 logits on
            average per rank (not measured), otherwise torch's operators. False: torch's operators. True: ``torch.compile``. All ranks
            compile in the first call. If this fails on any rank, all ranks compute eagerly and a warning is issued. Use True for many
            classes on a GPU: ArcFace with 3 million classes took 105 ms instead of 170 ms with ``products="bf16"``, and 330 ms instead of
            351 ms without (NVIDIA H200, torch 2.11).
        name: Name among losses of its kind, as in ``GlobalBatchLoss``.
        group: Process group over which the classes are sharded. None is the world. With a subgroup (the ranks of a node), every subgroup
            holds all classes, the loss still covers the rows of all ranks, and the weight's gradient is averaged over its replicas.

    Attributes:
        loss: PML's loss without its weight, which is a parameter of this module.
        sampler: Draws the classes of a step. If None, all classes are used.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank. Logging it does not require ``sync_dist``.

    Gradient:
        The gradient of this rank's weight already covers the rows of all ranks and must not be averaged. The strategy excludes it. Outside
        Lightning, keep the loss out of ``DistributedDataParallel``. The encoder has the one-process gradient after DDP's mean.

    Communication:
        Handshake, gather of the embeddings (bfloat16 is sent unchanged), gather of 3 G numbers. In backward a handshake and one exchange
        of G x D in float32. No term depends on C. With replicas, additionally a handshake and a gather of the losses between them, and the
        mean of the weight's gradient.

    Raises:
        ConfigurationError: for a loss, regularizer or distance that cannot be sharded, more ranks than classes, or an invalid chunk size.
        InputError: on every rank, for labels out of range or a wrong width on any rank. For a batch on an accelerator, the range is
            checked immediately only in the first call, because this waits for the device. Later calls clamp labels out of range and
            report them one call later.
        RankMismatchError: on every rank, if configurations, dtypes or widths differ, or if all ranks hold the same rows.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import ArcFaceLoss
        >>> loss = ClassShardedLoss.build(ArcFaceLoss, num_classes=1000, embedding_size=8)
        >>> value = loss(torch.randn(4, 8), torch.tensor([0, 7, 99, 999]))
    """

    sees_global_batch = True
    loss: Any
    sampler: ClassSampler | None
    products: ProductChoice

    def __init__(
        self,
        loss: nn.Module,
        *,
        chunk_size: int | None = None,
        sample_rate: float = 1.0,
        unbiased: bool = False,
        products: ProductChoice = "float32",
        compile_tiles: CompileTiles = "auto",
        name: str | None = None,
        group: Group = None,
    ) -> None:
        inner: Any = loss
        seed: int | None = None
        if isinstance(inner, _Undrawn):
            inner, seed = inner
        head = head_of(inner)
        penalty = penalty_of(inner, head.per_class)
        refuse_unfit(inner)
        super().__init__()
        weight: Tensor = getattr(inner, head.weight_name).detach()
        full_shape = list(weight.shape)
        if seed is not None:
            full_shape[head.class_dim] = inner.num_classes * head.per_class
            weight = weight.narrow(head.class_dim, 0, 0)
        # the loss without its weight, and this rank's classes of the weight
        self.loss = torch_compat.without_parameter(inner, head.weight_name)
        self._head = head_of(self.loss)
        self._penalty = penalty
        self._sharded = ShardedWeight(self._title, head, full_shape, seed=seed)
        self.register_parameter(head.weight_name, self._sharded.parameter(weight))
        # options
        refuse_options(self.num_classes, chunk_size, sample_rate, is_regularized=penalty is not None)
        refuse_products(self._title, products)
        expect(
            products in ("float32", "auto") or self._head.is_one_product,
            f"{self._title}: products",
            expected="'float32' or 'auto', since the logits of this loss are not one number times cosines",
            got=repr(products),
            fix="Leave `products` out.",
        )
        self.products, self.chunk_size = products, chunk_size
        self._compiler = tile_compiler(self._title, compile_tiles)
        self.set_group(group, self._title, name)
        self._replica_group: Group = None
        # sampled negatives
        self.sampler = ClassSampler(sample_rate, unbiased) if sample_rate < 1 else None
        self._row_optimizer: SampledRowOptimizer | None = None
        # compared between ranks
        self._configuration = Configuration()
        self._upstream_grads = UpstreamGradWatch()
        self._weights = WeightFingerprints(wanted=True)
        self.value_reading = inputs.ValueReading()
        self._plans: Plans[ShardPlan] = Plans()
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
        products: ProductChoice = "float32",
        compile_tiles: CompileTiles = "auto",
        seed: int | None = None,
        name: str | None = None,
        group: Group = None,
        **options: Any,
    ) -> ClassShardedLoss:
        """Construct the loss from its class, without ever holding the whole weight.

        Args:
            loss_class: One of the supported classes.
            num_classes: C.
            embedding_size: D.
            chunk_size: Option of the constructor.
            sample_rate: Option of the constructor.
            unbiased: Option of the constructor.
            products: Option of the constructor.
            compile_tiles: Option of the constructor.
            seed: Seed of the initial weight, which does not depend on the number of ranks. If None, the seed is drawn from torch's
                generator on rank 0.
            name: Option of the constructor.
            group: Option of the constructor.
            **options: Options of the loss class (``margin``, ``scale``, ``weight_init_func``, ...).
        """
        # an instance with all options and a minimal weight
        try:
            template: Any = loss_class(num_classes=1, embedding_size=embedding_size, **options)
            head_of(template)
        except (TypeError, AttributeError) as error:
            shown = getattr(loss_class, "__name__", loss_class)
            raise ConfigurationError(
                f"ClassShardedLoss.build({shown}): {error}", fix="Pass the options of this class by name."
            ) from None
        template.num_classes = num_classes
        init = getattr(template.weight_init_func, "init_func", template.weight_init_func)
        expect(
            init not in _JOINT_INITS,
            f"ClassShardedLoss.build({type(template).__name__}): weight_init_func",
            expected="one that draws each class by itself",
            got=getattr(init, "__name__", repr(init)),
            fix="Give ClassShardedLoss an instance of the loss, whose weight is sliced.",
        )
        if seed is None:
            seed = int(torch.randint(1 << 62, ()))
        return cls(
            _Undrawn(template, seed),  # type: ignore[arg-type]
            chunk_size=chunk_size,
            sample_rate=sample_rate,
            unbiased=unbiased,
            products=products,
            compile_tiles=compile_tiles,
            name=name,
            group=group,
        )

    @property
    def weight(self) -> nn.Parameter:
        """The weight of this rank's classes, in the loss's layout."""
        parameter: nn.Parameter = getattr(self, self._sharded.name)
        return parameter

    @property
    def shard(self) -> ClassShard:
        """The classes that this rank holds."""
        return self._sharded.shard

    @property
    def num_classes(self) -> int:
        """C."""
        return self._sharded.num_classes

    def extra_repr(self) -> str:
        """Return this rank's classes."""
        return f"classes {self.shard.start} to {self.shard.stop} of {self.num_classes}, products={self.products}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClassShardedLoss:
        # moving the module may create a new parameter. Without the tag, its gradient would be averaged
        with tags_kept(self):
            return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    @cached_property
    def _title(self) -> str:
        return f"ClassShardedLoss({type(self.loss).__name__})"

    # ------------------------------------------------------------------ forward

    @eager_recursive
    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
        """Return the global loss.

        Args:
            embeddings: (B, D). Half precision is computed in float32.
            labels: (B,), integers from 0 to C - 1.
            indices_tuple: A miner's pairs or triplets of local rows. They determine weights of the rows, as in PML.
        """
        try:
            self.shard_classes()
            inputs.refuse_capture(self._title)
            # 1. the rules of calls like this one
            plan, parameters = self._plan_of(embeddings, labels, indices_tuple)
            # 2. values of this call
            labels = self._checked_labels(embeddings, labels)
            # 3. the loss over all ranks
            value = self._in_full_precision(plan, parameters, embeddings, labels, indices_tuple)
        except Exception as error:
            self._raise_on_all_ranks(error)
        finally:
            self._configuration.follow(self.loss)
        remember_global_value(value, self._title)
        watched: Tensor = self._upstream_grads.watch(value, group=self._group)
        return watched

    def _plan_of(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any) -> tuple[ShardPlan, list[Tensor]]:
        """Return the rules of a call and the loss's parameters. Reject invalid arguments."""
        parameters = precision.parameters_of(self)
        sampling = described_sampling(self._training_sampler())
        arguments = [kind_of(embeddings), kind_of(labels), type(indices_tuple), self.products, sampling]
        signature = signature_of(arguments, parameters)
        plan = self._plans.get(signature)
        if plan is None:
            title = self._title
            inputs.check_embeddings(title, embeddings, self._sharded.embedding_size)
            inputs.check_devices(title, {"embeddings": embeddings, "labels": labels}, parameters)
            rows, num_classes = embeddings.shape[0], self._sharded.num_classes
            inputs.check_labels(title, labels, rows, num_classes, read_values=False)
            must_match: dict[str, object] = {"classes": num_classes, "sampling": sampling}
            if option_of(self._compiler) is True:
                must_match["compile_tiles"] = True
            given = embeddings, labels, indices_tuple
            plan = ShardPlan.of(title, self, self._head, self.products, given, parameters, must_match)
            self._plans.add(signature, plan)
        return plan, parameters

    def _in_full_precision(
        self, plan: ShardPlan, parameters: list[Tensor], embeddings: Tensor, labels: Tensor, indices_tuple: Any
    ) -> Tensor:
        """Compute the global loss with autocast off, with every trainable parameter in its graph."""
        if not plan.is_full:
            forward = partial(self._global_loss, plan)
            result: Tensor = autograd_graph.run_full_precision(self, forward, (embeddings, labels, indices_tuple), {})
            return result
        value = self._global_loss(plan, embeddings, labels, indices_tuple)
        if plan.trained:
            # if a reducer selects no row, the weight is not in the graph
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            value = autograd_graph.attach_zero_grad(value, trainable, [embeddings])
        return value

    def _global_loss(self, plan: ShardPlan, embeddings: Tensor, labels: Tensor, indices_tuple: Any) -> Tensor:
        # 1. rows of all ranks of the group. Options are read first, before the call changes the loss
        configuration = self._read_configuration()
        labels = labels.to(torch.int64)
        sampler = self._training_sampler()
        batch = self._gather(plan, embeddings, labels, indices_tuple, configuration)
        global_embeddings, global_labels, *named = batch.tensors
        if isinstance(indices_tuple, GlobalTuples):
            # tuples mined over all ranks also contain rows of the other subgroups
            rows_of_ranks = dict(zip(process_groups.members(self._group), batch.counts[0], strict=True))
            times_named = self._times_named(indices_tuple, indices_tuple.rows)
            named = [indices_tuple.counts_of(times_named, rows_of_ranks, self._title)]
        # 2. each row's loss over the classes of all ranks
        rows = self._head.prepare(global_embeddings)
        compiler = self._compiler_of_call(batch, sampler) if self._head.is_cosine else None
        softmax = self._softmax(plan, sampler, global_labels, global_embeddings, compiler)
        if compiler is not None:
            softmax.rehearse(self._title, rows)
            if compiler.has_failed:
                softmax = softmax._replace(compiler=None)
        found = softmax.row_losses(rows, self._sharded.rows(self.weight))
        if found.angle_sum is not None and hasattr(self.loss, "avg_angle"):
            self.loss.avg_angle = float(found.angle_sum) / max(len(global_embeddings), 1)
        # 3. rows of the other subgroups. Each subgroup has all classes
        losses = found.losses
        if self._replica_group is not None:
            batches = {"losses": losses, "labels": global_labels}
            if named:
                batches[NAMED] = named[0]
            title = f"{self._title}: replicas"
            weights = self._weights.take([self.weight.data], self._replica_group)
            must_match = {"which": self._instance, "configuration": configuration, "weights": weights}
            try:
                world = gather_batch(title, batches, must_match, backward="own_slice", group=self._replica_group)
            except DDPLossError as error:
                handshake.note_on(error, collective=False)  # the other ranks of this subgroup have not received it
                raise
            losses, global_labels, *named = world.tensors
        # 4. weights of the rows that a miner selected
        if named and len(losses):
            losses = losses * miner_weights(named[0], losses.dtype)
        # 5. one number
        return self._reduce(losses, found, global_embeddings, global_labels)

    def _gather(
        self, plan: ShardPlan, embeddings: Tensor, labels: Tensor, indices_tuple: Any, configuration: str
    ) -> GatheredBatch:
        """Return the rows of all ranks, after checking that settings are equal and shards differ."""
        batches = {"embeddings": embeddings, "labels": labels}
        if indices_tuple is not None and not isinstance(indices_tuple, GlobalTuples):
            batches[NAMED] = self._times_named(indices_tuple, len(labels))
        must_match: dict[str, object] = {
            "which": self._instance,
            "configuration": configuration,
            "coefficient of the last backward": self._upstream_grads.take(),
            **micro_batch_to_match(),
            **reduction_to_match(),
        }
        dtype = torch.promote_types(self.weight.dtype, embeddings.dtype)
        has_kernels = serves(self._compiler, dtype, embeddings.device)
        extra = bytes([has_kernels]) + self._sharded.fingerprint(self.weight)
        batch = gather_batch(
            plan.layout, batches, must_match, extra=extra, given_dtype=plan.given_dtype, group=self._group
        )
        self._sharded.refuse_equal_shards([sent[1:] for sent in batch.extras])
        return batch

    def _compiler_of_call(self, batch: GatheredBatch, sampler: ClassSampler | None) -> TileCompiler | None:
        """Return what computes the chunks of a call, equal on all ranks, or None for torch's operators."""
        classes = self._sharded.num_classes / len(batch.extras)
        if sampler is not None:
            classes *= sampler.rate
        entries = int(len(batch.tensors[0]) * classes)
        return chosen(self._compiler, all(sent[0] for sent in batch.extras), entries)

    def _read_configuration(self) -> str:
        """Return the loss's configuration, or an empty string if there is only one rank."""
        return self._configuration.read(self.loss) if process_groups.world_size() > 1 else ""

    def _raise_on_all_ranks(self, error: Exception) -> NoReturn:
        """Raise the error of one rank, or of one subgroup, on every rank. Errors that all ranks raise are raised unchanged."""
        try:
            handshake.raise_on_all_ranks(error, self._title, group=self._group)
        except Exception as raised:
            replicas = self._replica_group
            if replicas is None or handshake.was_reported_in(
                process_groups.internal_groups(replicas).handshakes, raised
            ):
                raise
            # all ranks of this subgroup have the error. The other subgroups are waiting for their replicas
            handshake.note_on(raised, collective=False)
            handshake.raise_on_all_ranks(raised, self._title, group=replicas)

    def _times_named(self, indices_tuple: Any, rows: int) -> Tensor:
        """Return how often a miner selected each row."""
        return miner_counts(indices_tuple, rows, only_anchors=self._head.counts_only_anchors, title=self._title)

    def _softmax(
        self,
        plan: ShardPlan,
        sampler: ClassSampler | None,
        labels: Tensor,
        embeddings: Tensor,
        compiler: TileCompiler | None,
    ) -> ShardedSoftmax:
        """Choose the classes that a call uses: all classes, or sampled classes."""
        shard = self._sharded.shard
        rows = sampled = log_weight = gradient = None
        number = shard.stop - shard.start
        # labels as positions among this rank's classes, or among the sampled classes
        positions = labels - shard.start if shard.start else labels
        penalty = self._penalty
        if sampler is not None:
            sampled, positions, log_weight = sampler.draw_next(positions, shard, embeddings.dtype)
            number = len(sampled)
            gradient = partial(sampler.gradient.add_, weight=self.weight, shard=shard)
            penalty = None
        classes = LocalClasses(
            positions,
            number,
            self._chunk(embeddings.shape[0], embeddings.element_size(), embeddings.device),
            self._head.per_class,
            sampled,
            log_weight,
            has_all=self._sharded.world_size == 1,
        )
        if rounds_rows(plan.form):
            rows = Operand.prepare(embeddings, plan.form, normalize=self.loss.distance.normalize_embeddings)
        groups = self._group, self._replica_group
        return ShardedSoftmax(self._head, classes, penalty, *groups, plan.form, rows, compiler, gradient)

    def _chunk(self, rows: int, element_bytes: int, device: torch.device) -> int:
        class_bytes = max(rows, 1) * element_bytes * self._head.per_class
        return self.chunk_size or aligned_columns(max(_MIN_CHUNK, tile_budget(device, _CHUNK_BYTES) // class_bytes))

    def _reduce(self, losses: Tensor, found: RowLosses, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Apply PML's reducer to the losses of all rows, which every rank holds, and add its regularizers."""
        indices = torch.arange(len(losses), device=losses.device)
        of_rows: dict[str, Any] = {"losses": losses, "indices": indices, "reduction_type": "element"}
        reducer, in_window = self.loss.reducer, current_window() is not None and is_separable(self.loss, "elements")
        # the mean over zero rows is NaN, but a sum without terms is 0
        has_rows = len(losses) > 0
        by_sums = in_window or not has_rows
        if has_rows and self._head.drops_improbable_rows:
            kept = torch.exp(-losses.detach()) != 0
            # selecting rows on an accelerator would wait for their number
            if losses.device.type != "cpu" and can_split(reducer) and not collects_counts(self.loss):
                of_rows["kept"], by_sums = kept, True
            else:
                of_rows |= {"losses": losses[kept], "indices": indices[kept]}
        sub_losses = {"loss": of_rows}
        if self._penalty is not None and found.penalty is not None and found.penalty_divisor is not None:
            value = self._penalty.value(found.penalty, found.penalty_divisor)
            sub_losses["weight_reg_loss"] = {"losses": value, "indices": None, "reduction_type": "already_reduced"}
        if has_rows:
            self.loss.add_embedding_regularization_to_loss_dict(sub_losses, embeddings)
        if not by_sums:
            return reducer(sub_losses, embeddings, labels)  # type: ignore[no-any-return]
        # compute sums and divisors instead, which an accumulation window adds up. Every rank has all rows, as if there were one rank
        sums = sums_of_all_rows(partial_sums_of(reducer, sub_losses, embeddings, labels), embeddings)
        if in_window:
            return global_loss(sums, window_source=(self, self._title), group=self._group)
        # over improbable rows only, PML's mean is NaN, and the result of a reducer that selects elements is 0
        reduction = reduction_of(reducer)
        selects = reduction is not None and reduction.selects
        return global_loss(sums, empty=0.0 if selects or not has_rows else math.nan)

    # ------------------------------------------------------------------ refused inputs

    def _checked_labels(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Reject labels out of range and sampling without an attached optimizer, and return the labels."""
        read_values = self.value_reading.next_call(filter(torch.is_tensor, (embeddings, labels)))
        self.value_reading.raise_late()
        num_classes = self._sharded.num_classes
        inputs.check_labels(self._title, labels, embeddings.shape[0], num_classes, read_values=read_values)
        if self.sampler is not None and torch.is_grad_enabled() and self._row_optimizer is None:
            raise ConfigurationError(
                f"{self._title}: sample_rate",
                expected="an optimizer that steps only the sampled rows",
                got="none attached",
                fix="Call loss.attach(optimizer) once, or train with strategy='ddp_losses', which does it.",
            )
        return labels if read_values else self.value_reading.clamp_labels(self._title, labels, num_classes)

    # ------------------------------------------------------------------ sharding, loading, saving

    def shard_classes(self) -> None:
        """Shard the weight over the ranks of the group, or draw it, unless this has been done. All ranks of the group must call it.

        Communication: one handshake, and a broadcast of the whole weight if the loss was constructed from an instance.
        """
        sharded = self._sharded
        world = process_groups.world_size(self._group)
        if sharded.world_size == world:
            return
        # the same loss everywhere
        seed = sharded.agree_on_seed(Configuration().read(self.loss), self._group)
        # the same options in all subgroups, if there are several
        replica_group = process_groups.replica_group(self._group)
        if replica_group is not self._group:
            refuse_with_replicas(self._title, self.loss, self.sampler)
            self._replica_group = replica_group
        # this rank's classes. If there are several subgroups, the weight of the first one is used
        sharded.shard_(self.weight, self.loss.weight_init_func, seed, self._group)
        if self._replica_group is not None:
            raw_collectives.broadcast_([self.weight.data], group=self._replica_group)

    def refuse_equal_shards(self) -> None:
        """Reject classes that have been overwritten by a broadcast, including since the last call.

        Raises:
            RankMismatchError: on every rank of the group.

        Communication: one handshake.
        """
        if self._sharded.world_size < 2:
            return
        own = self._sharded.fingerprint(self.weight, at_once=True)
        everyone = handshake.all_gather(f"{self._title}: classes", {}, own, group=self._group)
        self._sharded.refuse_equal_shards(everyone)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        """Load the whole weight and keep this rank's part, or load only this rank's part."""
        self.shard_classes()
        key = prefix + self._sharded.name
        given = state_dict.get(key)
        if isinstance(given, Tensor):
            part = self._sharded.local_part(given, key, self.weight.shape, local_metadata.get(_HELD_CLASSES))
            state_dict = {**state_dict, key: part}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        tag_shard(self.weight, self.shard)  # assign=True replaces the parameter

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        is_drawn = self._sharded.world_size > 0 or self.shard.classes > 0
        if not is_drawn:
            self.shard_classes()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # stored next to the version, so that other ranks do not load it as their part
        held = (self.shard.start, self.shard.stop, self.num_classes)
        torch_compat.state_dict_metadata(destination, prefix)[_HELD_CLASSES] = held

    def weight_as_dtensor(self, mesh: DeviceMesh | None = None) -> DTensor:
        """Return this rank's classes as its part of a ``DTensor``, for torch's tools: ``distributed.checkpoint``, ``clip_grad_norm_``.

        It shares the memory of the weight, and its ``grad`` shares the memory of the weight's gradient if there is one. Loading or scaling
        it therefore loads or scales the loss's weight. Call this again after a step, which may have created a new gradient tensor.

        Args:
            mesh: Mesh of the ranks over which the classes are divided, in order, such as ``device_mesh["data_parallel"]``. If these ranks
                are a subgroup, the mesh may have two dimensions: replicas and ranks of a subgroup. If None, a mesh is created.

        Returns:
            (C, D), or (C, K, D) for K weight rows per class, ``Shard(0)`` for any layout of the loss's weight.

        Raises:
            ConfigurationError: without a process group.
            InputError: on every rank, for a mesh of different ranks.

        Communication: one handshake of the world. Every rank must call it.
        """
        self.shard_classes()
        weight, rows = self.weight, self._sharded.rows
        mesh = mesh_of_shards(self._title, mesh, weight.device.type, self._group)
        found = as_dtensor(rows(weight), self.shard, mesh)
        if weight.grad is not None:
            found.grad = as_dtensor(rows(weight.grad), self.shard, mesh)
        return found

    # ------------------------------------------------------------------ sampled negatives

    def attach(self, optimizer: Any) -> None:
        """Make an optimizer step only the rows that were used, as required with ``sample_rate`` below 1."""
        inner = lightning_compat.unwrapped_optimizer(optimizer)
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        if self.sampler is None or all(parameter is not self.weight for parameter in parameters):
            return
        if self._row_optimizer is None or self._row_optimizer.optimizer() is not inner:
            self._row_optimizer = SampledRowOptimizer(self.weight, self.sampler.gradient, inner)

    def _training_sampler(self) -> ClassSampler | None:
        # validation uses all classes
        return self.sampler if torch.is_grad_enabled() else None

    # ------------------------------------------------------------------ logits and best classes, without gradient

    @torch.no_grad()
    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Return the logits of all classes, like the loss's ``get_logits``. Intended for few classes or few rows.

        Args:
            embeddings: (B, D).

        Returns:
            (B, C), for this rank's rows.

        Communication: handshake, gather of the embeddings, one exchange of G x c logits. Every rank must call it.
        """
        return self._class_logits(embeddings).of_all_classes()

    @torch.no_grad()
    def predict(self, embeddings: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Return the k most likely classes of each row, best first.

        Args:
            embeddings: (B, D).
            k: Number of classes, at most C, equal on every rank.

        Returns:
            Their logits (B, k) and their labels (B, k), for this rank's rows.

        Communication: handshake, gather of the embeddings, two exchanges of G x k numbers. Every rank must call it.
        """
        return self._class_logits(embeddings, k).best(k)

    def _class_logits(self, embeddings: Tensor, k: int | None = None) -> ClassLogits:
        """Gather the embeddings of all ranks, to compute their logits for this rank's classes. ``k`` must be equal on all ranks."""
        with handshake.raising_on_all_ranks(self._title, group=self._group):
            is_number = k is None or (isinstance(k, int) and 1 <= k <= self.num_classes)
            expect(is_number, f"{self._title}: k", expected=f"1 to {self.num_classes}", got=repr(k), error=InputError)
            self.shard_classes()
            inputs.refuse_capture(self._title)
            inputs.check_embeddings(self._title, embeddings, self._sharded.embedding_size)
            inputs.check_devices(self._title, {"embeddings": embeddings}, [self.weight])
        dtype = precision.compute_dtype([embeddings, self.weight])
        batches = {"embeddings": embeddings.to(dtype)}
        given_dtype = precision.narrow_dtype([embeddings])
        batch = gather_batch(f"{self._title}: logits", batches, {"k": k}, given_dtype=given_dtype, group=self._group)
        rows = batch.tensors[0]
        chunk = self._chunk(len(rows), rows.element_size(), rows.device)
        weight = self._sharded.rows(self.weight)
        return ClassLogits(self._head, self._sharded, weight, rows, batch.counts[0], chunk, self._group)
