# the page of changelog and citation in the HTML manual: its text is made here
from lightning_ddp_losses.cli import manual

__doc__ = "\n\n".join(manual.about().values())
