"""What losses refuse: options that cannot be, and ranks that differ in an option, a mode, an order, a weight or a device.

Bad input of a loss and what cannot be exact are in `test_bad_input`, formulas over rows in `test_global_rows_refusals`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers
from torch import nn

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, ConfigurationError, GlobalBatchLoss, SigLipLoss
from lightning_ddp_losses.losses import MaxSimLoss, register_row_separable
from tests.losses import test_bad_input as bad_input
from tests.losses import test_contract as contract
from tests.losses import test_late_changes as late
from tests.losses import test_ranks_that_differ as differ
from tests.losses import test_same_weights as same_weights
from tests.losses.test_compile_tiles import MAKE, one_rank_compiles
from tests.losses.test_functions import dice
from tests.losses.test_global_rows_use import accumulate
from tests.losses.test_replicated_values import two_calls
from tests.losses.test_shard_as_dtensor import on_other_ranks, plain
from tests.losses.test_tile_kernels import MAKE as MAKE_OF_KERNELS
from tests.oracle import Place
from tests.refusals import Mistake, Refused, refusals, refusals_of_one_process


def mismatch(call: Callable[..., Any], *args: Any, words: Any = (), **row: Any) -> Refused:
    """What a program does with these arguments on each rank."""
    return Refused(lambda _: call(*args), words, "RankMismatchError", **row)


def apart(job: Callable[[str], None], kind: str) -> Refused:
    return Refused(lambda _: job(kind), (": devices: expected", "on cpu", "on meta"), "InputError")


def unreduced(kind: str, **options: Any) -> Refused:
    words = "Wrap the loss in DistributedDataParallel, or put it in the model", "check_weights=False"
    return mismatch(partial(same_weights.train, kind, wrapped=False, **options), words=words)


LABELS = "0 to 3 (num_classes=4), got 1 to 4"
ORDER = "Call them in the same order on all ranks"
KEYS = ("tensors=0, 1['a'], 1['b']", "tensors=0, 1['b'], 1['a']")
ON_RANKS: dict[str, Refused] = {
    # an option or a mode
    **{
        f"compile_tiles on one rank: {name}": Refused(lambda _, name=name: one_rank_compiles(name), "compile_tiles")
        for name in MAKE
    },
    **{
        f"{name} changes on one rank after {calls} calls, {world} ranks": mismatch(
            late.changed, name, calls, (1,), ranks=world
        )
        for name in late.CASES
        for calls in (0, 1, 3)
        for world in (2, 3)
    },
    **{
        f"training on one rank: {name}": mismatch(late.other_mode, name, words="training=")
        for name in ("few rows", "tiles", "elements", "class shards", "a miner", "Public")
    },
    "a number that cannot be read": mismatch(late.unreadable, words="value of the call before"),
    "a number that differs by one per cent": mismatch(two_calls, 1.01, words="value of the call before"),
    **{
        f"{mode} on one rank: {kind}": mismatch(differ.call_in_mode, kind, mode, [1], words=differ.MODES[mode][1])
        for kind in differ.MODAL
        for mode in differ.MODES
        if (kind, mode) != ("miner", "no_grad")
    },
    "coefficients": Refused(
        lambda rank: contract.coefficients(Place(contract.PARTS, rank), "own_slice"),
        ("coefficient", "rank 0", "rank 1", "1.0", "3.0", "backward='sum'"),
        "RankMismatchError",
    ),
    # an order
    **{f"another order: {kind}": mismatch(differ.two, kind, True, words=ORDER) for kind in differ.ORDERED},
    **{
        f"another order and one loss more: {kind}": mismatch(differ.two, kind, True, 0, words=ORDER)
        for kind in differ.MADE_ALONE
    },
    **{
        f"another order of names: {kind}": mismatch(differ.named, kind, True, words=("which=first", "which=second"))
        for kind in differ.ORDERED[:-1]
    },
    "another order of copies": mismatch(differ.copies),
    **{
        f"another order of keys after {calls} calls": mismatch(differ.keys_in_order, ["ab", "ba"], calls, words=KEYS)
        for calls in (0, 2)
    },
    # weights: what only drifts is found once the part that differs is read
    **{
        f"weights that nobody reduces: {kind}, same_start={same}": unreduced(kind, same_start=same)
        for kind in same_weights.KINDS
        for same in (False, True)
    },
    "weights that nobody reduces in a window": unreduced("ArcFace", same_start=False, in_window=True),
    # a device
    **{f"{job.__name__}: {kind}": apart(job, kind) for job, kind in differ.JOBS},
    **{
        f"a batch on another device: {kind}": Refused(
            lambda _, kind=kind: differ.batch_apart(kind), "meta", "Exception", same=False
        )
        for kind in differ.PLACED
    },
    # labels are read later on an accelerator, and the error names the call
    **{
        f"labels out of range on an accelerator in call {at + 1}, divided={divided}": Refused(
            lambda _, divided=divided, at=at: contract.labels_on_an_accelerator(divided, at),
            (LABELS, *[f"labels of call {at + 1}"] * at),
        )
        for divided in (False, True)
        for at in (0, 1)
    },
    "a mesh of other ranks": Refused(
        lambda _: on_other_ranks(), ("mesh", "[0, 2, 1] for classes over ranks [0, 1, 2]"), ranks=3
    ),
    **{
        f"a window: {kind}": Refused(
            lambda _, kind=kind: accumulate(kind), "accumulation window: what is back-propagated", same=False
        )
        for kind in ("a formula", "mode rows", "views")
    },
    "MaxSim: masks in one process": Refused(
        lambda _: MaxSimLoss()(torch.randn(2, 3, 4), [torch.randn(2, 3, 4)] * 2, documents_mask=[None]),
        "one for each column",
        "InputError",
        0,
    ),
    # an error of one rank, which keeps its own
    "an error of the loss": Refused(
        lambda _: bad_input.foreign_error(), "no loss for you", "PeerError", own={1: "ValueError"}
    ),
    "a warning that is an error": Refused(lambda _: bad_input.warned(), "rank 0", "PeerError", own={0: "UserWarning"}),
    "a device that is lost": Refused(
        lambda _: contract.break_before_the_gather(),
        "the device is lost",
        "PeerError",
        own={1: "RuntimeError: the device is lost"},
    ),
}
test_on_ranks = refusals(__name__, "ON_RANKS")


def supcon(**options: Any) -> Callable[[], nn.Module]:
    return lambda: GlobalBatchLoss(pml.SupConLoss(), **options)


def reducing_nothing(make: Callable[[Any], nn.Module]) -> tuple[Callable[[], nn.Module], str]:
    return lambda: GlobalBatchLoss(make(reducers.DoNothingReducer())), "DoNothingReducer"


CHOICES = "one of 'all', 'ring'"
OPTIONS: dict[str, Mistake] = {
    "tile_bytes=0": (supcon(tile_bytes=0), "tile_bytes"),
    "tile_bytes=-4": (supcon(tile_bytes=-4), "tile_bytes"),
    "tile_bytes=1.5": (supcon(tile_bytes=1.5), "tile_bytes"),
    "gather='some'": (supcon(gather="some"), "gather"),
    "gather='ring'": (supcon(gather="ring"), "expected 'all', got 'ring'"),
    "gather='ring' in rows": (supcon(gather="ring", mode="rows"), "`tile_bytes` bounds the distances"),
    **{
        f"compile_tiles={option!r} of {name}": (
            partial(make, compile_tiles=option),
            "compile_tiles: expected one of False, True, 'auto', got",
        )
        for name, make in MAKE_OF_KERNELS.items()
        for option in ("triton", None, 1)
    },
    "CLIP: temperature 0": (lambda: ClipLoss(0.0), "expected"),
    "CLIP: label_smoothing=1": (lambda: ClipLoss(label_smoothing=1.0), "expected"),
    "CLIP: max_scale=-1": (lambda: ClipLoss(max_scale=-1.0), "expected"),
    "CLIP: tile_bytes=0": (lambda: ClipLoss(tile_bytes=0), "expected"),
    "CLIP: gather='some'": (lambda: ClipLoss(gather="some"), ("expected", CHOICES)),
    "SigLIP: temperature -1": (lambda: SigLipLoss(init_temperature=-1), "expected"),
    "SigLIP: gather='some'": (lambda: SigLipLoss(gather="some"), ("expected", CHOICES)),
    "MaxSim: scale 0": (lambda: MaxSimLoss(0.0), "scale: expected above 0"),
    "a class of losses": (lambda: GlobalBatchLoss(nn.MSELoss), "Make an instance"),
    "a name": (lambda: GlobalBatchLoss("dice"), "Give the function that computes the loss"),
    "nothing": (lambda: GlobalBatchLoss(None), "Give the function that computes the loss"),
    "a forward": (lambda: GlobalBatchLoss(nn.Linear(2, 2).forward), "Give the module"),
    "a function with mode='elements'": (lambda: GlobalBatchLoss(dice, mode="elements"), "GlobalBatchLoss(dice): mode"),
    "a function with mode='moments'": (lambda: GlobalBatchLoss(dice, mode="moments"), "GlobalBatchLoss(dice): mode"),
    "a reducer of nothing": reducing_nothing(lambda r: pml.ContrastiveLoss(reducer=r)),
    "a reducer of nothing in one of two": reducing_nothing(
        lambda r: pml.MultipleLosses([pml.NTXentLoss(), pml.ContrastiveLoss(reducer=r)])
    ),
    "a reducer of nothing in a memory": reducing_nothing(
        lambda r: pml.CrossBatchMemory(pml.ContrastiveLoss(reducer=r), 4)
    ),
    "tiles that are none": (
        lambda: register_row_separable(contract.OwnTiles, pair_loss=nn.Linear),
        "pair_loss: expected a subclass of PairLoss",
    ),
    "a shard without ranks as a DTensor": (
        lambda: ClassShardedLoss(plain("ArcFaceLoss")).weight_as_dtensor(),
        "expected a process group, got none",
    ),
}
test_options = refusals_of_one_process(OPTIONS, ConfigurationError)
