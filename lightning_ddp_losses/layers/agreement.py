"""Do all ranks' losses depend on the same batch norms? Asked before backward, where a difference is still an error and not a hang.

In backward each layer meets its peers once. The autograd engine runs the layers in the reverse order of their calls, and the
frames of forward have made that order the same on all ranks; so it is enough that the same calls are in every rank's graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.core.forward_patch import MethodPatch
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.layers.batch_norm_function import Scope
from lightning_ddp_losses.layers.synced import SyncedForward, fail_in

_SHOWN = 6  # differing names shown in an error


class BackwardMeeting(MethodPatch):
    """Stands in for the LightningModule's ``on_before_backward``, which Lightning calls in each backward, manual ones too.

    Args:
        module: The LightningModule.
        layers: The synchronised layers.
        scope: Answers who meets.
    """

    def __init__(self, module: pl.LightningModule, layers: Sequence[SyncedForward], scope: Callable[[], Scope]) -> None:
        super().__init__(module, "on_before_backward")
        self._layers, self._scope = layers, scope

    def __call__(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compare, then what the module itself does here."""
        if any(layer.calls for layer in self._layers):
            scope = self._scope()
            try:
                agree_on_names(
                    "batch norms that the loss depends on",
                    calls_in(loss),
                    "Use the output of every batch norm in the loss of every rank (times 0 where it should not count).",
                    group=scope.meeting,
                )
            except Exception as error:
                fail_in(scope, error, "backward")
        return self.original(loss, *args, **kwargs)


def calls_in(loss: Tensor) -> list[str]:
    """The calls of synchronised layers in the graph of ``loss``, sorted."""
    found = []
    for node, _ in walk_graph([loss]):
        label = getattr(node, "awaited_by_peers", None)
        if label is not None:
            found.append(label)
    return sorted(found)


def agree_on_names(what: str, names: Iterable[str], fix: str, *, group: Group = None) -> None:
    """Compare lists of names between ranks.

    Raises:
        RankMismatchError: on every rank, with the first names that are not on all of them.

    Communication: one frame; one more where ranks differ.
    """
    own = list(names)
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    if process_groups.world_size(group) == 1 or len(set(handshake.all_gather(what, {}, digest, group=group))) == 1:
        return
    everyone = [json.loads(p) for p in handshake.all_gather(f"all {what}", {}, json.dumps(own).encode(), group=group)]
    common = set.intersection(*map(set, everyone))
    ranks = []
    for theirs in everyone:
        more = [name for name in theirs if name not in common]
        shown = ", ".join(more[:_SHOWN]) + (f" and {len(more) - _SHOWN} more" if len(more) > _SHOWN else "")
        ranks.append(f"{len(common)} in common{f', and {shown}' if more else ''}")
    raise RankMismatchError(what, expected="the same on every rank", ranks=ranks, fix=fix, collective=True)
