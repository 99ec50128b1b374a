"""Forms of products that a case may ask for. Ranks multiply bf16 as tensor cores do, one process multiplies in float32."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from torch import Tensor

FORMS = ["auto", "auto", "float32", "bf16", "bf16x2", "bf16x3", "bf16x6"]
# what a form may round beyond what cases in float32 may: a gradient is one bf16 number
ROUNDING = {"bf16": 5e-2}


def draw_form(draw: Any) -> dict[str, str]:
    """Fields of a case: float64 is multiplied as it is, so a form of bf16 takes float32."""
    form: str = draw(st.sampled_from(FORMS))
    return {"products": form} | ({"dtype": "float32"} if form.startswith("bf16") else {})


def is_in_bf16(case: Any) -> bool:
    return getattr(case, "products", "auto").startswith("bf16")  # type: ignore[no-any-return]


def rounding_of(case: Any) -> float:
    return ROUNDING.get(getattr(case, "products", "auto"), 0.0)


def rounds_rows(case: Any) -> bool:
    """Whether rows would be rounded to bf16, so that the case has rows of bf16 numbers from the start, also in one process."""
    return getattr(case, "products", "auto") in ("bf16", "bf16x2")


def rounded(rows: Tensor) -> Tensor:
    """Rows of bf16 numbers in their dtype, with the gradient of the rows."""
    return rows + (rows.bfloat16().to(rows.dtype) - rows).detach()
