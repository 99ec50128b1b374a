"""What contrastive losses between two towers share: one rank's rows of one tower against all rows of the other, in tiles.

A tile of products serves both directions and, unless it is the only one, is computed again in backward. Own rows of the first tower stay
where they are; only the second tower travels (``column_blocks``).

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum over ranks, ``M`` columns, ``D`` embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.forward_patch import eager_recursive, refuse_capture
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.accumulation import name_value
from lightning_ddp_losses.distributed.collectives import BackwardExchange
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.raw_collectives import NarrowRows
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, InputError, expect_option
from lightning_ddp_losses.losses.column_blocks import ColumnBlocks, RingSource, RowForm
from lightning_ddp_losses.losses.products import (
    ProductChoice,
    ProductForm,
    choose_form,
    refuse_products,
    tile_budget,
    unit_rows,
)

_HOST_TILE_BYTES = 2 << 20

# own parameters that the caller may give instead, and the option without which the loss has them not
_OPTION_OF = {"logit_scale": "init_temperature", "logit_bias": "init_bias"}
# arguments of ours in whose place another library's losses take a number
_PLACES_OF_NUMBERS = {"extra_texts": "logit_scale", "queue": "logit_bias"}


class TwoTowerLoss(WithProcessGroup, nn.Module):
    """Makes the call of a two-tower loss: checks, what must match on all ranks, precision; ``_evaluate`` is the subclass's.

    Args:
        normalize: Divide embeddings by their length.
        tile_bytes: Of products alive at a time; None: 2 MiB, on an accelerator 256 MiB.
        gather: Whether every rank holds all columns, or they go round a ring.
        products: How rows are multiplied (``products``).
        group: Process group; None is the world.
    """

    sees_global_batch = True
    compares_with_own_pair = True  # each text's product with its own image is needed beside all products
    products: ProductChoice
    _given_dtype: torch.dtype | None = None  # of the rows of this call, where narrow

    def __init__(
        self,
        *,
        normalize: bool,
        tile_bytes: int | None,
        gather: Literal["all", "ring"],
        products: ProductChoice,
        group: Group,
    ) -> None:
        super().__init__()
        if tile_bytes is not None and (not isinstance(tile_bytes, int) or tile_bytes < 64):
            expected = "at least 64, or None"
            raise ConfigurationError(f"{type(self).__name__}: tile_bytes", expected=expected, got=repr(tile_bytes))
        expect_option(f"{type(self).__name__}: gather", gather, ("all", "ring"))
        refuse_products(type(self).__name__, products)
        self.products = products
        self.normalize, self.tile_bytes, self.gather = normalize, tile_bytes, gather
        self._group = group
        self._upstream_grads = UpstreamGradWatch()

    def _start_scale(self, init_temperature: float | None, max_scale: float | None) -> None:
        self.max_scale = max_scale
        self.logit_scale: nn.Parameter | None = None
        if init_temperature is not None:
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / init_temperature)))

    def _scale(self, given: Tensor | None) -> Tensor:
        """Returns the caller's scale as it is; or computes 1 / temperature, clamped, with the gradient of its logarithm."""
        if given is not None:
            return given
        log_scale: Tensor | None = self.logit_scale
        assert log_scale is not None  # checked before
        if self.max_scale is not None:
            log_scale = log_scale.clamp(max=math.log(self.max_scale))
        return log_scale.exp()

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
        """Computes the global loss; row i of one tower belongs to row i of the other.

        Args:
            images: (B, D), one tower; B may differ per rank.
            texts: (B, D), the other.
            extra_texts: (m, D), further negatives for the images, those of all ranks together; m may differ per rank.
            queue: (q, D), further negatives that every rank holds already, the same on all of them; no gradient.
            logit_scale: One number (0-dim, the same on every rank), by which products are multiplied instead of with the loss's own
                scale: the exponential is taken already, as where open_clip calls its loss. It is not clamped, and gets its gradient.
        """
        return self._checked_call((images, texts, extra_texts, queue), {"logit_scale": logit_scale})

    def _checked_call(
        self, rows: tuple[Tensor, Tensor, Tensor | None, Tensor | None], numbers: dict[str, Tensor | float | None]
    ) -> Tensor:
        """Computes the global loss, or raises one error on every rank.

        Args:
            rows: Images, texts, extra texts, queue.
            numbers: What the caller gives instead of the loss's own parameters, by their names.
        """
        try:
            refuse_capture(type(self).__name__)
            self._check(*rows)
            given = {name: self._one_number(name, number, rows[0]) for name, number in numbers.items()}
            form = self._product_form(rows)
        except DDPLossError as error:
            handshake.raise_on_all_ranks(error, type(self).__name__, group=self._group)
        self._given_dtype = precision.narrow_dtype(rows[:3])
        kinds = {name: _kind_of_number(number) for name, number in numbers.items()}
        kinds["products"] = form
        value: Tensor = autograd_graph.run_full_precision(self, self._forward, ([*rows], given, kinds), {})
        autograd_graph.remember_global_value(value)
        name_value(value, type(self).__name__)
        watched: Tensor = self._upstream_grads.watch(value, group=self._group)
        return watched

    def _product_form(self, rows: Sequence[Tensor | None]) -> ProductForm:
        """Chooses how rows are multiplied, from their dtypes as the caller gave them."""
        given = [tensor for tensor in rows if tensor is not None]
        form = choose_form(type(self).__name__, self.products, given)
        # parameters of float64 make all of it float64
        is_double = any(parameter.dtype == torch.float64 for parameter in self.parameters())
        return "float32" if is_double else form

    def _bytes_of_a_tile(self, images: Tensor) -> int:
        """Chooses how many bytes of products are alive at a time."""
        if self.tile_bytes is not None:
            return self.tile_bytes
        return tile_budget(images.device, _HOST_TILE_BYTES)

    def _one_number(self, name: str, number: Tensor | float | None, images: Tensor) -> Tensor | None:
        """Checks one number that the caller gives instead of an own parameter; makes it a 0-dim tensor."""
        title = f"{type(self).__name__}: {name}"
        if number is None:
            if getattr(self, name) is None:
                own_option = _OPTION_OF[name]
                fix = f"Give `{name}=` in the call, or make the loss without `{own_option}=None`."
                raise InputError(title, expected="one number, since the loss has none of its own", got=None, fix=fix)
            return None
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return images.new_full((), number)
        if not isinstance(number, Tensor):
            raise InputError(title, expected="one number, 0-dim", got=type(number).__name__)
        if number.numel() != 1 or not number.is_floating_point():
            raise InputError(title, expected="one number, 0-dim", got=f"{tuple(number.shape)} {number.dtype}")
        return number.reshape(()).to(images.device)

    def _forward(
        self,
        rows: list[Tensor | None],
        given: dict[str, Tensor | None],
        kinds: dict[str, object],
    ) -> Tensor:
        images, texts, extra, queue = rows
        rows.clear()  # wide copies of narrow rows, which nobody keeps once they are of unit length
        assert images is not None
        assert texts is not None
        form = RowForm(kinds["products"])  # type: ignore[arg-type]
        # unit length; lengths are needed of what is multiplied as it came
        if self.normalize:
            images, lengths = unit_rows(images)
            if form.form == "bf16":
                form = RowForm(form.form, lengths.squeeze(1))
        # what the other ranks make the same of: in the dtype in which the caller gave it
        narrow = {"texts": self._narrow_columns(texts, form)}
        texts = self._columns_of(texts, form)
        second_tower = {"texts": texts}
        if extra is not None:
            narrow["extra_texts"] = self._narrow_columns(extra, form)
            second_tower["extra_texts"] = self._columns_of(extra, form)
        if queue is not None:
            queue = self._columns_of(queue, form).detach()
        # each image's product with its own text, which rows and columns are compared with
        products = None
        if self.compares_with_own_pair:
            products = (images.detach() * form.rows(texts).detach()).sum(1)
        # what all ranks need to know: all texts, or in a ring how many there are
        trained = [images, *self.parameters(), *(number for number in given.values() if number is not None)]
        batch = self._exchange(trained, second_tower, narrow, products, {"queue": _kind_of_queue(queue), **kinds})
        text_counts, extra_counts = batch.counts[0], [0] * len(batch.counts[0])
        if extra is not None:
            extra_counts = batch.counts[1]
        if sum(text_counts) == 0:
            title = f"{type(self).__name__}: rows"
            raise InputError(title, expected="at least one on some rank", got="none", collective=True)
        gathered = batch.tensors[: len(second_tower)]
        if self.gather == "all":
            del narrow
            columns = ColumnBlocks(text_counts, extra_counts, queue, self._group)
            products = batch.tensors[-1] if self.compares_with_own_pair else None
            return self._evaluate(columns, form, images, _concatenated(gathered), products, given)
        # in a ring every rank takes part in backward where any rank needs it
        exchange = BackwardExchange(type(self).__name__, self._group)
        travelling = NarrowRows(_concatenated([rows.rows for rows in narrow.values()]), narrow["texts"].expand)
        ring = RingSource(travelling, batch.narrow_dtypes[0], exchange)
        columns = ColumnBlocks(text_counts, extra_counts, queue, self._group, ring)
        images = autograd_graph.match_requires_grad(images, any(flag[0] for flag in batch.extras))
        own_columns = _concatenated(list(second_tower.values()))
        own_columns = autograd_graph.match_requires_grad(own_columns, any(t.requires_grad for t in gathered))
        return self._evaluate(columns, form, images, own_columns, products, given)

    def _columns_of(self, rows: Tensor, form: RowForm) -> Tensor:
        """Makes columns of rows of the second tower: of unit length, each with its former length where that is needed."""
        if not self.normalize:
            return rows
        unit = unit_rows(rows)
        return unit.rows if form.image_lengths is None else torch.cat(unit, 1)

    def _narrow_columns(self, rows: Tensor, form: RowForm) -> NarrowRows:
        """Makes what may travel in place of columns: the rows that they are made of."""
        given, dtype = rows.detach(), rows.dtype
        if self._given_dtype is not None:
            given = given.to(self._given_dtype)
        return NarrowRows(given, lambda sent: self._columns_of(sent.to(dtype), form))

    def _exchange(
        self,
        trained: list[Tensor],
        second_tower: dict[str, Tensor],
        narrow: dict[str, NarrowRows],
        products: Tensor | None,
        kinds: dict[str, object],
    ) -> GatheredBatch:
        """Makes sure that all ranks do the same, and gathers what they need of each other.

        Args:
            trained: What gets a gradient here, where it needs one.
            second_tower: Rows by name.
            narrow: What may travel in their place, by the same names.
            products: (B,), of each text with its own image; None: not needed.
            kinds: What else must be equal on all ranks.
        """
        title = type(self).__name__
        must_match = {
            "gather": self.gather,
            "options": self.extra_repr(),
            **kinds,
            "coefficient of the last backward": self._upstream_grads.take(),
        }
        if self.gather == "all":
            given = dict(second_tower)
            if products is not None:
                given["products with their own text"] = products
            return gather_batch(title, given, must_match, narrow=narrow, group=self._group)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in trained)
        return gather_batch(
            title,
            second_tower,
            must_match,
            extra=bytes([needs_grad]),
            counted=second_tower,
            narrow=narrow,
            group=self._group,
        )

    def _evaluate(
        self,
        columns: ColumnBlocks,
        form: RowForm,
        images: Tensor,
        texts: Tensor,
        products: Tensor | None,
        given: dict[str, Tensor | None],
    ) -> Tensor:
        """Computes the global loss.

        Args:
            columns: The ways to go through the second tower.
            form: How rows are multiplied.
            images: (B, D), this rank's.
            texts: (m, D), rows of the second tower as ``columns`` wants them.
            products: (t,), of each text among them with its own image, without graph; None unless ``compares_with_own_pair``.
            given: The caller's numbers in the place of own parameters, by their names; None: the own one.
        """
        raise NotImplementedError

    def _check(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> None:
        title, given = type(self).__name__, {"images": images, "texts": texts}
        # what may be left out
        if extra is not None:
            given["extra_texts"] = extra
        if queue is not None:
            given["queue"] = queue
        for name, tensor in given.items():
            if name in _PLACES_OF_NUMBERS and _is_one_number(tensor):
                self._refuse_number(name)
            if not isinstance(tensor, Tensor) or tensor.ndim != 2 or not tensor.is_floating_point():
                got: Any = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InputError(f"{title}: {name}", expected="floating (n, D)", got=got)
            if tensor.shape[1] != images.shape[1]:
                raise InputError(
                    f"{title}: {name}",
                    expected=f"{images.shape[1]} columns, as the images have",
                    got=tensor.shape[1],
                    fix="Project both towers to one embedding size.",
                )
        inputs.check_devices(title, given, self.parameters())
        if len(images) != len(texts):
            raise InputError(
                f"{title}: rows",
                expected="as many texts as images",
                got=f"{len(images)} images, {len(texts)} texts",
                fix="Row i of one tower belongs to row i of the other; more negatives go to extra_texts.",
            )

    def _refuse_number(self, name: str) -> NoReturn:
        """Raises for a number by position, where open_clip's losses take the scale (and SigLIP's bias)."""
        number, fix = _PLACES_OF_NUMBERS[name], "Further negatives have this place."
        if hasattr(self, number):
            fix = f"Further negatives have this place; a number of your own goes by name: `loss(images, texts, {number}=...)`."
        raise InputError(f"{type(self).__name__}: {name}", expected="floating (n, D)", got="one number", fix=fix)


def is_not_positive(option: float | None) -> bool:
    """Says whether an option that must be positive, or None, is neither."""
    return option is not None and option <= 0


def _is_one_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim < 2 and value.numel() == 1
    return isinstance(value, (int, float))


def _kind_of_number(number: Tensor | float | None) -> object:
    """Says what all ranks must give alike: the value of a plain number; of a tensor, which to read would wait for the device, not."""
    if number is None:
        return "its own"
    return "a tensor" if isinstance(number, Tensor) else number


def _kind_of_queue(queue: Tensor | None) -> str:
    return "none" if queue is None else f"{tuple(queue.shape)} {queue.dtype}"


def _concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
