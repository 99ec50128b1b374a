"""`GlobalBatchLoss` and `GlobalBatchMiner`: any loss or miner, as if called on the concatenated global batch, with the exact gradient.

Each call is validated, and then evaluated by a method that is exact for it (``evaluations``).

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``D`` embedding size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pytorch_metric_learning.losses import CrossBatchMemory
from pytorch_metric_learning.miners import BaseMiner
from torch import Tensor, nn

from lightning_ddp_losses.core import inputs, precision, torch_compat
from lightning_ddp_losses.core.autograd_graph import FullPrecisionPlan
from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.core.function_loss import UNFINISHED, as_module, name_of_loss, unfinished_error
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.core.signature import Plans, Signature
from lightning_ddp_losses.core.transparent import TransparentWrapper, wrapped_module
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import Backward
from lightning_ddp_losses.distributed.fingerprint import WeightFingerprints
from lightning_ddp_losses.distributed.gathered_batch import BackwardChoice, BatchLayout, GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.global_values import (
    UpstreamGradWatch,
    micro_batch_to_match,
    reduction_to_match,
    remember_global_value,
    with_scaled_gradient,
)
from lightning_ddp_losses.distributed.messages import Agreement
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.losses import gathered_call, pml_registry
from lightning_ddp_losses.losses.evaluations import by_elements, by_moments, by_rows, replicated
from lightning_ddp_losses.losses.formulas.global_rows import open_rows, run_on_rows
from lightning_ddp_losses.losses.gathered_call import (
    ArgumentRules,
    CallBatches,
    PMLCall,
    SeedCounter,
    TensorCall,
    same_draws,
)
from lightning_ddp_losses.losses.global_batch_options import not_exact, refuse_options
from lightning_ddp_losses.losses.kernels.choice import CompileTiles, chosen, option_of, serves, tile_compiler
from lightning_ddp_losses.losses.partial_sums import SumExchange
from lightning_ddp_losses.losses.plans.global_batch import CallPlan, LossPlan, LossPlans, MinerPlan, exact_modes
from lightning_ddp_losses.losses.plans.sample_layout import SampleLayout
from lightning_ddp_losses.losses.pml_registry import PML_NAMES, Mode, labelled_loss
from lightning_ddp_losses.losses.products.forms import ProductChoice, choose_form
from lightning_ddp_losses.losses.replicated_value import ReplicatedValue
from lightning_ddp_losses.losses.tile_compiler import TileCompiler
from lightning_ddp_losses.losses.tiled import TiledCall, TiledPlan, tiled_plan
from lightning_ddp_losses.losses.tuples import GlobalTuples

_POSITION = "queue_position.position"  # key in a state dict
_WATCHED_CALLS = 3  # number of first calls that check for labels which each rank has numbered separately


class PreparedCall(NamedTuple):
    """One call whose arguments were checked on this rank.

    Attributes:
        args: Positional arguments, in the dtype of the computation when the evaluation runs.
        kwargs: Keyword arguments.
        rules: Rules for all calls of the loss.
        plan: Rules for the calls with this signature.
        must_match: Values of this call that must be equal on all ranks.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rules: LossPlan
    plan: CallPlan
    must_match: dict[str, object]


