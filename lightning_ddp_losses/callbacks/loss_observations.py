"""Losses that compare samples and see this rank's rows only; and whether their labels held a positive pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_PML = "pytorch_metric_learning."
_PROXY_ATTRIBUTES = ("num_classes", "proxies", "fc")  # a loss against class weights compares no samples
_CALLS_ON_DEVICE = 20
_NOT_LOSSES = ("BaseLossWrapper", "BaseDistributedLossWrapper")


def local_contrastive(module: nn.Module) -> dict[str, nn.Module]:
    """pytorch-metric-learning's losses on tuples, by path, that neither gather nor lie inside a loss that does."""
    found: dict[str, nn.Module] = {}
    covered: tuple[str, ...] = ()
    for name, inner in module.named_modules():
        if name.startswith(covered):
            continue
        names = {cls.__name__ for cls in type(inner).__mro__}
        if "GlobalBatchLoss" in names or "DistributedLossWrapper" in names or names & set(_NOT_LOSSES):
            covered += (f"{name}.",) if name else ()
        elif _from(inner, "losses") and "BaseMetricLossFunction" in names and not _has_proxies(inner):
            found[name] = inner
            covered += (f"{name}.",)
    return found


def uses_foreign_gather(module: nn.Module) -> str:
    """The path of a wrapper that gathers rows of equal numbers only; empty where there is none."""
    for name, inner in module.named_modules():
        if _from(inner, "utils.distributed"):
            return name or type(inner).__name__
    return ""


def _from(module: nn.Module, part: str) -> bool:
    return any(cls.__module__.startswith(_PML + part) for cls in type(module).__mro__)


def _has_proxies(loss: nn.Module) -> bool:
    return any(hasattr(loss, attribute) for attribute in _PROXY_ATTRIBUTES) or any(True for _ in loss.parameters())


class PositivePairs:
    """Notices calls whose labels are all different, so that nothing can be pulled together.

    Attributes:
        without: By path of the loss, whether its latest call was one.
    """

    def __init__(self, losses: dict[str, nn.Module]) -> None:
        self.without: dict[str, bool] = {}
        self._calls = 0
        self._handles: list[RemovableHandle] = [
            loss.register_forward_pre_hook(self._watcher(name, loss), with_kwargs=True) for name, loss in losses.items()
        ]

    def _watcher(self, name: str, loss: nn.Module) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("embeddings", "labels", "indices_tuple", "ref_emb"), args, strict=False)) | kwargs
            if module is not loss:  # a copy
                return
            labels = given.get("labels")
            elsewhere = given.get("indices_tuple") is not None or given.get("ref_emb") is not None
            if not torch.is_grad_enabled() or not isinstance(labels, Tensor) or labels.ndim != 1 or elsewhere:
                return
            self._calls += 1
            if labels.device.type != "cpu" and self._calls > _CALLS_ON_DEVICE:  # reading waits for the device
                return
            self.without[name] = len(labels) > 1 and len(torch.unique(labels)) == len(labels)

        return look

    def remove(self) -> None:
        """Leave no hook behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
