# the page of measured numbers in the HTML manual: its text is that of the benchmarks, which a clone holds
from lightning_ddp_losses.cli import manual

# pictures as wide as the text: else they push the page's menu over it
__doc__ = manual.numbers() + "\n\n<style>.docstring img { max-width: 100%; }</style>\n"
