"""The tag on a parameter that is split over the ranks, under its documented path."""

from lightning_ddp_losses.distributed.shard import ClassShard

__all__ = ["ClassShard"]
