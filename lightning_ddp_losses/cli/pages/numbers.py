# the page of measured numbers in the HTML manual: its text is that of the benchmarks, which a clone holds
from lightning_ddp_losses.cli import manual

__doc__ = manual.numbers()
