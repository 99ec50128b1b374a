"""The matrix of modes: each pair of modes in a fit of few ranks, equal to one process or refused by name.

`CELLS` holds one fit a line. Every two levels of two modes meet in one of them, or in `REFUSED`; a test holds that. What a mode does
alone, and all of it at W = 1, 2, 3, stands in the other files (`test_parity.py`, `test_precision.py`, `test_manual.py`, ...).

One process trains in float64 with the plain losses on the whole batches. Ranks must move every weight as far, to within the rounding of
the least precise level (`ROUNDING`), relative to how far all weights moved; float64 is exact. On all ranks the bits are the same.

| mode | levels |
|---|---|
| precision | of the Trainer; 16-mixed by a plugin with a GradScaler |
| optimisation | automatic; by hand with two optimizers; by hand in the order of a GAN, one optimizer toggled off |
| every | batches that are accumulated, of 5 an epoch: the last window of 3 has 2 |
| clip | gradients of each optimizer, by norm or value |
| ddp | torch's own options: static graph, gradients as views of buckets, a search for unused parameters, compressed by a hook |
| averaged | weights, by Lightning's callbacks |
| fits | one of three epochs; one, then two more of the same Trainer; with validation, without windows after every second batch |
| compiled | the encoder or the loss, by `torch.compile` |
| recomputed | the encoder's activations (`torch.utils.checkpoint`) |
| losses | one learnable; that, one in every second batch and one over the pairs of all ranks; one whose classes are divided |
| loaders | one, or two of which the shorter one begins anew |
| frozen | the first layer in the first epoch, the last one in the third |
"""

from __future__ import annotations

import itertools

import pytest
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.refusals import assert_same_error
from tests.strategies.matrix_jobs import Cell, Modes, fit_alone, fit_on_ranks, whole

CELLS = """
precision   optimisation    every  clip   ddp       averaged  fits        compiled  recomputed  losses   loaders  frozen
float64     automatic       1      norm   static    EMA       validating  model     encoder     several  one      in-turn
float64     automatic       3      norm   PowerSGD  SWA       validating  no        encoder     one      two      no
float64     two-optimizers  1      norm   views     EMA       twice       no        encoder     one      one      no
float64     two-optimizers  3      no     plain     EMA       once        loss      no          one      one      in-turn
float64     two-optimizers  3      value  fp16      no        twice       model     encoder     shards   one      in-turn
float64     GAN-order       1      value  unused    no        twice       loss      no          one      one      no
32-true     automatic       1      no     static    no        twice       no        no          one      two      in-turn
32-true     automatic       1      norm   unused    SWA       validating  no        encoder     several  two      in-turn
32-true     automatic       3      no     static    SWA       once        model     encoder     shards   one      no
32-true     automatic       3      norm   views     no        once        no        no          one      two      in-turn
32-true     two-optimizers  1      norm   PowerSGD  no        once        loss      encoder     shards   two      no
32-true     two-optimizers  1      value  plain     no        once        model     no          several  one      no
32-true     two-optimizers  3      no     fp16      EMA       twice       no        no          one      two      in-turn
32-true     GAN-order       3      value  unused    EMA       validating  loss      encoder     shards   two      in-turn
bf16-mixed  automatic       1      no     views     EMA       validating  model     no          one      two      in-turn
bf16-mixed  automatic       1      norm   plain     SWA       twice       loss      no          shards   one      no
bf16-mixed  automatic       3      value  static    SWA       twice       loss      encoder     shards   one      no
bf16-mixed  automatic       3      value  fp16      no        once        no        encoder     several  one      in-turn
bf16-mixed  two-optimizers  3      value  unused    EMA       validating  no        no          shards   one      no
bf16-mixed  two-optimizers  3      value  PowerSGD  EMA       twice       no        no          several  one      no
bf16-mixed  GAN-order       1      value  unused    EMA       once        no        no          shards   one      no
16-mixed    automatic       1      norm   static    EMA       twice       no        no          shards   one      in-turn
16-mixed    automatic       3      no     fp16      SWA       validating  loss      encoder     one      one      no
16-mixed    two-optimizers  1      no     PowerSGD  EMA       twice       model     no          several  one      no
16-mixed    two-optimizers  1      value  views     no        once        no        encoder     shards   one      no
16-mixed    two-optimizers  3      norm   plain     no        validating  no        encoder     several  two      in-turn
16-mixed    GAN-order       3      norm   unused    no        once        no        encoder     several  two      no
bf16-true   automatic       1      no     static    EMA       once        no        no          shards   one      in-turn
bf16-true   automatic       3      value  views     SWA       twice       loss      encoder     several  one      in-turn
bf16-true   two-optimizers  1      no     PowerSGD  no        validating  no        encoder     one      two      no
bf16-true   two-optimizers  1      norm   fp16      EMA       once        no        no          shards   two      no
bf16-true   two-optimizers  3      no     plain     no        twice       no        encoder     one      one      in-turn
bf16-true   GAN-order       1      no     unused    no        validating  model     encoder     one      one      no
"""

