"""The form of products of rows with rows: float32, or bf16 numbers on tensor cores.

A product of two bf16 numbers is exact in float32, so bf16 rows multiplied into float32 differ from the float32 product of the same values
only by the order of summation. Operations that would lose digits are kept out of the product: rows are multiplied unchanged, not at unit
length, and their lengths and the scale are row and column factors of the tile. A gradient of products is not a bf16 number. It is rounded
to one, or is a sum of several, each of which is multiplied with the rows. Rows of float32 are sums of two or three bf16 numbers in
``"bf16x3"`` and ``"bf16x6"``.

| form | products for a logit, for a gradient | rounding of a row | of a gradient |
|---|---|---|---|
| ``"float32"`` | one in float32 | none | none |
| ``"bf16"`` | 1, 1 | none for bf16 rows, otherwise 2^-9 | 2^-9, but for the gradient of a scale or bias |
| ``"bf16x2"`` | 1, 2 | the same | 2^-17 |
| ``"bf16x3"`` | 3, 3 | 2^-17 | 2^-17 |
| ``"bf16x6"`` | 6, 6 | 2^-25 | 2^-25 |

The products for a logit are one of longer rows, in which the parts of a row follow each other (``SEQUENCES``). ``"auto"`` is never less
exact than torch with the same rows: torch rounds logits of bf16 rows, their gradient and all sums to bf16.

``torch.mm(..., out_dtype=torch.float32)`` exists on some devices (NVIDIA's: torch 2.8 and later). Elsewhere, as on the CPU, the same bf16
values are multiplied in float32, gradients are not rounded, and ``"bf16x3"`` and ``"bf16x6"`` are ``"float32"``.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_ddp_losses.errors import expect, expect_option

ProductChoice: TypeAlias = Literal["float32", "bf16", "bf16x2", "bf16x3", "bf16x6", "auto"]
"""The user's option."""

ProductForm: TypeAlias = Literal["float32", "bf16", "bf16x2", "bf16x3", "bf16x6"]
"""The form that a call uses."""

_GRAD_TERMS: dict[ProductForm, int] = {"float32": 0, "bf16": 1, "bf16x2": 2, "bf16x3": 2, "bf16x6": 3}
ROUNDED_ROWS: tuple[ProductForm, ...] = ("bf16", "bf16x2")
# each pair of neighbours is a product of two parts: of the largest (0), of the largest with the second (1), and so on
SEQUENCES: dict[ProductForm, tuple[int, ...]] = {"bf16x3": (0, 0, 1, 0), "bf16x6": (0, 0, 1, 1, 0, 2, 0)}

DEVICE_BYTES = 256 << 20
TOWER_BYTES = 64 << 20


def tile_budget(device: torch.device, host_bytes: int, device_bytes: int = DEVICE_BYTES) -> int:
    """Return how many bytes of intermediate results a loss keeps at a time: ``host_bytes`` on the CPU, ``device_bytes`` elsewhere.

    On a CPU small pieces stay in the cache. On an accelerator a piece must be large to be worth its launches: with 256 MiB, 65,536 rows
    against as many columns are 64 tiles of float32. The square tiles of two towers are worth theirs at 64 MiB: 4,096 rows and columns. The
    device computes a compiled tile of that size faster than the host launches it: these are four times as large.
    """
    return host_bytes if device.type == "cpu" else device_bytes


def aligned_columns(columns: int) -> int:
    """Round a number of columns down so that each row of a tile begins at a multiple of 16 bytes, or products take many times as long."""
    return columns // 64 * 64 or columns


# ---------------------------------------------------------------------- the form of a call


def refuse_products(title: str, products: object) -> None:
    """Refuse an unknown option.

    Raises:
        ConfigurationError: with the choices.
    """
    expect_option(f"{title}: products", products, get_args(ProductChoice))


def choose_form(title: str, choice: ProductChoice, operands: Sequence[Tensor]) -> ProductForm:
    """Choose the form for operands as the caller gave them: float64 stays float64, ``"auto"`` is not less exact than torch.

    Args:
        title: Name of the loss in messages.
        choice: The user's option.
        operands: Rows, before they are widened.

    Raises:
        ConfigurationError: for bf16 products on a device that has none.
    """
    dtypes = {operand.dtype for operand in operands}
    if choice == "float32" or torch.float64 in dtypes:
        return "float32"
    device = operands[0].device
    if choice == "auto":
        return "bf16" if dtypes == {torch.bfloat16} and has_bf16(device) else "float32"
    expect(
        has_bf16(device),
        f"{title}: products",
        expected=f"a device with bfloat16 for {choice!r}",
        got=f"{device}, which has none",
        fix="Use products='float32', or 'auto', which takes bf16 products only if rows and device have them.",
    )
    if choice in SEQUENCES and not multiplies_into_float32(device):
        return "float32"
    return choice


def rounds_rows(form: ProductForm) -> bool:
    """Return whether rows are multiplied as one bf16 number, so that only rows of bf16 are not rounded."""
    return form in ROUNDED_ROWS


def rounding_of(choice: ProductChoice) -> float:
    """Return by how much products of float32 rows may round an operand, relative. 0 if they are as exact as float32."""
    if choice == "bf16x3":
        return 2.0**-17
    return 2.0**-9 if choice in ROUNDED_ROWS else 0.0


@functools.cache
def has_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bf16 itself. The CPU need not: it multiplies the values in float32."""
    if device.type == "cpu":
        return True
    # emulated products are slower than float32
    asked = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    if asked is None:
        return True
    try:
        return bool(asked(including_emulation=False))
    except TypeError:  # a device that emulates nothing
        return bool(asked())


@functools.cache
def multiplies_into_float32(device: torch.device) -> bool:
    """Return whether a device has products of bf16 into float32. Tried once, with one number."""
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    try:
        found = torch.mm(one, one, out_dtype=torch.float32)
        torch.addmm(found, one, one, out_dtype=torch.float32, out=found)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def is_tf32(device: torch.device) -> bool:
    """Return whether a device multiplies float32 matrices in TF32, as ``torch.set_float32_matmul_precision`` allows it to."""
    return device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"


@contextlib.contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices in float32 for the length of a block."""
    if not is_tf32(device):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_warned_of_tf32: set[str] = set()


def warn_of_tf32(title: str, form: ProductForm, rows: Tensor) -> None:
    """Warn once for each loss that its float32 products are rounded to TF32."""
    if form != "float32" or rows.dtype != torch.float32 or title in _warned_of_tf32 or not is_tf32(rows.device):
        return
    _warned_of_tf32.add(title)
    warnings.warn(
        f"{title}: torch.set_float32_matmul_precision({torch.get_float32_matmul_precision()!r}) lets the device multiply float32 "
        "rows in TF32, which rounds each operand by 2^-11 (relative). Set it to 'highest' for products in float32.",
        stacklevel=3,
    )


def grad_terms_of(form: ProductForm, device: torch.device) -> int:
    """Return how many bf16 numbers a gradient of products is made of. 0 if it is multiplied in float32, as by devices without bf16."""
    return _GRAD_TERMS[form] if multiplies_into_float32(device) else 0
