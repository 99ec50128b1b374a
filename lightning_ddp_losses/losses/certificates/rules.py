"""Rules for the operators of a loss: the kind of each result, from the kinds of the operands.

The result of an operator without a rule is ``Broken``. A loss is therefore a mean over rows only if this follows from rules for all of its
operators.

| operators | rule |
|---|---|
| pointwise | row by row, if the rows of all operands are the same. Linear operators also apply to sums |
| sums, means | over the rows: a ``Sum``. Over other dimensions: row by row |
| maxima, norms, softmax, ... | row by row over other dimensions, broken over the rows |
| views, joins | rows in another position (`Operation.moved`) |
| matrix products | row by row with a constant. Products that sum over the rows of both sides are a ``Sum`` |
| lookups | a row of a table for each row, an entry of each row, rows that a mask selects |
| losses of torch | their elements row by row, then the mean or the sum |
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ddp_losses.losses.certificates import kinds
from lightning_ddp_losses.losses.certificates.kinds import CONSTANT, Broken, Constant, Kind, Rows
from lightning_ddp_losses.losses.certificates.operation import Operation, words
from lightning_ddp_losses.losses.certificates.row_rules import kind_of_rows
from lightning_ddp_losses.losses.certificates.sum_rules import MOVES, kind_of_sums

_FILLS = words("zeros ones full empty new_zeros new_ones new_full new_empty scalar_tensor")
_REPEATS = words("expand repeat expand_copy")
_NO_END = 2**63 - 1  # of a slice without one


def kinds_of(operation: Operation, outputs: list[Tensor]) -> list[Kind]:
    """Return the kind of each result of an operator."""
    found = _kinds(operation, outputs)
    return [_without_second_rows(operation, kind, each) for kind, each in zip(found, outputs, strict=True)]


def _kinds(op: Operation, outputs: list[Tensor]) -> list[Kind]:
    broken = kinds.broken_of(op.kinds)
    if torch.Tag.nondeterministic_seeded in op.function.tags:
        random = op.broken("draws random numbers, other ones on each rank")
        broken = random if broken is None else Broken((*random.reasons, *broken.reasons))
    if broken is not None:
        return [broken] * len(outputs)
    name = op.base_name
    if name in _FILLS or name == "arange":
        return [_created(op, each) for each in outputs]
    if all(isinstance(kind, Constant) for kind in op.kinds):
        return [_constant(op, each) for each in outputs]
    if any(isinstance(kind, Rows) for kind in op.kinds):
        return _of_rows(op, outputs)
    return [kind_of_sums(op, each) for each in outputs]


def _of_rows(op: Operation, outputs: list[Tensor]) -> list[Kind]:
    if _cuts_rows(op):
        return [op.broken("takes rows up to a number that is not the batch's")] * len(outputs)
    if op.base_name in MOVES:
        return op.moved(outputs)
    return [kind_of_rows(op, each) for each in outputs]


def _cuts_rows(op: Operation) -> bool:
    """Return whether an operator may leave out rows of a larger batch, also if it takes all rows of this one."""
    (tensor, kind), *_ = op.tensors
    if not isinstance(kind, Rows) or op.base_name not in ("slice", "split", "split_with_sizes"):
        return False
    if op.given.get("dim", 0) % tensor.ndim != kind.dim:
        return False
    if op.base_name != "slice":
        return True
    start, end = op.given.get("start"), op.given.get("end")
    return start not in (None, 0) or (end is not None and end < _NO_END)


def _without_second_rows(op: Operation, kind: Kind, output: Tensor) -> Kind:
    """Refuse a result with a second dimension that is as long as the batch: its size would scale what sums over it."""
    if isinstance(kind, (Constant, Broken)):
        return kind
    own = kind.dim if isinstance(kind, Rows) else None
    others = [size for dim, size in enumerate(output.shape) if dim != own]
    if any(map(op.is_as_long_as_rows, others)):
        return op.broken("rows against rows: a second dimension as long as the batch")
    return kind


# ---------------------------------------------------------------------- no rows among the operands


def _constant(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a result of constants. Repeated for each row it is rows that are all equal."""
    if op.base_name in _REPEATS:
        return _repeated(op, output)
    if op.base_name == "lift_fresh" and any(map(op.is_as_long_as_rows, output.shape)):
        return op.broken("a list with a number for each row of the batch")
    return CONSTANT


def _created(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a new tensor. A dimension as long as the batch is one of rows."""
    if op.base_name != "arange":
        return _repeated(op, output)
    if not op.is_as_long_as_rows(output.numel()):
        return CONSTANT
    starts_at_0 = not op.given.get("start")
    if output.numel() == op.rows and starts_at_0 and op.given.get("step", 1) == 1:
        return Rows(0, is_position=True, is_integral=True)
    return op.broken("numbers the rows of one rank")


def _repeated(op: Operation, output: Tensor) -> Kind:
    long = [dim for dim, size in enumerate(output.shape) if op.is_as_long_as_rows(size)]
    if not long:
        return CONSTANT
    if len(long) > 1:
        return op.broken("rows against rows: two dimensions as long as the batch")
    return Rows(long[0], 1, output.shape[long[0]] // op.rows, is_same=True, is_integral=not output.is_floating_point())
