"""Tests that are what each rank does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lightning_ddp_losses.testing import RankPool


def each_rank(world_size: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that each rank runs; its parameters are those of the test.

    Args:
        world_size: Number of ranks; None: the test has a parameter of that name.
        **options: Of the pool: `fresh`, `distributed`.
    """

    def made(body: Callable[..., None]) -> Callable[..., None]:
        def test(pool: RankPool, **given: Any) -> None:
            ranks = given["world_size"] if world_size is None else world_size
            wanted = {name: value for name, value in given.items() if name in parameters}
            pool.run(ranks, _run, body.__module__, body.__name__, wanted, **options)

        parameters = inspect.signature(body).parameters
        names = ["pool", *parameters]
        if world_size is None and "world_size" not in names:
            names.append("world_size")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body  # type: ignore[attr-defined]
        return test

    return made


def _run(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(import_module(module), name).body(**given)
