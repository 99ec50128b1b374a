"""The call of a contrastive loss between two towers: its checks, the rows of all ranks, its precision. The tiles are in ``tower_tiles``.

Rows are sent and multiplied in the dtype in which the caller passes them. bfloat16 rows are not copied to float32 (``products.Operand``).

Legend: ``B`` rows on this rank, ``D`` embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.core.signature import Plans
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import BackwardExchange
from lightning_ddp_losses.distributed.fingerprint import WeightFingerprints
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.global_values import UpstreamGradWatch, reduction_to_match, remember_global_value
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.raw_collectives import TravellingRows
from lightning_ddp_losses.errors import InputError, expect, expect_count, expect_option
from lightning_ddp_losses.losses.kernels.choice import CompileTiles, chosen, option_of, serves, tile_compiler
from lightning_ddp_losses.losses.plans.signatures import kind_of, signature_of
from lightning_ddp_losses.losses.plans.towers import (
    PAIRED,
    Number,
    TowerPlan,
    TowerRows,
    check_number,
    check_pairs,
    check_rows,
    described,
    kind_of_number,
    number_as_tensor,
)
from lightning_ddp_losses.losses.products.forms import ProductChoice, refuse_products, rounds_rows, warn_of_tf32
from lightning_ddp_losses.losses.products.operands import Operand, dots_of
from lightning_ddp_losses.losses.tile_compiler import TileCompiler, rehearsed_tile
from lightning_ddp_losses.losses.tower_tiles import (
    Factors,
    TowerCall,
    concatenated,
    tiles_of,  # noqa: F401 (it was here first)
)


class TwoTowerLoss(WithProcessGroup, nn.Module):
    """Performs the call of a two-tower loss: checks, comparison of ranks, precision. Subclasses implement ``_evaluate``.

    Args:
        init_temperature: ``logit_scale`` starts at ``log(1 / init_temperature)``. If None, the scale is passed in each call.
        max_scale: Upper limit of the loss's scale. If None, the scale is not limited.
        normalize: Divide embeddings by their length.
        tile_bytes: Bytes of products in memory at a time. If None, 2 MiB, on an accelerator 64 MiB, compiled or with kernels
            256 MiB.
        gather: ``"all"``: every rank holds all columns. ``"ring"``: columns are sent around a ring.
        products: Dtype of the products, as in ``products``.
        compile_tiles: How a tile's functions are computed. ``"auto"``: kernels for many rows on a GPU. True: ``torch.compile``. False:
            torch's operators.
        name: Name that distinguishes this loss from others of its kind, as in ``GlobalBatchLoss``.
        check_weights: Compare the loss's parameters between the ranks, as in ``GlobalBatchLoss``.
        group: Process group. None is the world.
    """

    sees_global_batch = True
    compares_with_own_pair = True  # whether the product of each text with its own image is computed separately

    def __init__(
        self,
        init_temperature: float | None,
        max_scale: float | None,
        normalize: bool,
        tile_bytes: int | None,
        gather: Literal["all", "ring"],
        products: ProductChoice,
        compile_tiles: CompileTiles,
        name: str | None,
        check_weights: bool,
        group: Group,
    ) -> None:
        super().__init__()
        title = type(self).__name__
        for option, limit in (("init_temperature", init_temperature), ("max_scale", max_scale)):
            expect(limit is None or limit > 0, f"{title}: {option}", expected="above 0, or None", got=limit)
        if tile_bytes is not None:
            expect_count(f"{title}: tile_bytes", tile_bytes, at_least=64)
        expect_option(f"{title}: gather", gather, ("all", "ring"))
        refuse_products(title, products)
        self.products: ProductChoice = products
        self.max_scale, self.normalize, self.tile_bytes, self.gather = max_scale, normalize, tile_bytes, gather
        self._compiler = tile_compiler(title, compile_tiles)
        self.set_group(group, title, name)
        self._upstream_grads = UpstreamGradWatch()
        self._weights = WeightFingerprints(wanted=check_weights)
        self._plans: Plans[TowerPlan] = Plans()
        self.logit_scale: nn.Parameter | None = None
        if init_temperature is not None:
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / init_temperature)))

    @property
    def compile_tiles(self) -> CompileTiles:
        """Option of the constructor."""
        return option_of(self._compiler)

    @eager_recursive
    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        extra_texts: Tensor | None = None,
        queue: Tensor | None = None,
        *,
        logit_scale: Tensor | float | None = None,
    ) -> Tensor:
        """Compute the global loss, where row i of one tower belongs to row i of the other tower.

        Args:
            images: (B, D), the first tower. B may differ per rank.
            texts: (B, D), the second tower.
            extra_texts: (m, D), further negatives for the images of all ranks. The number m may differ per rank.
            queue: (q, D), further negatives that must be equal on all ranks. They do not receive a gradient.
            logit_scale: One number (0-dim, equal on every rank) that replaces the loss's scale. It must already be exponentiated, as
                expected by open_clip's losses. It is not clamped, and it receives a gradient.
        """
        rows = TowerRows(images, texts, extra_texts, queue)
        return self._checked_call(rows, {"logit_scale": logit_scale})

    def _checked_call(self, rows: TowerRows, numbers: dict[str, Number]) -> Tensor:
        """Compute the global loss, or raise one error on every rank.

        Args:
            rows: Rows of this rank.
            numbers: Numbers of the caller that replace the loss's parameters, by name.
        """
        title = type(self).__name__
        with handshake.raising_on_all_ranks(title, group=self._group):
            inputs.refuse_capture(title)
            # 1. the rules of calls like this one
            parameters = precision.parameters_of(self)
            plan = self._plan_of(rows, numbers, parameters)
            # 2. values of this call
            given = {name: number_as_tensor(number, rows.images) for name, number in numbers.items()}
            must_match = self._take_must_match(plan, rows, numbers, parameters)
            # 3. the rows of all ranks, and the loss
            value = self._in_full_precision(plan, rows, must_match, given)
        remember_global_value(value, title)
        watched: Tensor = self._upstream_grads.watch(value, group=self._group)
        return watched

    def _plan_of(self, rows: TowerRows, numbers: dict[str, Number], parameters: Sequence[Tensor]) -> TowerPlan:
        """Return the rules of a call, and reject invalid arguments."""
        title = type(self).__name__
        kinds = [*map(kind_of, rows), *map(kind_of_number, numbers.values())]
        options = (
            self.products,
            self.gather,
            self.normalize,
            self.tile_bytes,
            self.compile_tiles,
            self.logit_scale is None,
        )
        signature = signature_of([*kinds, *options], parameters)
        plan = self._plans.get(signature)
        if plan is not None:
            check_pairs(title, rows)
            return plan
        check_rows(title, rows, numbers, parameters)
        for name, number in numbers.items():
            check_number(title, name, number, getattr(self, name))
        plan = TowerPlan.of(self, rows, numbers, parameters)
        self._plans.add(signature, plan)
        return plan

    def _take_must_match(
        self, plan: TowerPlan, rows: TowerRows, numbers: dict[str, Number], parameters: Sequence[Tensor]
    ) -> dict[str, object]:
        """Return values that must be equal on all ranks, including the factor recorded in the last backward, which is cleared."""
        must_match: dict[str, object] = {"which": self._instance, "options": self.extra_repr()}
        # reading the value of a tensor would wait for the device
        plain = {name: number for name, number in numbers.items() if isinstance(number, (int, float))}
        must_match.update(plain)
        if rows.queue is not None:
            must_match["queue"] = described(rows.queue)
        must_match["weights"] = self._weights.take(parameters, self._group)
        must_match["coefficient of the last backward"] = self._upstream_grads.take()
        return must_match | reduction_to_match()

    def _in_full_precision(
        self, plan: TowerPlan, rows: TowerRows, must_match: dict[str, object], given: dict[str, Tensor | None]
    ) -> Tensor:
        """Compute the global loss with autocast off, with every trainable parameter in its graph."""
        if not plan.is_full:
            # rows are not cast: rows of bfloat16 are multiplied unchanged
            forward = partial(self._forward, plan, rows, must_match)
            tensors = precision.CallTensors.of(self, (rows, given), {})
            result: Tensor = autograd_graph.run_full_precision(self, forward, (given,), {}, tensors=tensors)
            return result
        value = self._forward(plan, rows, must_match, given)
        if plan.unreached:
            parameters = dict(self.named_parameters())
            unreached = [parameters[name] for name in plan.unreached]
            value = autograd_graph.attach_zero_grad(value, unreached, list(rows.by_name().values()))
        return value

    def _forward(
        self, plan: TowerPlan, rows: TowerRows, must_match: dict[str, object], given: dict[str, Tensor | None]
    ) -> Tensor:
        # 1. this rank's rows in the form of products
        own_rows = rows.texts if rows.extra is None else torch.cat([rows.texts, rows.extra])
        images, own = plan.operand(rows.images, plan.form), None
        paired = []
        if self.compares_with_own_pair:
            own = plan.operand(own_rows, plan.form)
            paired = [_paired(rows, images, own, plan.dtype)]
        # 2. the second tower of all ranks, in a ring only its numbers of rows
        batch = self._gather(plan, rows, paired, must_match)
        if not plan.in_ring and paired:
            paired = batch.tensors[-1:]
        call = self._tower_call(plan, rows, own_rows, images, own, batch)
        del batch, images, own  # the call holds the parts that are still required
        # 3. every rank takes part in backward if any rank requires it
        trained_images = autograd_graph.match_requires_grad(rows.images, call.trained)
        trained_rows = autograd_graph.match_requires_grad(own_rows, call.columns_trained)
        # 4. the loss
        numbers = [self._number(name, number) for name, number in given.items()]
        if call.compiler is not None:
            self._rehearse(call.compiler, call, numbers)
            if call.compiler.has_failed:
                call = replace(call, compiler=None)
        return self._evaluate(call, trained_images, trained_rows, *paired, *numbers)

    def _gather(
        self, plan: TowerPlan, rows: TowerRows, paired: list[Tensor], must_match: dict[str, object]
    ) -> GatheredBatch:
        """Return the second tower of all ranks, and the product of each text with its own image if ``paired`` contains this rank's."""
        sent = {"texts": plan.as_sent(rows.texts)}
        if rows.extra is not None:
            sent["extra_texts"] = plan.as_sent(rows.extra)
        if paired and not plan.in_ring:
            sent[PAIRED] = paired[0]
        has_kernels = serves(self._compiler, plan.dtype, rows.images.device)
        flags = plan.flags + bytes([has_kernels])
        return gather_batch(plan.layout, sent, must_match, extra=flags, group=self._group)

    def _tower_call(
        self,
        plan: TowerPlan,
        rows: TowerRows,
        own_rows: Tensor,
        images: Operand,
        own: Operand | None,
        batch: GatheredBatch,
    ) -> TowerCall:
        """Return the call, with its columns in the form for products. ``own`` contains this rank's second tower in the plan's form."""
        title = type(self).__name__
        text_counts = batch.counts[0]
        world_size = len(text_counts)
        extra_counts = batch.counts[1] if rows.extra is not None else [0] * world_size
        total = sum(text_counts)
        if total == 0:
            raise InputError(
                f"{title}: rows",
                expected="at least one on some rank",
                got="none",
                collective=True,
                fix="Skip the loss on every rank for a batch without rows.",
            )
        trained, columns_trained, all_bf16, have_kernels = _joined_flags(batch.extras)
        form = plan.form
        if rounds_rows(form) and not all_bf16:  # another rank has float32 rows
            form = "float32"
            images, own = plan.operand(rows.images, form), None
        warn_of_tf32(title, form, images.rows)
        # the columns: gathered from all ranks, or only this rank's
        columns = ring = ring_rows = queue = None
        if world_size > 1 and not plan.in_ring:
            columns = plan.operand(concatenated(batch.tensors[: 1 if rows.extra is None else 2]), form)
            if rows.extra is None:
                first = sum(text_counts[: process_groups.rank(self._group)])
                own = columns.part(slice(first, first + len(own_rows)))
        if own is None:
            own = plan.operand(own_rows, form)
        if columns is None:
            columns = own
        if world_size > 1 and plan.in_ring:
            ring = TravellingRows(own_rows.shape[1:], batch.dtypes[0])
            ring_rows = own_rows.detach().to(batch.dtypes[0][process_groups.rank(self._group)])
        if rows.queue is not None:
            queue = plan.operand(rows.queue, form)
        width = total + sum(extra_counts)
        if queue is not None:
            width += len(queue.rows)
        compiler = chosen(self._compiler, have_kernels, total * width // world_size)
        return TowerCall(
            plan,
            form,
            text_counts,
            extra_counts,
            self._group,
            BackwardExchange(title, self._group),
            images,
            own,
            columns,
            queue,
            ring,
            ring_rows,
            trained,
            columns_trained,
            compiler,
        )

    def _evaluate(self, call: TowerCall, *tensors: Any) -> Tensor:
        """Compute the global loss.

        Args:
            call: The call.
            *tensors: Images (B, D) of this rank and rows (m, D) of its second tower, with their graphs. If ``compares_with_own_pair``,
                the product (t,) of each text of the columns with its own image, without a graph. Then the scale and other numbers of the
                loss.
        """
        raise NotImplementedError

    def _rehearse(self, compiler: TileCompiler, call: TowerCall, numbers: list[Tensor]) -> None:
        """Compile the functions of forward and backward. Collective."""
        like = call.images.rows.new_empty(0, dtype=numbers[0].dtype)
        of_rows = str(like.dtype), like.device.type, call.form, call.term_count, call.plan.normalize
        kind = (*of_rows, call.trained, *call.kept_on_ranks())

        def rehearsal(run: Callable[..., Any]) -> None:
            # a tile for which the functions take the same branches
            products = rehearsed_tile(like)
            rows, columns = products.shape
            of_rows = of_columns = scale = None
            if call.form != "float32":
                scale = products.new_ones(())
                if call.images.factors is not None:
                    of_rows, of_columns = products.new_ones(rows), products.new_ones(columns)
            own: int | Tensor = 0
            if compiler.takes_masks:
                own = torch.arange(rows, device=like.device).unsqueeze(1)
            self._rehearse_tile(run, products, Factors(scale, of_rows, of_columns, own), call)

        with torch.no_grad():
            compiler.rehearse(type(self).__name__, kind, rehearsal, self._group)

    def _rehearse_tile(self, run: Callable[..., Any], products: Tensor, factors: Factors, call: TowerCall) -> None:
        """Call the functions of a tile through ``run``."""
        raise NotImplementedError

    def _number(self, name: str, given: Tensor | None) -> Tensor:
        """Return the caller's number unchanged, or the loss's parameter. The loss's scale is returned as 1 / temperature, clamped."""
        if given is not None:
            return given
        own: Tensor = getattr(self, name)
        if name != "logit_scale":
            return own
        if self.max_scale is not None:
            own = own.clamp(max=math.log(self.max_scale))
        return own.exp()


def _joined_flags(flags_of_ranks: Sequence[bytes]) -> tuple[bool, bool, bool, bool]:
    """Return whether any rank trains anything, whether any trains its second tower, whether all use bf16, and whether all have kernels."""
    trained, columns_trained, bf16, kernels = zip(*flags_of_ranks, strict=True)
    return any(trained), any(columns_trained), all(bf16), all(kernels)


def _paired(rows: TowerRows, images: Operand, own: Operand, dtype: torch.dtype) -> Tensor:
    """Return the product (B,) of each image with its own text, in the dtype of the computation.

    Args:
        rows: Rows as passed by the caller, which are not rounded here.
        images: The images in the form for products. Unless this form is bf16, they are used instead of ``rows``.
        own: Rows of the second tower in the form for products, texts first.
        dtype: Dtype of the computation.
    """
    count = rows.images.shape[0]
    left, right = rows.images.detach(), rows.texts.detach()
    if images.rows.dtype != torch.bfloat16:
        left, right = images.rows, own.rows[:count]
    products = dots_of(left, right, dtype)
    for factors in (images.factors, own.factors):
        if factors is not None:
            products.mul_(factors[:count])
    return products
