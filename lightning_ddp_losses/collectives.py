"""The differentiable collectives, under their documented path."""

from lightning_ddp_losses.distributed.collectives import (
    all_gather_with_grad,
    all_reduce_with_grad,
    reduce_scatter_with_grad,
)

__all__ = ["all_gather_with_grad", "all_reduce_with_grad", "reduce_scatter_with_grad"]
