"""`python -m lightning_ddp_losses` is the console script `ddp-losses`."""

from lightning_ddp_losses.cli import main

if __name__ == "__main__":
    main()
