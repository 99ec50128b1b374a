"""The plan of a two-tower loss's call and its checks: rules that depend only on the kinds of arguments, parameters and options.

Legend: ``B`` rows on this rank, ``D`` embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import inputs, precision, torch_compat
from lightning_ddp_losses.distributed.gathered_batch import BatchLayout
from lightning_ddp_losses.distributed.messages import Agreement
from lightning_ddp_losses.distributed.raw_collectives import NARROW_DTYPES
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.plans.signatures import kind_of
from lightning_ddp_losses.losses.products.forms import (
    DEVICE_BYTES,
    TOWER_BYTES,
    ProductForm,
    choose_form,
    rounds_rows,
    tile_budget,
)
from lightning_ddp_losses.losses.products.operands import Operand

_HOST_TILE_BYTES = 2 << 20

PAIRED = "products with their own text"
"""Name of these products in the gather."""

Number = Tensor | float | None

# parameters of the loss that the caller may pass instead, and the option that creates them
_OPTION_OF = {"logit_scale": "init_temperature", "logit_bias": "init_bias"}
# our arguments at positions where losses of other libraries expect a number
_PLACES_OF_NUMBERS = {"extra_texts": "logit_scale", "queue": "logit_bias"}


class TowerRows(NamedTuple):
    """The rows of a call on this rank, as passed by the caller.

    Attributes:
        images: (B, D), the first tower.
        texts: (B, D), the second tower.
        extra: (m, D), further negatives. None if there are none.
        queue: (q, D), negatives that every rank holds. None if there are none.
    """

    images: Tensor
    texts: Tensor
    extra: Tensor | None
    queue: Tensor | None

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by the names of the arguments."""
        named = {"images": self.images, "texts": self.texts, "extra_texts": self.extra, "queue": self.queue}
        return {name: rows for name, rows in named.items() if rows is not None}


@dataclass(frozen=True)
class TowerPlan:
    """Rules for the calls of one signature.

    Attributes:
        dtype: Dtype of the computation.
        form: How rows are multiplied, if all ranks have rows of the same kind.
        normalize: True if rows are divided by their lengths.
        tile_bytes: Maximum size in bytes of the products at a time.
        kernel_tile_bytes: Maximum size in bytes for tiles that kernels compute.
        in_ring: True if the second tower is sent around a ring.
        is_full: True if the call already computes in ``dtype``, without entering a context or casting numbers.
        flags: Whether this rank trains anything, whether it trains the second tower, and whether it multiplies rows as bf16 numbers. The
            ranks exchange the flags.
        unreached: Names of trainable parameters that backward does not reach, such as those that the caller's numbers replace.
        layout: Layout of the second tower's gather, with values that must be equal on all ranks.
        sums: The exchange of the loss's sums.
    """

    dtype: torch.dtype
    form: ProductForm
    normalize: bool
    tile_bytes: int
    kernel_tile_bytes: int
    in_ring: bool
    is_full: bool
    flags: bytes
    unreached: tuple[str, ...]
    layout: BatchLayout
    sums: Agreement

    @classmethod
    def of(cls, module: Any, rows: TowerRows, numbers: Mapping[str, Number], parameters: Sequence[Tensor]) -> TowerPlan:
        """Return the plan of a call whose arguments have been checked.

        Args:
            module: The loss.
            rows: Rows of this rank.
            numbers: Numbers of the caller that replace the loss's parameters, by name.
            parameters: Parameters of the loss.

        Raises:
            ConfigurationError: for a form of products that the device does not support.
        """
        given = rows.by_name()
        form = choose_form(type(module).__name__, module.products, list(given.values()))
        of_caller = [number_as_tensor(number, rows.images) for number in numbers.values()]
        given_numbers = [number for number in of_caller if number is not None]
        # with float64 parameters, the whole computation is float64
        dtype = precision.compute_dtype([*parameters, *given.values(), *given_numbers])
        if dtype == torch.float64:
            form = "float32"
        # rows are not cast: rows of bfloat16 are multiplied unchanged
        computed = [*parameters, *given_numbers]
        is_full = (
            not torch_compat.is_any_autocast_on()
            and precision.is_full(dtype, [], computed)
            and not precision.narrow_buffers(precision.modules_of(module), dtype)
        )
        tile_bytes = kernel_tile_bytes = module.tile_bytes
        if tile_bytes is None:
            kernel_tile_bytes = tile_budget(rows.images.device, _HOST_TILE_BYTES, DEVICE_BYTES)
            tile_bytes = tile_budget(rows.images.device, _HOST_TILE_BYTES, TOWER_BYTES)
            if module.compile_tiles is True:
                tile_bytes = kernel_tile_bytes
        records_graph = torch.is_grad_enabled()
        second_tower = [tensor for name, tensor in given.items() if name in ("texts", "extra_texts")]
        trains_columns = records_graph and any(tensor.requires_grad for tensor in second_tower)
        trains = records_graph and any(tensor.requires_grad for tensor in (rows.images, *computed))
        flags = bytes([trains or trains_columns, trains_columns, rounds_rows(form)])
        unreached = []
        if records_graph:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and (name not in numbers or numbers[name] is not None):
                    unreached.append(name)
        must_match = {"gather": module.gather}
        for name, number in numbers.items():
            if number is None or isinstance(number, Tensor):
                must_match[name] = "its own" if number is None else "a tensor"
        if rows.queue is None:
            must_match["queue"] = "none"
        if module.compile_tiles is True:
            must_match["compile_tiles"] = "True"
        return cls(
            dtype,
            form,
            module.normalize,
            tile_bytes,
            kernel_tile_bytes,
            module.gather == "ring",
            is_full,
            flags,
            tuple(unreached),
            _layout_of(module, rows, dtype, must_match),
            Agreement(f"{type(module).__name__}: sum"),
        )

    def operand(self, rows: Tensor, form: ProductForm) -> Operand:
        """Return rows in the given form for products."""
        if not rounds_rows(form):
            rows = rows.to(self.dtype)
        return Operand.prepare(rows, form, normalize=self.normalize)

    def as_sent(self, rows: Tensor) -> Tensor:
        """Return rows in the form in which they are sent, without a graph: narrow dtypes unchanged, others in the computation's dtype."""
        rows = rows.detach()
        return rows if rows.dtype in NARROW_DTYPES else rows.to(self.dtype)


