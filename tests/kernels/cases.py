"""Calls of the functions of tiles that have a kernel: each with its arguments behind the products, for T rows and C columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.doors import (
    Chunk,
    Factors,
    LabelKeys,
    Targets,
    class_stats,
    class_terms,
    clip_stats,
    clip_terms,
    siglip_tile,
    tile_functions,
)


def numbers(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.5


def factors(rows: int, columns: int, *, own: int = 0, plain: bool = False) -> Factors:
    if plain:
        return Factors(None, None, None, own)
    return Factors(torch.tensor(1.5), numbers(rows), numbers(columns), own)


def siglip(rows: int, columns: int) -> Iterator[partial[Any]]:
    for own, plain, with_grads, term_count, sums_logits in (
        (0, False, True, 1, True),
        (0, False, True, 2, False),
        (-3, True, True, 0, True),
        (columns, False, True, 3, False),
        (2, True, False, 0, False),
    ):
        given = factors(rows, columns, own=own, plain=plain)
        yield partial(siglip_tile, None, given, torch.tensor(-1.0), with_grads, term_count, sums_logits)


def clip(rows: int, columns: int) -> Iterator[partial[Any]]:
    for own, plain, text_count, keep in (
        (0, False, columns, False),
        (-3, True, columns // 2, True),
        (2, False, 0, False),
    ):
        yield partial(clip_stats, None, factors(rows, columns, own=own, plain=plain), text_count, keep)
    row_lse, column_lse, of_own = numbers(rows, 2) + 8, numbers(columns, 3) + 8, -numbers(rows, 4)
    # further negatives have no column
    column_lse[columns // 2 :] = torch.inf
    for own, term_count, are_logits, sums_logits in (
        (0, 1, False, True),
        (0, 2, False, False),
        (-3, 0, True, True),
        (2, 3, False, False),
    ):
        given = factors(rows, columns, own=own)
        options = term_count, are_logits, numbers(rows, 5) if sums_logits else None
        yield partial(clip_terms, None, given, row_lse, column_lse if own else None, of_own, *options)


def classes(rows: int, columns: int) -> Iterator[partial[Any]]:
    places = torch.arange(rows).mul(7).remainder(columns).unsqueeze(1)
    is_inside = torch.arange(rows) % 3 > 0
    for inside, log_weight, has_margin, keep, term_count in (
        (None, None, True, False, 2),
        (is_inside, None, False, True, 0),
        (is_inside, numbers(columns, 5), True, False, 1),
    ):
        chunk = Chunk(numbers(rows), numbers(columns), Targets(inside, places), log_weight)
        yield partial(class_stats, None, chunk, numbers(rows, 6), has_margin, keep)
        minus_lse, of_grad = -numbers(rows, 7).unsqueeze(1) - 8, (numbers(rows, 8), numbers(columns, 9))
        # the upstream gradient of a mean is one number for all rows
        expanded = (torch.tensor(0.25).expand(rows), None)
        yield partial(class_terms, None, chunk, minus_lse, numbers(rows, 2), of_grad, term_count)
        yield partial(class_terms, None, chunk.of_logits(), minus_lse, None, expanded, 0)


def keys_of(rows: int, columns: int) -> Iterator[LabelKeys]:
    """Pairs of one batch, of its last rows, and of two batches; without negatives, and without positives."""
    for own, number in ((0, 5), (columns - rows, 3), (None, 3), (0, 1), (columns - rows, columns)):
        first = 0 if own is None else own
        own_columns = None if own is None else torch.arange(own, own + rows).unsqueeze(1)
        row_labels = torch.arange(first, first + rows) % number
        yield LabelKeys(row_labels, torch.arange(columns) % number, own_columns)


def terms(rows: int, columns: int, seed: int, offset: float = 0) -> tuple[Tensor, Tensor]:
    """Numbers of rows and of columns."""
    return numbers(rows, seed).unsqueeze(1) + offset, numbers(columns, seed + 1) + offset


def supcon(rows: int, columns: int) -> Iterator[partial[Any]]:
    softmaxes, shares = terms(rows, columns, 1, -6), terms(rows, columns, 3)
    for keys in keys_of(rows, columns):
        yield partial(tile_functions.supcon_rows, None, keys)
        yield partial(tile_functions.supcon_grad, None, keys, softmaxes, shares)
        yield partial(tile_functions.supcon_grad, None, keys, softmaxes[:1], shares[:1])


def ntxent(rows: int, columns: int) -> Iterator[partial[Any]]:
    softmaxes, counts = terms(rows, columns, 1, -6), terms(rows, columns, 3)
    for keys in keys_of(rows, columns):
        for tiny, lse in ((0.0, 1.0), (2.0**-40, 28.0)):
            lses = terms(rows, columns, 5, lse)
            yield partial(tile_functions.ntxent_rows, None, keys, None, tiny, False)
            yield partial(tile_functions.ntxent_grad, None, keys, None, tiny, softmaxes, lses, counts)
            yield partial(tile_functions.ntxent_grad, None, keys, None, tiny, softmaxes[:1], lses[:1])


def multi_similarity(rows: int, columns: int) -> Iterator[partial[Any]]:
    of_negatives, of_positives = terms(rows, columns, 1, -6), terms(rows, columns, 3, -2)
    for keys in keys_of(rows, columns):
        for base, ratio in ((0.5, -2.0), (-1.0, -0.25)):
            yield partial(tile_functions.multi_similarity_rows, None, keys, base, ratio)
            yield partial(tile_functions.multi_similarity_grad, None, keys, ratio, True, of_negatives, of_positives)
            one_sided = of_negatives[:1], of_positives[:1]
            yield partial(tile_functions.multi_similarity_grad, None, keys, ratio, False, *one_sided)


def contrastive(rows: int, columns: int) -> Iterator[partial[Any]]:
    near, far = terms(rows, columns, 1), terms(rows, columns, 3)
    for keys in keys_of(rows, columns):
        for margins, sign, limits in (
            ((0, 1), 1.0, ((0.0, None), (0.0, None))),
            ((0.75, -0.25), -1.0, (None, None)),
            ((0.25, 0.75), 1.0, ((0.25, 1.0), (None, 0.75))),
            ((0.25, 0.75), -1.0, ((-0.25, None), (0.25, None))),
        ):
            options = margins, sign, limits
            yield partial(tile_functions.contrastive_rows, None, keys, *options, False)
            yield partial(tile_functions.contrastive_grad, None, keys, *options, near, far)
            yield partial(tile_functions.contrastive_grad, None, keys, *options, near[:1], far[:1])


CASES: dict[str, Callable[[int, int], Iterator[partial[Any]]]] = {
    "SigLIP": siglip,
    "CLIP": clip,
    "classes": classes,
    "SupCon": supcon,
    "NTXent": ntxent,
    "MultiSimilarity": multi_similarity,
    "Contrastive": contrastive,
}
PAIRS = "SupCon", "NTXent", "MultiSimilarity", "Contrastive"
