"""Configurations: reducers, regularisers, distances, views, miners, users' own losses."""

from __future__ import annotations

from tests.losses.harness import Case

VARIANTS: dict[str, Case] = {}
