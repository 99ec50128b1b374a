"""Kinds of tensors by identity, and what a write in place does to tensors that share memory."""

from __future__ import annotations

from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.losses.certificates.kinds import CONSTANT, Broken, Constant, Kind
from lightning_ddp_losses.losses.certificates.lines import Blame


class KnownTensors:
    """The kinds of all tensors of a trace. It keeps them alive, so that no two have one identity."""

    def __init__(self) -> None:
        self._kinds: dict[int, Kind] = {}
        self._kept: list[Tensor] = []
        # tensors by their memory
        self._sharing: dict[int, set[int]] = {}
        self._spoilt: dict[int, Broken] = {}
        self._given: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._kinds

    def add(self, tensor: Tensor, kind: Kind) -> None:
        """Set the kind of a tensor."""
        self._kinds[id(tensor)] = kind
        self._kept.append(tensor)
        memory = _memory_of(tensor)
        if memory is not None:
            self._sharing.setdefault(memory, set()).add(id(tensor))

    def add_argument(self, tensor: Tensor, kind: Kind) -> None:
        """Set the kind of an argument of the loss."""
        self.add(tensor, kind)
        memory = _memory_of(tensor)
        if memory is not None:
            self._given.add(memory)

    def is_argument(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an argument of the loss, or a view of one."""
        return _memory_of(tensor) in self._given

    def kind(self, tensor: Tensor, blame: Blame) -> Kind:
        """Return the kind of a tensor. One that no operator has returned is a constant, unless it shares the memory of another.

        Args:
            tensor: Any tensor.
            blame: Makes the reason of the operator that reads it.
        """
        memory = _memory_of(tensor)
        if memory in self._spoilt:
            return self._spoilt[memory]
        found = self._kinds.get(id(tensor))
        if found is not None:
            return found
        if memory is None:
            return Broken((blame("a tensor without memory of its own"),))
        others = self._sharing.get(memory, set())
        if all(isinstance(self._kinds[other], Constant) for other in others):
            return CONSTANT
        return Broken((blame("a tensor that shares the memory of rows, and that no operator returned"),))

    def write(self, tensor: Tensor, kind: Kind, blame: Blame) -> bool:
        """Record a write in place, after which all tensors that share its memory are broken, unless the values stay constant.

        Returns:
            Whether values that existed before the trace now depend on rows.
        """
        memory = _memory_of(tensor)
        if isinstance(kind, Constant):
            return False
        is_new = id(tensor) not in self._kinds
        others = self._sharing.get(memory, set()) - {id(tensor)} if memory is not None else set()
        if others or memory is None:
            earlier = kind.reasons if isinstance(kind, Broken) else ()
            spoilt = Broken((*earlier, blame("a write in place that other tensors see")))
            kind = spoilt
            if memory is not None:
                self._spoilt[memory] = spoilt
        self.add(tensor, kind)
        return is_new


def _memory_of(tensor: Tensor) -> int | None:
    reference = torch_compat.memory_reference(tensor)
    return None if reference is None else int(reference.cdata)