class GlobalBatchLoss(WithProcessGroup, TransparentWrapper):
    """A loss over the rows of all ranks.

    Equivalent to: ``loss(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process.

    Args:
        loss: Any loss module from pytorch-metric-learning (PML), lightly, torch.nn or your own code. Or a function of tensors, written for
            one process, such as a batch Dice or a covariance.
        mode: ``"replicated"``: gather all rows, and compute the full loss on every rank. Exact for every deterministic loss.
            ``"rows"``: for PML losses that are a sum over anchors, each rank evaluates its own anchors against all rows. For all other
            losses, rows stay on their rank and sums are exchanged, operator by operator (``global_rows``).
            ``"elements"``: for losses that are a sum over samples, no rows are gathered. ``"moments"``: for lightly's
            ``BarlowTwinsLoss`` and ``VICRegLoss``, sums of D x D products are exchanged. ``"auto"``: the cheapest mode that is exact for
            this loss and call. PML losses then use ``rows`` from a few dozen or hundred global rows on, and compute smaller batches in
            full. Functions use ``rows``. Other modules use ``replicated``, which takes the fewest exchanges and supports any state that a
            module keeps between calls. ``"rows"`` pays off for large rows with few sums, such as images for a Dice.
        backward: Use ``"own_slice"`` if every rank multiplies the returned loss by the same factor; otherwise gradients are wrong.
            With ``"sum"``, factors may differ between ranks, at the cost of a collective in backward.
        batch_dims: Dimension of the samples, by argument position or name, for losses that are not from PML (default 0). None marks a
            tensor that is not a batch.
        views: Number of views in the rows of the first argument, or of each argument by position or name, for losses that are not from
            PML and that pair rows by index: rows are ``torch.cat`` of the views, (views * B, ...).
        tile_bytes: Maximum size in bytes of one tile of distances in ``rows``. If None, a size that is fast on the device. Rows are
            evaluated in tiles, and again in backward, so memory grows linearly with G. If None, a call on the CPU whose ``evaluation``
            is "tiled, symmetric" keeps up to 8 MiB of tiles until backward, which does not evaluate them again.
        gather: ``"all"``: every rank holds all rows. The two-tower losses also support ``"ring"``.
        compile_tiles: How to compute the elementwise part of a tile (in ``rows``, without a miner's tuples or smooth triplets). ``"auto"``:
            hand-written kernels for SupCon, NTXent (if its reducer has no limits), MultiSimilarity and Contrastive losses if every rank
            has an NVIDIA GPU and triton, and there are at least 2^24 pairs on average per rank (not measured), otherwise torch's
            operators, also for TripletMargin, which sorts rows, and for reducers that collect statistics. False: torch's operators. True:
            ``torch.compile``. All ranks compile in the first call. If this fails on any rank, all ranks compute eagerly and a warning is
            issued. With True, SupCon with 65,536 rows took 344 ms and 769 MiB instead of 380 ms and 1,286 MiB, and 1.2 times as long with
            1,024 rows (NVIDIA H200, torch 2.11, float32).
        products: Form of the products of rows in tiles that compare by a product (cosine similarity, dot product), as in ``ClipLoss``:
            ``"float32"``, ``"bf16"``, ``"bf16x2"``, ``"bf16x3"``, ``"bf16x6"`` or ``"auto"``. Everything that is not evaluated in tiles
            (such as few rows) is float32.
        name: Name that distinguishes this loss from others of its kind, which every rank must call in the same order. If None, the path in
            the module that a strategy trains, otherwise the order of construction.
        check_weights: Compare the loss's weights between the ranks, one sixteenth of them in each call. Place the loss inside the module
            wrapped by ``DistributedDataParallel``, or wrap it separately. In ``replicated``, also compare the value of the previous call.
            Use ``False`` if ranks average weights only every few steps.
        group: Process group. None is the world. In a subgroup, a missing rank is detected only after the group's timeout.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank, unscaled. Logging it does not require ``sync_dist``.

    Names:
        Parameters, buffers, state dict keys and public attributes (``loss.W``) have the same names as in ``loss``. Checkpoints and
        optimizer states can therefore be exchanged with the plain loss in both directions. Files of earlier versions (``loss.loss.W``) can
        also be loaded. ``wrapped`` is the loss itself, with its methods. A ``CrossBatchMemory`` has one additional key,
        ``queue_position.position``.

    Gradient:
        After DDP's mean over ranks, every parameter (of encoder and loss) has the one-process gradient. Outside Lightning, wrap a loss
        with weights in the same way as the model: ``DistributedDataParallel(GlobalBatchLoss(loss))``. Second derivatives over several
        ranks raise an error. An embedding that is NaN makes the gradients of all rows NaN, as in one process. In tiles the value is NaN,
        too, where a reducer of PML leaves NaN out (it compares false) and returns the mean of the remaining pairs or triplets.

    Communication:
        ``elements``: 1 handshake. ``replicated``: handshake + gather, none in backward. ``rows``: handshake + gather + handshake. In
        backward none if ``evaluation`` is symmetric and the call has only labels, otherwise handshake + exchange. Rows of bfloat16 and
        float16 are sent in their dtype, gradients as float32. On the CPU, small amounts of data (``handshake.inline_capacity``) do not
        take a gather or an exchange, because they are sent in the handshake from the second call on. On an accelerator, sums and
        statistics are not sent in the handshake and take one more gather (two if symmetric). The host waits once per call if it has to
        read the pairs: for a matrix of pairs over 64 MiB, smooth triplets and row tiles. It waits up to five times for a miner's tuples,
        and for the statistics of ``collect_stats``.

    Raises:
        ConfigurationError: for a mode that is not exact for the loss, or a reduction that cannot be made global.
        InputError: on every rank, for embeddings of a wrong width or labels out of range on any rank. For a batch on an accelerator,
            from the second call on, it is raised one call later and names the failing call (such labels are clamped, which avoids a
            device error).
        RankMismatchError: on every rank, if widths, dtypes, arguments or options set from outside differ in any call. State that the
            loss's own forward changes may differ.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import SupConLoss
        >>> loss = GlobalBatchLoss(SupConLoss())
        >>> value = loss(torch.randn(4, 8), torch.tensor([0, 0, 1, 1]))
    """

    sees_global_batch = True
    old_name = "loss"
    loss: nn.Module  # the wrapped loss, or its attribute ``loss`` if it has one

    def __init__(
        self,
        loss: nn.Module | Callable[..., Any],
        *,
        mode: Literal["auto", "replicated", "rows", "elements", "moments"] = "auto",
        backward: Backward = "own_slice",
        batch_dims: Mapping[int | str, int | None] | None = None,
        views: int | Mapping[int | str, int] | None = None,
        tile_bytes: int | None = None,
        gather: Literal["all"] = "all",
        compile_tiles: CompileTiles = "auto",
        products: ProductChoice = "auto",
        name: str | None = None,
        check_weights: bool = True,
        group: Group = None,
    ) -> None:
        super().__init__()
        module = as_module(loss)
        refuse_options(module, mode=mode, backward=backward, tile_bytes=tile_bytes, gather=gather, products=products)
        title = f"GlobalBatchLoss({name_of_loss(module)})"
        # how the loss is configured
        self.mode = mode
        self.backward = backward
        self._layout_options = batch_dims, views
        self.layout = SampleLayout.of(module, batch_dims, views, title)
        self.tile_bytes = tile_bytes
        self._tile_compiler = tile_compiler(title, compile_tiles)
        self.products = products
        self.set_group(group, title, name)
        # state of the calls
        self._plans = LossPlans()
        self._seeds = SeedCounter()
        self._warned = False
        self._upstream_grad = UpstreamGradWatch()
        self._weights = WeightFingerprints(wanted=check_weights)
        self._replicated_value = ReplicatedValue(wanted=check_weights)
        self.value_reading = inputs.ValueReading()
        # must be last: modules and parameters registered from here on are those of the loss
        self.wrap_(module)

    def wrap_(self, module: nn.Module) -> None:
        """Take a loss, at construction or in place of the one before."""
        if wrapped_module(self) is not None:
            refuse_options(
                module,
                mode=self.mode,
                backward=self.backward,
                tile_bytes=self.tile_bytes,
                gather="all",
                products=self.products,
            )
            self.layout = SampleLayout.of(module, *self._layout_options, f"GlobalBatchLoss({name_of_loss(module)})")
        memories = [each for each in module.modules() if isinstance(each, CrossBatchMemory)]
        self.queue_position = QueuePosition(memories) if memories else None
        super().wrap_(module)

    @property
    def batch_dims(self) -> Mapping[int | str, int | None]:
        """Dimension of the samples, by argument."""
        return self.layout.batch_dims

    @property
    def compile_tiles(self) -> CompileTiles:
        """Option of the constructor."""
        return option_of(self._tile_compiler)

    def extra_repr(self) -> str:
        """Show the wrapped loss, the mode in use, and how rows are evaluated."""
        mode = self._chosen_mode(self.exact_modes())
        if mode == "rows" and pml_registry.is_pml_loss(self.wrapped):
            mode = f"rows, {self.evaluation}"
        return f"{name_of_loss(self.wrapped)}, mode={self.mode!r} ({mode})"

    @property
    def evaluation(self) -> Literal["tiled, symmetric", "tiled", "row tiles"]:
        """How ``mode="rows"`` evaluates the loss in its current configuration. The evaluations have equal values and differ in memory.

        ``"tiled, symmetric"``: our own tiles, without a collective in backward if the rows of one batch are compared without index tuples.
        ``"tiled"``: our own tiles, with a collective in backward. ``"row tiles"``: pytorch-metric-learning's formula on a few anchors at a
        time.
        """
        plan = tiled_plan(labelled_loss(self.wrapped))
        if plan is None:
            return "row tiles"
        symmetric = plan.symmetric and not pml_registry.compares_one_way(self.wrapped)
        return "tiled, symmetric" if symmetric else "tiled"

    def exact_modes(self) -> tuple[Mode, ...]:
        """Return the modes that are exact for this loss in its current configuration, cheapest first."""
        return exact_modes(self.wrapped, self.backward)

    def _chosen_mode(self, modes: tuple[Mode, ...]) -> Any:
        """Return the mode in use, given the exact modes. Views are gathered, so that the global rows are again consecutive views."""
        if self.mode != "auto":
            return self.mode
        needs_views = self.layout.has_views() and "replicated" in modes
        return "replicated" if needs_views else modes[0]

    @property
    def plan(self) -> LossPlan:
        """Rules for all calls, determined by the class and options of the loss. Use ``print(loss.plan)`` to display them."""
        if self._plans.configuration.is_read:
            return self._current_rules()
        # a separate object, so that the configuration that ranks compare is read only by their first call
        configuration = Configuration()
        text = configuration.read(self.wrapped)
        return LossPlan.of(self.wrapped, self.backward, text, configuration.unread)

    @eager_recursive
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the global loss.

        Args:
            args: Arguments of the loss. PML losses take embeddings (B, D), labels (B,) or None, indices_tuple (local or from
                ``GlobalBatchMiner``), ref_emb, ref_labels, enqueue_mask. If labels are None and ``ref_emb`` is given, each row has a
                different label, unique over all ranks (``DynamicSoftMarginLoss`` and ``VICRegLoss`` pair row i of both without labels).
                PML's ``SelfSupervisedLoss`` takes two views, (B, D) each. Other losses take their usual arguments, where tensors are
                batches along dim 0, except for 0-dim tensors.
            kwargs: The same arguments by name.
        """
        with handshake.raising_on_all_ranks(self._title, group=self._group):
            inputs.refuse_capture(self._title)
            if not args and not kwargs:
                fix = "Call it with the rows of this rank."
                raise InputError(self._title, expected="arguments of the loss", got="none", fix=fix)
            self.value_reading.raise_late()
            # 1. rules that depend only on the signature of the call, determined once
            rules = self._current_rules()
            parameters, buffers = self._plans.configuration.weights()
            signature, tensors = Signature.of(args, kwargs, [*parameters, *buffers], self.layout.batch_dims)
            plan = self._plans.of_calls.get(signature)
            if plan is None:
                plan = self._plan_call(rules, args, kwargs, tensors)
                self._plans.of_calls.add(signature, plan)
            # 2. checks that depend on its values
            args, kwargs = self._check_values(rules, plan, args, kwargs, tensors)
            call = PreparedCall(args, kwargs, rules, plan, self._take_must_match(rules, parameters))
            # 3. the loss over all ranks, in full precision
            try:
                value = plan.precision.run(self, self._evaluate, (call,), {}, parameters, tensors)
            finally:
                self._plans.configuration.follow(self.wrapped)
            if isinstance(value, UNFINISHED):
                raise unfinished_error(self._title, value)
        remember_global_value(value, self._title)
        if self.backward == "sum":
            return inputs.map_tensors(with_scaled_gradient, value)
        return self._upstream_grad.watch(value, group=self._group)

    # ------------------------------------------------------------------ position of a memory

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped loss, including the position of a memory."""
        state = super().state_dict(*args, **kwargs)
        if self.queue_position is not None:
            given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
            state[given.get("prefix", "") + _POSITION] = self.queue_position.position
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        position = state_dict.pop(prefix + _POSITION, None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.queue_position is not None:
            self.queue_position.restore_(position)

    # ------------------------------------------------------------------ plan

    def _current_rules(self) -> LossPlan:
        """Return the rules for all calls, given the current configuration of the loss and of this object."""
        others = (self.mode, self.products, self.compile_tiles, repr(self.layout))
        return self._plans.current(self.wrapped, self.backward, *others)

    def _plan_call(
        self, rules: LossPlan, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> CallPlan:
        """Reject signatures that are not supported, and return the rules that apply to all calls with the signature."""
        title, loss = self._title, self.wrapped
        parameters, buffers = self._plans.configuration.weights()
        mode = self._chosen_mode(rules.modes)
        names: tuple[str, ...] = ()
        given = {f"argument {place}": value for place, value in enumerate(args)} | kwargs
        own_rules = _argument_rules(rules, args)
        if rules.is_pml:
            names = (*own_rules.names[: len(args)], *kwargs)
            given = dict(zip(own_rules.names, args, strict=False)) | kwargs
        own_buffers = buffers if rules.is_torchs else []
        inputs.check_devices(title, given, parameters, buffers=own_buffers)
        inputs.check_inputs(loss, title, args, kwargs, read_values=False, refuse_nan=False, allow_empty=True)
        if mode not in rules.modes:
            raise not_exact(title, mode, rules.modes)
        if rules.is_pml:
            named = gathered_call.by_name(title, loss, own_rules, args, kwargs)
            gathered_call.refuse_half_labelled(labelled_loss(loss), rules.inner_facts, named)
        rows = [value for value in (*args, *kwargs.values()) if inputs.is_floating(value)]
        return CallPlan(
            mode=mode,
            names=names,
            precision=FullPrecisionPlan.of(precision.modules_of(loss) if buffers else (), parameters, tensors),
            narrow_dtype=precision.narrow_dtype(tensors),
            products=choose_form(title, self.products, rows) if rows else "float32",
            num_classes=inputs.classes_of(loss),
            has_label_rows=gathered_call.has_label_rows(given),
        )

    def _check_values(
        self,
        rules: LossPlan,
        plan: CallPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reject values that the loss does not support, and return the arguments, with labels clamped if they were not read."""
        if plan.has_label_rows and rules.arguments.are_class_labels:
            gathered_call.refuse_labels(
                self._title, self.wrapped, dict(zip(plan.names, (*args, *kwargs.values()), strict=True))
            )
        if plan.num_classes is None:
            return args, kwargs
        are_read = self.value_reading.next_call(tensors)
        embeddings = inputs.given_argument(args, kwargs, 0, "embeddings")
        labels = inputs.given_argument(args, kwargs, 1, "labels")
        if isinstance(embeddings, Tensor) and isinstance(labels, Tensor):
            rows = embeddings.shape[0]
            inputs.check_labels(self._title, labels, rows, plan.num_classes, read_values=are_read)
        if are_read:
            return args, kwargs
        return inputs.clamp_labels(self.wrapped, self._title, args, kwargs, self.value_reading)

    def _take_must_match(self, rules: LossPlan, parameters: list[Tensor]) -> dict[str, object]:
        """Return values of a call that must be equal on all ranks, including the factor recorded in the last backward, which is cleared."""
        must_match: dict[str, object] = {"configuration": rules.configuration, "which": self._instance}
        must_match |= micro_batch_to_match() | reduction_to_match()
        weights = parameters
        if rules.is_torchs:
            own_buffers = torch_compat.buffer_slots(self.wrapped).values()
            weights = [*parameters, *filter(torch.is_tensor, own_buffers)]
        if weights:
            fingerprint = self._weights.take(weights, self._group)
            if fingerprint:
                must_match["weights"] = fingerprint
        if self.backward == "own_slice":
            noted = self._upstream_grad.take()
            must_match["coefficient of the last backward (give backward='sum' where ranks shall differ)"] = noted
        return must_match

    def _evaluate(self, call: PreparedCall) -> Any:
        """Evaluate the loss over the rows of all ranks."""
        value = self._evaluate_pml(call) if call.rules.is_pml else self._evaluate_torch(call)
        if self.queue_position is not None:
            self.queue_position.update_()
        return value

    # ------------------------------------------------------------------ choose

    def _evaluate_torch(self, call: PreparedCall) -> Any:
        """Evaluate a loss that is not from PML."""
        args, kwargs, mode = call.args, call.kwargs, call.plan.mode
        if mode == "elements":
            rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            return by_elements(self.wrapped, call.rules, self._exchange(call, rows), rows, args, kwargs)
        if mode == "rows" and process_groups.world_size(self._group) > 1:
            return self._evaluate_on_rows(call)
        views = (*args, *kwargs.values())
        if mode == "moments" and all(isinstance(view, Tensor) and view.ndim < 3 for view in views):
            return by_moments(self.wrapped, views, self._group)
        values = dict(enumerate(args)) | kwargs
        layout = self.layout.of_call(values, self._title)
        batches = gathered_call.batches_in(self._title, values, layout)
        gathered = self._gather(call, batches, self.backward)
        layout.refuse_unnamed_views(values, dict(zip(batches, gathered.counts, strict=True)), self._title)
        return self._replicated(call.rules, self.wrapped, TensorCall(args, kwargs, layout, gathered))

    def _evaluate_on_rows(self, call: PreparedCall) -> Any:
        """Evaluate a loss that is not from PML on rows that stay on their rank."""
        values = dict(enumerate(call.args)) | call.kwargs
        layout = self.layout.of_call(values, self._title)
        layout.refuse_views(self._title)
        gathered_call.batches_in(self._title, values, layout)  # rejects containers of tensors that are not rebuilt
        opened = open_rows(
            self._title,
            call.args,
            call.kwargs,
            layout.batch_dims,
            call.must_match | self._options(),
            self._seeds,
            self._group,
        )
        assert opened is not None  # the group has several ranks
        layout.refuse_unnamed_views(values, opened.counts, self._title)
        return run_on_rows(self.wrapped, opened)

    def _evaluate_pml(self, call: PreparedCall) -> Any:
        """Evaluate a PML loss, in the same way on every rank."""
        rules, mode, loss = call.rules, call.plan.mode, self.wrapped
        by_place = zip(call.plan.names, (*call.args, *call.kwargs.values()), strict=True)
        given = {name: value for name, value in by_place if value is not None}
        # a loss of two views creates labels, by which the wrapped loss compares rows
        if rules.takes_views:
            loss, given = labelled_loss(loss), gathered_call.labelled_arguments(loss, self._title, given)
        # a sum over samples does not depend on other ranks' rows
        are_of_samples = set(given) <= {"embeddings", "labels"} and isinstance(given.get("embeddings"), Tensor)
        if mode == "elements" and loss is self.wrapped and are_of_samples:
            rows = given["embeddings"]
            return by_elements(loss, rules, self._exchange(call, rows), rows, (), given)
        # all other modes gather the rows of all ranks. If each rank evaluates its own anchors, a row receives gradients from all ranks
        how: Backward | BackwardChoice = self.backward
        if mode == "rows":
            how = partial(self._backward_of_rows, rules)
        facts, two_views = rules.inner_facts, rules.stacks_views
        batches = CallBatches.of(loss, given)
        gathered = self._gather(call, batches.tensors, how)
        rank = process_groups.rank(self._group)
        global_call = PMLCall(loss, facts, given, batches, gathered, rank, two_views=two_views)
        value = self._evaluate_gathered(call, loss, global_call)
        # warn at the end: if warnings are errors, peers are not in the middle of the evaluation
        if not self._warned and self._seeds.number <= _WATCHED_CALLS:
            self._warn_identities(global_call)
        if not self._warned and facts.pairs_views:
            self._warn_moved_pairs(global_call)
        return value

    def _backward_of_rows(self, rules: LossPlan, counts: dict[str, list[int]]) -> Backward:
        """Return how gradients of gathered rows are combined: summed over ranks, or by option if every rank computes the full loss."""
        return self.backward if self._are_few(rules, counts) else "sum"

    def _evaluate_gathered(self, prepared: PreparedCall, loss: Any, call: PMLCall) -> Any:
        """Evaluate a PML loss that has gathered the rows of all ranks."""
        # a sum over anchors uses our own tiles if supported, otherwise PML's formula on this rank's anchors
        rules, is_mined = prepared.rules, "indices_tuple" in call.given
        may_split = prepared.plan.mode == "rows" and (rules.splits_pairs or not is_mined)
        if may_split and not self._are_few(rules, call.counts):
            exchange = self._exchange(prepared, call.given["embeddings"])
            if rules.tiles is not None and call.ref_labels is not None:
                form = prepared.plan.products
                if self.products == "auto" and not call.is_bf16_on_all_ranks():
                    form = "float32"
                options = self.tile_bytes, self._compiler_of_call(rules.tiles, call), form
                return TiledCall(loss, rules.tiles, call, exchange, *options).run()
            if call.rows_possible():
                return by_rows(loss, rules, exchange, call, self.tile_bytes)
        # the full loss on every rank
        if self.queue_position is not None:
            expect(
                call.total_rows,
                f"{self._title}: embeddings",
                expected="rows on some rank, as the memory needs them",
                got="0 rows on all ranks",
                error=InputError,
                collective=True,
                fix="Skip the loss on every rank for a batch without rows.",
            )
            self.queue_position.check(call.rows_to_remember(), self._title)
        return self._replicated(rules, loss, call)

    def _compiler_of_call(self, tiles: TiledPlan, call: PMLCall) -> TileCompiler | None:
        """Return what computes the tiles of a call, equal on all ranks, or None for torch's operators."""
        all_serve = tiles.has_kernels and all(sent[-1] for sent in call.extras)
        entries = call.total_rows * call.total_references // len(call.extras)
        return chosen(self._tile_compiler, all_serve, entries)

    def _replicated(self, rules: LossPlan, loss: nn.Module, call: PMLCall | TensorCall) -> Any:
        """Evaluate the full loss, and record its value, which is compared in the next call."""
        value = replicated(loss, call, draws=rules.draws, writes_distances=rules.inner_facts.writes_distances)
        self._replicated_value.note(value, self._group)
        return value

    def _are_few(self, rules: LossPlan, counts: dict[str, list[int]]) -> bool:
        """Return whether the batch is so small that computing the full loss on every rank is faster. Equal on all ranks."""
        if self.mode == "rows":  # depends only on options that are equal on all ranks, so not on tile_bytes
            return False
        return sum(counts.get("embeddings", ())) <= rules.inner_facts.few_rows

    def _warn_identities(self, call: PMLCall) -> None:
        """Warn once, on rank 0, if self-supervised labels that each rank has numbered collide between ranks. All ranks detect it."""
        labels = call.given.get("labels")
        if labels is None:
            return
        watched = _WATCHED_CALLS if inputs.on_host([labels]) else 1  # reading labels waits for an accelerator
        if self._seeds.number > watched or process_groups.world_size(self._group) == 1:
            return
        if call.ranks_with_local_identities() > 1:
            self._warn_once(
                "several ranks hand in the same labels 0, 1, 2, ...: rows of different ranks count as the same identity. "
                "If each row is its own identity, let the loss number them: "
                "GlobalBatchLoss(SelfSupervisedLoss(...))(view1, view2)."
            )

    def _warn_moved_pairs(self, call: PMLCall) -> None:
        """Warn once, on rank 0, if row i of all ranks' references is not on the rank that holds row i. All ranks detect it."""
        if not call.moves_pairs():
            return
        counts = zip(call.counts["embeddings"], call.counts["ref_emb"], strict=True)
        by_rank = ", ".join(f"rank {rank}: {rows} and {refs}" for rank, (rows, refs) in enumerate(counts))
        self._warn_once(
            "without labels, row i of all ranks' embeddings is paired with row i of all ranks' ref_emb, as in one process on the "
            f"concatenated batch. A rank has other numbers of the two ({by_rank}), so rows of the ranks after it meet another "
            "rank's references. Give labels, or as many references as rows on all ranks but the last."
        )

    def _warn_once(self, text: str) -> None:
        self._warned = True
        if process_groups.rank(self._group) == 0:
            warnings.warn(f"{self._title}: {text}", stacklevel=3)

    # ------------------------------------------------------------------ exchange

    def _gather(
        self, call: PreparedCall, batches: dict[str, Tensor], backward: Backward | BackwardChoice
    ) -> GatheredBatch:
        """Gather batches of all ranks, and compare the value of the previous call."""
        plan = call.plan
        if plan.layout is None:
            plan.layout = BatchLayout.of(self._title, batches, self._options())
        seed = self._seeds.next()
        rows, has_kernels = batches.get("embeddings"), False
        if rows is not None:
            dtype = torch.promote_types(rows.dtype, torch.float32)
            has_kernels = serves(self._tile_compiler, dtype, rows.device)
        gathered = gather_batch(
            plan.layout,
            batches,
            call.must_match,
            backward=backward,
            extra=seed + self._replicated_value.take() + bytes([has_kernels]),
            given_dtype=plan.narrow_dtype,
            group=self._group,
        )
        self._replicated_value.refuse_other(self._title, [extra[len(seed) : -1] for extra in gathered.extras])
        return gathered

    def _exchange(self, call: PreparedCall, rows: Tensor) -> SumExchange:
        """Return how sums of the call are exchanged."""
        plan = call.plan
        if plan.sums is None:
            form = f"{('rows', *rows.shape[1:])} {rows.dtype} {rows.device.type}"
            gradients = "on" if torch.is_grad_enabled() else "off"
            plan.sums = Agreement(self._title, {**self._options(), "rows of embeddings": form, "gradients": gradients})
        return SumExchange(plan.sums, call.must_match, self._group)

    def _options(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks."""
        options: dict[str, object] = {"mode": self.mode, "backward": self.backward, "products": self.products}
        if self.compile_tiles is True:
            options["compile_tiles"] = True
        return options

    @property
    def _title(self) -> str:
        return f"GlobalBatchLoss({name_of_loss(self.wrapped)})"


def _argument_rules(plan: LossPlan, args: tuple[Any, ...]) -> ArgumentRules:
    """Return the rules for the arguments. A memory also accepts as many positional arguments as a plain loss."""
    if plan.facts.own_references and len(args) > len(plan.arguments.names):
        return plan.arguments._replace(names=PML_NAMES)
    return plan.arguments


class GlobalBatchMiner(WithProcessGroup, nn.Module):
    """A pytorch-metric-learning miner over the global batch.

    Equivalent to: ``miner(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process.

    Args:
        miner: Any miner of pytorch-metric-learning. A random miner draws the same tuples on all ranks.
        name: Name that distinguishes this miner from others of its kind, as in ``GlobalBatchLoss``.
        group: Process group. None is the world.

    Returns:
        From ``forward``: tuples of global row indices, equal on every rank, for ``GlobalBatchLoss(..., indices_tuple=...)``.

    Communication: one handshake, and one gather if the rows do not fit into it (``handshake.inline_capacity``). None in backward.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.miners import MultiSimilarityMiner
        >>> miner = GlobalBatchMiner(MultiSimilarityMiner())
        >>> tuples = miner(torch.randn(4, 8), torch.tensor([0, 0, 1, 1]))
    """

    sees_global_batch = True

    def __init__(self, miner: nn.Module, *, name: str | None = None, group: Group = None) -> None:
        super().__init__()
        is_miner = isinstance(miner, BaseMiner)
        expect(
            is_miner,
            "GlobalBatchMiner: miner",
            expected="a miner of pytorch-metric-learning",
            got=repr(miner),
            fix="Pass an object, such as MultiSimilarityMiner(). Wrap losses in GlobalBatchLoss.",
        )
        self.miner = miner
        self.set_group(group, self._title, name)
        self._seeds = SeedCounter()
        self._configuration = Configuration()
        self._plans: Plans[MinerPlan] = Plans()

    @eager_recursive
    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> GlobalTuples:
        """Mine the global batch: embeddings (B, D), labels (B,), ref_emb, ref_labels."""
        with handshake.raising_on_all_ranks(self._title, group=self._group):
            inputs.refuse_capture(self._title)
            changes = self._configuration.changes
            configuration = self._configuration.read(self.miner)
            # attributes that the miner itself has changed since, such as recorded numbers, do not invalidate plans
            if changes != self._configuration.changes:
                self._plans.clear()
            parameters, buffers = self._configuration.weights()
            signature, tensors = Signature.of(args, kwargs, [*parameters, *buffers])
            plan = self._plans.get(signature)
            if plan is None:
                plan = self._plan_call(args, kwargs, parameters, tensors)
                self._plans.add(signature, plan)
            if plan.has_label_rows:
                gathered_call.by_name(self._title, self.miner, plan.arguments, args, kwargs)
            by_place = zip(plan.names, (*args, *kwargs.values()), strict=True)
            given = {name: value for name, value in by_place if value is not None}
            must_match = {"which": self._instance, "configuration": configuration}
            call = plan, must_match, given
            return plan.precision.run(self, self._mine, call, {}, parameters, tensors)  # type: ignore[no-any-return]

    def _plan_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: list[Tensor], tensors: list[Tensor]
    ) -> MinerPlan:
        """Reject signatures that are not supported, and return the rules that apply to all calls with the signature."""
        names = [name for name in PML_NAMES if name not in ("indices_tuple", "enqueue_mask")]
        rules = ArgumentRules.of(self.miner, names)
        given = gathered_call.by_name(self._title, self.miner, rules, args, kwargs)
        inputs.check_devices(self._title, given, parameters)
        return MinerPlan(
            arguments=rules,
            names=(*rules.names[: len(args)], *kwargs),
            facts=pml_registry.facts_of(self.miner),
            precision=FullPrecisionPlan.of(precision.modules_of(self), parameters, tensors),
            narrow_dtype=precision.narrow_dtype(tensors),
            has_label_rows=gathered_call.has_label_rows(given),
        )

    def _mine(self, plan: MinerPlan, must_match: dict[str, object], given: dict[str, Any]) -> GlobalTuples:
        batches = CallBatches.of(self.miner, given)
        if plan.layout is None:
            plan.layout = BatchLayout.of(self._title, batches.tensors)
        gathered = gather_batch(
            plan.layout,
            batches.tensors,
            must_match,
            extra=self._seeds.next(),
            given_dtype=plan.narrow_dtype,
            group=self._group,
        )
        call = PMLCall(self.miner, plan.facts, given, batches, gathered, process_groups.rank(self._group))
        try:
            with same_draws(call.seed, call.batches):
                tuples = self.miner(**call.arguments)
        finally:
            self._configuration.follow(self.miner)
        ranks = process_groups.members(self._group)
        rows_of_ranks = dict(zip(ranks, call.counts["embeddings"], strict=True))
        return GlobalTuples.of(tuples, rows_of_ranks, call.total_references)

    @property
    def _title(self) -> str:
        return f"GlobalBatchMiner({type(self.miner).__name__})"


class QueuePosition:
    """Position of the next row of a ``CrossBatchMemory``, which PML stores in plain attributes that checkpoints do not contain.

    Args:
        memories: Memories of one loss, in the order of its modules.

    Attributes:
        position: For each memory, the index of the next row and whether the memory has been filled: (2 * memories,), int64, on the host.
    """

    def __init__(self, memories: list[CrossBatchMemory]) -> None:
        self.memories = memories
        self.position = torch.zeros(2 * len(memories), dtype=torch.int64)

    def check(self, rows: int, title: str) -> None:
        """Reject a global batch that is larger than a memory."""
        for memory in self.memories:
            expect(
                rows <= memory.memory_size,
                f"{title}: memory_size",
                expected=f"at least the global batch of {rows} rows",
                got=memory.memory_size,
                fix="The memory takes the rows of all ranks; raise memory_size.",
                error=InputError,
                collective=True,
            )

    def update_(self) -> None:
        """Copy the memories' positions into ``position``."""
        positions = [(memory.queue_idx, int(memory.has_been_filled)) for memory in self.memories]
        self.position.copy_(torch.tensor(positions).view(-1))

    def restore_(self, position: Tensor | None) -> None:
        """Set the memories' positions. If None, they start at 0, as for a checkpoint of a memory outside ``GlobalBatchLoss``."""
        if position is None:
            self.position.zero_()
        else:
            self.position.copy_(position)
        for memory, (index, filled) in zip(self.memories, self.position.view(-1, 2).tolist(), strict=True):
            memory.queue_idx, memory.has_been_filled = index, bool(filled)
