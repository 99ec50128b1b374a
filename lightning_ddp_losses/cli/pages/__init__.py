"""The manual's pages that belong to no name: `faults`, the known faults, `recipes`, the way from a peer's library to this one, and
`release`, the changelog and how to cite.

All are made from what ``ddp-losses explain`` shows. The recipes are the Markdown files of this folder, the others those in ``about``.
"""
