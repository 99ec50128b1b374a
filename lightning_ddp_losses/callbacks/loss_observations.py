"""Which losses compare samples and see this rank's rows only, and whether their labels held a positive pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_PML = "pytorch_metric_learning."
_PROXY_ATTRIBUTES = ("num_classes", "proxies", "fc")  # a loss against class weights compares no samples
_GATHERS = {"GlobalBatchLoss", "DistributedLossWrapper", "BaseLossWrapper", "BaseDistributedLossWrapper"}
_CALLS_ON_DEVICE = 20
_ARGUMENTS = ("embeddings", "labels", "indices_tuple", "ref_emb")


def local_contrastive_losses(module: nn.Module) -> dict[str, nn.Module]:
    """Return pytorch-metric-learning's losses on tuples, by path, that neither gather nor lie inside a loss that does."""
    found: dict[str, nn.Module] = {}
    covered: tuple[str, ...] = ()  # paths whose submodules are not looked at
    for name, inner in module.named_modules():
        if name.startswith(covered):
            continue
        class_names = {cls.__name__ for cls in type(inner).__mro__}
        if class_names & _GATHERS:
            if name:
                covered += (f"{name}.",)
        elif _is_from(inner, "losses") and "BaseMetricLossFunction" in class_names and not _has_proxies(inner):
            found[name] = inner
            covered += (f"{name}.",)
    return found


def global_contrastive_losses(module: nn.Module) -> list[str]:
    """Return the paths of losses that compare the rows of all ranks: two towers, or a gathering wrapper around a loss on tuples."""
    found: list[str] = []
    covered: tuple[str, ...] = ()
    for name, inner in module.named_modules():
        class_names = {cls.__name__ for cls in type(inner).__mro__}
        if name.startswith(covered) or "CrossBatchMemory" in class_names:  # a memory holds the rows of other batches
            continue
        compares = "TwoTowerLoss" in class_names
        if class_names & _GATHERS:
            compares = any(local_contrastive_losses(child) for child in inner.children())
        if compares:
            found.append(name)
            covered += (f"{name}.",)
    return found


def pml_gather(module: nn.Module) -> str:
    """Return the path of a wrapper that gathers rows of equal numbers only; empty where there is none."""
    for name, inner in module.named_modules():
        if _is_from(inner, "utils.distributed"):
            return name or type(inner).__name__
    return ""


def _is_from(module: nn.Module, part: str) -> bool:
    return any(cls.__module__.startswith(_PML + part) for cls in type(module).__mro__)


def _has_proxies(loss: nn.Module) -> bool:
    has_parameters = any(True for _ in loss.parameters())
    return has_parameters or any(hasattr(loss, attribute) for attribute in _PROXY_ATTRIBUTES)


class PositivePairs:
    """Notes calls of losses whose labels are all different, so that nothing can be pulled together.

    Args:
        losses: By path.
        guard: Makes a function for a hook out of one that may raise.

    Attributes:
        without: By path of the loss, whether its latest call was one.
    """

    def __init__(self, losses: dict[str, nn.Module], guard: Callable[[Any], Any]) -> None:
        self.without: dict[str, bool] = {}
        self._calls = 0
        self._handles: list[RemovableHandle] = []
        for name, loss in losses.items():
            self._handles.append(loss.register_forward_pre_hook(guard(self._hook(name, loss)), with_kwargs=True))

    def _hook(self, name: str, loss: nn.Module) -> Any:
        def see_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is not loss:  # a copy
                return
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            # pairs may come from a miner, or from other rows
            if given.get("indices_tuple") is not None or given.get("ref_emb") is not None:
                return
            labels = given.get("labels")
            if not torch.is_grad_enabled() or not isinstance(labels, Tensor) or labels.ndim != 1:
                return
            self._calls += 1
            if labels.device.type != "cpu" and self._calls > _CALLS_ON_DEVICE:  # reading waits for the device
                return
            self.without[name] = len(labels) > 1 and len(torch.unique(labels)) == len(labels)

        return see_call

    def remove(self) -> None:
        """Leave no hook behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