def _layout_of(module: Any, rows: TowerRows, dtype: torch.dtype, must_match: Mapping[str, object]) -> BatchLayout:
    """Return the layout of the gather, which assumes that rows are sent in the dtype of the computation."""
    tensors = {"texts": rows.texts.detach()[:0].to(dtype)}
    if rows.extra is not None:
        tensors["extra_texts"] = rows.extra.detach()[:0].to(dtype)
    in_ring = module.gather == "ring"
    counted = list(tensors) if in_ring else []
    if module.compares_with_own_pair and not in_ring:
        tensors[PAIRED] = rows.images.new_empty(0, dtype=dtype)
    # narrow rows of other ranks are multiplied unchanged
    return BatchLayout.of(type(module).__name__, tensors, must_match, counted, keeps_narrow=True)


def kind_of_number(number: Number) -> Any:
    """Return the kind of a number in the signature of a call."""
    if isinstance(number, Tensor):
        return number.shape, kind_of(number)
    return type(number)


def check_rows(title: str, rows: TowerRows, numbers: Mapping[str, Number], parameters: Sequence[Tensor]) -> None:
    """Reject towers that do not fit together, or are on a different device than the loss.

    Raises:
        InputError: naming the argument.
    """
    images = rows.images
    given = {"images": images, "texts": rows.texts, **rows.by_name()}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.ndim != 2 or not tensor.is_floating_point():
            fix = None
            number = _PLACES_OF_NUMBERS.get(name)
            if number is not None and (not isinstance(tensor, Tensor) or tensor.numel() == 1):
                fix = "Further negatives have this place."
                if number in numbers:
                    fix += f" A number of your own goes by name: `loss(images, texts, {number}=...)`."
            raise InputError(f"{title}: {name}", expected="floating (n, D)", got=described(tensor), fix=fix)
        if tensor.shape[1] != images.shape[1]:
            raise InputError(
                f"{title}: {name}",
                expected=f"{images.shape[1]} columns, as the images have",
                got=tensor.shape[1],
                fix="Project both towers to one embedding size.",
            )
    inputs.check_devices(title, given, parameters)
    check_pairs(title, rows)


def check_pairs(title: str, rows: TowerRows) -> None:
    """Reject towers with different numbers of rows.

    Raises:
        InputError: naming both numbers.
    """
    if rows.images.shape[0] != rows.texts.shape[0]:
        raise InputError(
            f"{title}: rows",
            expected="as many texts as images",
            got=f"{len(rows.images)} images, {len(rows.texts)} texts",
            fix="Row i of one tower belongs to row i of the other; more negatives go to extra_texts.",
        )


def check_number(title: str, name: str, number: Number, own: Tensor | None) -> None:
    """Reject a value that is not a number, or a missing number.

    Args:
        title: Name of the loss in messages.
        name: Name of the number.
        number: The caller's number, which replaces the loss's parameter. If None, the loss's parameter is used.
        own: Parameter of the loss. None if the loss does not have it.

    Raises:
        InputError: naming the number.
    """
    title = f"{title}: {name}"
    if number is None:
        if own is None:
            fix = f"Give `{name}=` in the call, or make the loss without `{_OPTION_OF[name]}=None`."
            raise InputError(title, expected="one number, since the loss has none of its own", got=None, fix=fix)
        return
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        return
    if not isinstance(number, Tensor) or number.numel() != 1 or not number.is_floating_point():
        raise InputError(title, expected="one number, 0-dim", got=described(number))


def number_as_tensor(number: Number, images: Tensor) -> Tensor | None:
    """Return a number of the caller as a 0-dim tensor on the device of the rows, or None to use the loss's parameter."""
    if number is None:
        return None
    if isinstance(number, Tensor):
        return number.reshape(()).to(images.device)
    return torch.full((), number, dtype=precision.compute_dtype([images]), device=images.device)


def described(value: object) -> str:
    """Return shape and dtype of a tensor, or the type of another value, for a message."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
