# the page of recipes in the HTML manual: its text is made here
from lightning_ddp_losses.cli import manual

__doc__ = manual.all_recipes()
