"""The manual's pages that belong to no name: `faults`, the known faults, and `recipes`, the way from a peer's library to this one.

Both are made from what ``ddp-losses explain`` shows; the recipes are the Markdown files of this folder.
"""