# of the least precise level in a cell; where two round in turn, both count
ROUNDING = {"float64": 1e-9, "32-true": 1e-4, "16-mixed": 0.1, "bf16-mixed": 0.2, "bf16-true": 0.3, "fp16": 0.1}

# what cannot be, and who says so: by Lightning's error, or by ours on every rank with these words
SEARCH = ("frozen inside training_step", "find_unused_parameters=True")
BY_HAND = ("static_graph=True", "automatic_optimization=False")
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("GAN-order", "plain"): SEARCH,
    ("GAN-order", "static"): BY_HAND,
    ("two-optimizers", "static"): BY_HAND,
    ("GAN-order", "views"): SEARCH,
    ("GAN-order", "fp16"): SEARCH,
    ("GAN-order", "PowerSGD"): ("frozen during the fit", "ddp_comm_state"),
    ("PowerSGD", "in-turn"): ("frozen during the fit", "ddp_comm_state", "encoder.0.weight"),
    ("two-optimizers", "SWA"): ("Lightning: SWA currently works with 1 `optimizer`",),
    ("GAN-order", "SWA"): ("Lightning: SWA currently works with 1 `optimizer`",),
}


def table() -> list[Cell]:
    modes, *rows = [line.split() for line in CELLS.strip().splitlines()]
    return [dict(zip(modes, row, strict=True)) for row in rows]


TABLE = table()
PLAIN: Cell = dict.fromkeys(TABLE[0], "no") | {
    "precision": "float64",
    "optimisation": "automatic",
    "every": "1",
    "ddp": "plain",
    "fits": "once",
    "losses": "one",
    "loaders": "one",
}


def name_of(cell: Cell) -> str:
    return ", ".join(level if level != "no" else f"{mode} no" for mode, level in cell.items() if level != PLAIN[mode])


def test_every_two_levels_meet() -> None:
    levels = {mode: {cell[mode] for cell in TABLE} for mode in PLAIN}
    assert all(PLAIN[mode] in found for mode, found in levels.items())
    missing = []
    for one, other in itertools.combinations(PLAIN, 2):
        met = {(cell[one], cell[other]) for cell in TABLE}
        met |= {pair for pair in REFUSED if pair[0] in levels[one] and pair[1] in levels[other]}
        missing += sorted(set(itertools.product(levels[one], levels[other])) - met)
    assert not missing
    assert not [cell for cell in TABLE for pair in REFUSED if set(pair) <= set(cell.values())]


def how_far_off(found: dict[str, Tensor], truth: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """The norm of what is wrong over the norm of what training has moved, of the part (encoder, head, loss) with the most."""
    assert sorted(found) == sorted(truth)
    worst = 0.0
    for part in sorted({name.split(".")[0] for name in truth}):
        names = [name for name in truth if name.startswith(part)]
        off = sum((found[name].double() - truth[name]).square().sum() for name in names)
        moved = sum((before[name] - truth[name]).square().sum() for name in names)
        assert moved > 1e-10, f"{part} learnt nothing"
        worst = max(worst, float((off / moved).sqrt()))
    return worst


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("number", range(len(TABLE)), ids=[name_of(cell) for cell in TABLE])
def test_a_cell_is_one_process(pool: RankPool, number: int) -> None:
    cell, world_size = TABLE[number], 2 + number % 2
    before = Modes(cell, ours=False).state_dict()
    found = whole(cell, pool.run(world_size, fit_on_ranks, cell))
    rounding = max(ROUNDING.get(level, 0.0) for level in cell.values())
    off = how_far_off(found, fit_alone(cell), before)
    assert off <= rounding, (off, rounding)


@pytest.mark.parametrize(("pair", "words"), REFUSED.items(), ids=[", ".join(pair) for pair in REFUSED])
def test_what_cannot_be_is_refused_by_name(pool: RankPool, pair: tuple[str, str], words: tuple[str, ...]) -> None:
    modes = {mode: level for cell in TABLE for mode, level in cell.items() if level in pair}
    errors = pool.errors(2, fit_on_ranks, {**PLAIN, **modes})
    if words[0].startswith("Lightning: "):
        assert all(words[0].removeprefix("Lightning: ") in error.message for error in errors)
    else:
        assert_same_error(errors, *words)
