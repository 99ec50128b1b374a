"""What the strategies refuse: bad input on one rank or on all, programs and options that cannot work, ranks that differ.

Models that `fully_shard` divides are in `test_fsdp_refusals`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightning_ddp_losses
from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss
from tests.oracle import batches
from tests.refusals import Refused, refusals
from tests.strategies import test_evaluation as evaluation
from tests.strategies import test_uneven_ends as uneven
from tests.strategies.jobs import OPTIMIZERS, TASK, Job, fit, make_loss
from tests.strategies.sharded_jobs import Sharded, fit_sharded
from tests.strategies.test_calls import SkipsALoss, ride, ride_on_first_rank
from tests.strategies.test_coefficients import (
    LAST,
    WRONG_AT,
    BroadcastsAfter,
    KeptOnRankOne,
    ShardedInParts,
    WeighsTheLast,
    fit_wrong,
)
from tests.strategies.test_freezing import FrozenInside, FrozenLayer
from tests.strategies.test_global_losses import TwoHeads
from tests.strategies.test_hidden import PLACES, Hidden, fit_hidden
from tests.strategies.test_names import Own
from tests.strategies.test_parts import BesideTheWorld, DisagreesInAPart, InParts
from tests.strategies.test_shards import Adafactor, Clips, OtherClasses, OverlappingShard
from tests.strategies.test_undivided_data import Divided, Pairs, Sized, Whole
from tests.strategies.test_undivided_data import run as read

pytestmark = [pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"), *evaluation.pytestmark]


def training(
    make: Callable[[], Any],
    *words: str,
    strategy: Any = None,
    ranks: int = 2,
    options: dict[str, Any] | None = None,
    **row: Any,
) -> Refused:
    """A fit of a module under the strategy."""
    return Refused(lambda _: fit(make, strategy, **options or {}), words, ranks=ranks, **row)


# ---------------------------------------------------------------------- bad input of a loss


def with_nan(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    bad = torch.zeros_like(embeddings)
    bad[1, 2] = float("nan")
    return embeddings + bad, labels


SPOILS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], tuple[str, ...]]] = {
    "label too high": (lambda e, y: (e, y.clone().index_fill_(0, torch.tensor([1]), 17)), ("labels", "17", "4")),
    "label negative": (lambda e, y: (e, y.clone().index_fill_(0, torch.tensor([0]), -3)), ("labels", "-3")),
    "labels of floating dtype": (lambda e, y: (e, y.float()), ("labels", "float32")),
    "labels of bool": (lambda e, y: (e, y > 1), ("labels", "bool")),
    "too few labels": (lambda e, y: (e, y[:-1]), ("labels",)),
    "labels of two dimensions": (lambda e, y: (e, nn.functional.one_hot(y, TASK.classes)), ("labels",)),
    "embeddings too wide": (lambda e, y: (torch.cat([e, e[:, :1]], 1), y), ("embeddings", "5", "4")),
    "embeddings too narrow": (lambda e, y: (e[:, :-1], y), ("embeddings", "3", "4")),
    "embeddings of three dimensions": (lambda e, y: (e[None], y), ("embeddings",)),
    "empty batch": (lambda e, y: (e[:0], y[:0]), ("empty",)),
    "NaN": (with_nan, ("NaN",)),
}


class Spoiled(Job):
    def __init__(self, case: str, ranks: tuple[int, ...], at: int, loss: str = "ArcFaceLoss") -> None:
        super().__init__(loss)
        self.case, self.ranks, self.at = case, ranks, at

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        if index == self.at and self.global_rank in self.ranks:
            embeddings, labels = SPOILS[self.case][0](embeddings, labels)
        return self.loss(embeddings, labels)


def spoiled(
    case: str, ranks: tuple[int, ...], world: int = 2, at: int = 1, loss: str = "ArcFaceLoss", *words: str
) -> Refused:
    return training(partial(Spoiled, case, ranks, at, loss), loss, *SPOILS[case][1], *words, ranks=world)


OTHER_LOSSES = ("SoftTripleLoss", "ProxyNCALoss", "NormalizedSoftmaxLoss", "SubCenterArcFaceLoss")
BAD_INPUT: dict[str, Refused] = {
    **{f"{case} on rank {k}": spoiled(case, (k,), 2, 1, "ArcFaceLoss", f"rank {k}") for case in SPOILS for k in (0, 1)},
    **{f"{case} on all ranks": spoiled(case, (0, 1)) for case in SPOILS},
    **{f"{case} in one process": spoiled(case, (0,), 1, 0) for case in SPOILS},
    **{
        f"{case} in {loss}": spoiled(case, (2,), 3, 1, loss, "rank 2")
        for case in ("label too high", "embeddings too wide", "empty batch", "NaN")
        for loss in OTHER_LOSSES
    },
}
test_bad_input = refusals(__name__, "BAD_INPUT")


# ---------------------------------------------------------------------- a rank that fails


class Breaks(Job):  # the user's own code fails on one rank
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value = self.loss(embeddings, labels)
        if index == 1 and self.global_rank == 1:
            raise ZeroDivisionError("the user's own")
        return value


class ReturnsNothing(Job):
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        return None if index == 1 and self.global_rank == 1 else super().objective(features, labels, index)


class FailsInBackward(Job):  # the gradient of rank 1's loss cannot be computed on the second batch
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value: Tensor = self.loss(embeddings, labels)
        if index == 1 and self.global_rank == 1:
            value.register_hook(self.fail)  # type: ignore[no-untyped-call]
        return value

    @staticmethod
    def fail(_: Tensor) -> None:
        raise ArithmeticError("this gradient fails")


class BreaksItsLoader(uneven.Rows):
    def train_dataloader(self) -> Any:
        if dist.get_rank() == 1:
            raise ArithmeticError("no such folder")
        return uneven.part(uneven.UNEVEN, 0)


def fit_on_a_loader_that_fails(ends: str) -> Refused:
    load = partial(uneven.failing, False)
    return Refused(
        lambda _: uneven.train(uneven.Rows, load, ends),
        ("no more disk", "rank 1", "fetching a training batch"),
        ranks=3,
        own={1: "no more disk"},
    )


def evaluate_with_a_failure(stage: str, where: str) -> Refused:
    words = ("rank 1", "Unreadable: row 16")
    own = {1: "Unreadable"}
    return Refused(lambda _: evaluation.run(stage, where), words, "PeerError", 3, own=own)


FAILURES: dict[str, Refused] = {
    "the user's own error on one rank": training(
        Breaks, "ZeroDivisionError", "rank 1", ranks=3, own={1: "ZeroDivisionError"}
    ),
    # Lightning refuses a step without a loss under DDP on that rank only. The other ranks wait in our handshake for it.
    "a step without a loss on one rank": training(ReturnsNothing, "rank 1", own={1: "returning None"}),
    **{
        f"an error inside backward, {ranks} ranks": training(
            FailsInBackward, "this gradient fails", ranks=ranks, own={1: "this gradient fails"}
        )
        for ranks in (2, 3)
    },
    **{f"a loader that fails, {ends}": fit_on_a_loader_that_fails(ends) for ends in ("error", "stop")},
    "a loader that cannot be made": Refused(
        lambda _: uneven.train(BreaksItsLoader, lambda rank: None),
        ("no such folder", "rank 1", "train_dataloader"),
        own={1: "no such folder"},
    ),
    **{
        f"{where} of {stage}": evaluate_with_a_failure(stage, where)
        for where in ("step", "data")
        for stage in ("fit", "validate", "test", "predict")
    },
    **{
        f"one rank of two groups, {loss}": training(
            partial(InParts, loss), "no such sample", ranks=4, same=False, own={1: "ValueError: no such sample"}
        )
        for loss in ("pairs", "classes")
    },
    **{
        f"the first step {place} a loss over a part": training(
            partial(BesideTheWorld, place), "no such sample", ranks=3, same=False, own={0: "ValueError: no such sample"}
        )
        for place in ("before", "between", "after")
    },
}
test_a_rank_that_fails_ends_all = refusals(__name__, "FAILURES")


# ---------------------------------------------------------------------- ranks that differ

# what the module of rank 1 has otherwise, and the name that the error says
ODD_PARTS: dict[str, tuple[str, Callable[[nn.Module, bool], Any]]] = {
    "name": ("other", lambda job, odd: job.add_module("other" if odd else "extra", nn.Linear(2, 2))),
    "order": ("a.weight", lambda job, odd: [job.add_module(n, nn.Linear(2, 2)) for n in ("ba" if odd else "ab")]),
    "shape": ("extra", lambda job, odd: job.add_module("extra", nn.Linear(2, 3 if odd else 2))),
    "dtype": (
        "extra",
        lambda job, odd: job.add_module("extra", nn.Linear(2, 2).to([torch.float32, torch.float64][odd])),
    ),
    "missing": ("loss.W", lambda job, odd: odd and delattr(job.loss, "W")),
    "frozen": ("loss.W", lambda job, odd: job.loss.requires_grad_(not odd)),
    "buffer": ("table", lambda job, odd: job.register_buffer("table", torch.zeros(3 if odd else 2))),
}


class NamesDiffer(Job):
    def __init__(self, case: str) -> None:
        self.case = case
        super().__init__()

    def build(self, loss: str) -> None:
        super().build(loss)
        ODD_PARTS[self.case][1](self, dist.get_rank() == 1)


class OtherMargin(Job):  # rank 1 has another margin, which no shape shows
    def build(self, loss: str) -> None:
        torch.manual_seed(1)
        margin = 28.6 + dist.get_rank()
        self.loss = pml.ArcFaceLoss(TASK.classes, TASK.dim, margin=margin).double()


OPTIONS: dict[str, dict[str, Any]] = {"accumulation": {"accumulation": "window"}, "bucket_cap_mb": {"bucket_cap_mb": 1}}


def fit_otherwise(what: str) -> Any:
    """Rank 1 has another release or another option."""
    is_other = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        if is_other and what == "torch":
            patch.setattr(torch, "__version__", "2.12.1+cu130")
        if is_other and what == "package":
            patch.setattr(lightning_ddp_losses, "__version__", "0.0.9")
        options = OPTIONS.get(what, {}) if is_other else {}
        precision = "bf16-mixed" if is_other and what == "precision" else "64-true"
        return fit(OtherMargin if what == "loss" else Job, options, precision=precision)


def set_up(what: str, *words: str) -> Refused:
    return Refused(lambda _: fit_otherwise(what), words, "RankMismatchError")


class SkipsAGlobalLoss(SkipsALoss):  # ... whose losses meet in forward and in backward
    names = ("first", "second", "third")

    def build(self, loss: str) -> None:
        for index, name in enumerate(self.names):
            setattr(self, name, GlobalBatchLoss(pml.CircleLoss(m=0.3 + 0.1 * index), mode="rows"))


def skipping(skipped: str, *words: str, make: type[SkipsALoss] = SkipsALoss, **row: Any) -> Refused:
    return training(partial(make, 1, (1,), skipped), *words, **row)


class TwoHeadsSwapped(TwoHeads):  # rank 1 calls them in another order too
    swapped = True


class FrozenByRank(Job):  # from batch 2 on one rank trains less; buffers, which DDP broadcasts in forward
    def __init__(self, trains: int, parts: slice) -> None:
        super().__init__()
        self.trains, self.parts = trains, parts
        self.register_buffer("steps_seen", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        for part in list(self.encoder)[self.parts]:
            part.requires_grad_(index < 2 or self.global_rank == self.trains)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        self.steps_seen += 1
        return super().objective(features, labels, index)


class HiddenOnOneRank(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        if dist.get_rank() == 1:
            self.more = [make_loss(seed=3)]

    def optimised(self) -> list[nn.Parameter]:
        return [*self.parameters(), *(p for loss in getattr(self, "more", []) for p in loss.parameters())]


COEFFICIENTS = ("coefficient", "rank 0: 0.5", "rank 1: 3.0")
PARTS = {"layer": slice(0, 1), "encoder": slice(None)}
DIFFERENCES: dict[str, Refused] = {
    # parameters are compared before DDP's first broadcast
    **{
        f"parameters: {case}": training(partial(NamesDiffer, case), said, "rank 0", "rank 1")
        for case, (said, _) in ODD_PARTS.items()
    },
    "torch": set_up("torch", "set-up: torch: expected the same on every rank"),
    "package": set_up("package", "lightning_ddp_losses=0.0.9"),
    "accumulation": set_up("accumulation", "strategy option accumulation='window'"),
    "precision": set_up("precision", "precision=bf16-mixed"),
    "bucket_cap_mb": set_up("bucket_cap_mb", "strategy option bucket_cap_mb=1"),
    "loss": set_up("loss", "loss loss=ArcFaceLoss(", "margin="),
    # losses that some ranks do not call, or call in another order
    **{
        f"a loss skipped from batch {at} on by {skips} of {ranks}": training(
            partial(SkipsALoss, at, skips),
            *("ArcFaceLoss", "second", *(f"rank {rank}" for rank in skips)),
            ranks=ranks,
            unsaid="`first`",
        )
        for at in (0, 1, 2)
        for ranks, skips in ((2, (0,)), (2, (1,)), (3, (1,)), (3, (0, 2)))
    },
    "all losses skipped": skipping("both", "first", "second", "rank 1", ranks=3),
    "a loss skipped under accumulation": training(
        partial(SkipsALoss, 0, (1,)), "second", "rank 1", options={"accumulate_grad_batches": 2}
    ),
    "a loss skipped, found by its gradient": skipping("second", "second", "rank 1", strategy={"check_calls": False}),
    "a loss skipped, with unused parameters": skipping(
        "second", "second", "rank 1", strategy={"find_unused_parameters": True}
    ),
    # A rank does not go into a loss's backward exchange before its handshake has met the peers, who wait in a forward.
    **{
        f"a global loss skipped: {skipped}": skipping(skipped, words, make=SkipsAGlobalLoss, ranks=3)
        for skipped, words in {
            "first": "rank 1: configuration",
            "second": "rank 1: configuration",
            "third": "rank 1: backward",
            "both": "rank 1: backward",
        }.items()
    },
    "losses of one kind in another order": training(
        TwoHeadsSwapped, "  rank 0: which=near\n  rank 1: which=far\n", kind="RankMismatchError"
    ),
    "widths in a part of the ranks": training(
        partial(DisagreesInAPart, "pairs"), "('rows', 3)", "('rows', 2)", kind="RankMismatchError", ranks=4, same=False
    ),
    "a payload on one rank": Refused(lambda _: ride_on_first_rank(), ("backward: notes", "payload")),
    "what a judge of payloads raises": Refused(lambda _: ride({}, 3, fail_at=1), "told to", ranks=3),
    # what a rank multiplies a global value by
    **{
        f"the coefficient of {kind} on {ranks} ranks": Refused(
            lambda _, kind=kind: fit_wrong(kind), (*COEFFICIENTS, f"after {WRONG_AT} steps"), ranks=ranks
        )
        for kind in ("SupConLoss", "rows", "ArcFaceLoss", "divided", "metric")
        for ranks in (2, 3)
    },
    # No call follows that could compare it.
    "the coefficient in the last batch of a fit": Refused(
        lambda _: fit_wrong("SupConLoss", limit_train_batches=WRONG_AT + 1), ("coefficient", f"after {WRONG_AT} steps")
    ),
    "a coefficient beside a value without backward": training(KeptOnRankOne, *COEFFICIENTS),
    "the last coefficient without checks of calls": training(
        WeighsTheLast, *COEFFICIENTS, strategy={"check_calls": False}
    ),
    # what a rank trains
    **{
        f"rank {trains} trains more, {name}": training(
            partial(FrozenByRank, trains, part), "frozen since the model was wrapped", "encoder.0.weight"
        )
        for trains in (0, 1)
        for name, part in PARTS.items()
    },
    "a loss hidden on one rank": training(HiddenOnOneRank, "more[0]", "rank 1"),
    "a loss hidden on one rank, adopt=True": training(HiddenOnOneRank, "more[0]", "rank 1", strategy={"adopt": True}),
    # rows of a data set
    "rows of validation": Refused(lambda _: evaluation.validate_rows(5, 2, more=1), ("rows=5", "rows=6"), same=False),
    "batches of a validation step that exchanges": Refused(
        lambda _: evaluation.validate_rows(5, 1, True),
        (
            "validation step, which exchanges something between ranks: expected as many batches",
            "rank 1: 2 batches",
        ),
    ),
    # torchmetrics' own gather of them ends the process
    "list states of different lengths": Refused(
        lambda _: evaluation.retrieve(evaluation.as_is, 5),
        ("list states found.indexes", "rank 0: 3 batches", "rank 1: 2 batches", "lightning_ddp_losses.synced"),
    ),
}
test_ranks_that_differ = refusals(__name__, "DIFFERENCES")


# ---------------------------------------------------------------------- what cannot be trained


class WithPlain(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.plain = nn.CrossEntropyLoss()


class DividedParameters(Job):
    def configure_model(self) -> None:
        fully_shard(self.encoder, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class HiddenLayer(Job):  # what hides is no loss by type, but an optimizer trains it
    def build(self, loss: str) -> None:
        super().build(loss)
        torch.manual_seed(5)
        self.tools = [nn.Linear(TASK.dim, TASK.dim).double()]

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.tools[0](embeddings), labels)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["sgd"]([*self.parameters(), *self.tools[0].parameters()])


class LooseParameter(Job):  # an optimizer holds a bare tensor that belongs to no module
    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["sgd"]([*self.parameters(), torch.zeros(3, requires_grad=True)])


class TwoParts(Job):  # optimizers take turns in manual optimisation, and each step leaves out a layer
    by_hand = True

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(TASK.dim, 1).double() for _ in range(2)])

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.heads[index % 2](self.encoder(batch[0])).mean())
        optimizer.step()


class Wrapper(Job):
    def build(self, loss: str) -> None:
        self.loss = DistributedLossWrapper(pml.SupConLoss())


class Memory(Job):
    def build(self, loss: str) -> None:
        memory = pml.CrossBatchMemory(pml.SupConLoss(), embedding_size=4)
        self.loss = pml.MultipleLosses([pml.SupConLoss(), memory])


def hidden(place: str, *words: str, optimise: bool = True, **row: Any) -> Refused:
    make = partial(Hidden, place, optimise=optimise)
    return Refused(lambda _: fit_hidden(make, {}, place), ("ArcFaceLoss", PLACES[place][0], *words), **row)


def frozen_inside(ranks: tuple[int, ...], at: int) -> Refused:
    make = partial(FrozenInside, ranks, at)
    return training(make, "encoder.0.weight", "inside training_step", "on_train_batch_start")


def same_rows(*kinds: type[Whole], stage: str = "fit", text: str, ranks: int = 2, **row: Any) -> Refused:
    return Refused(lambda _: read(stage, *kinds), text, ranks=ranks, **row)


FEW = "expected at least one for each of 3 ranks, got 2"
SAME_ROWS = "batches of {} in training (F71): expected rows of its own for each rank, got the same on all ranks"
IN_STAGES = {"validate": "validation", "test": "test", "predict": "predict", "validation in fit": "validation"}
PROGRAMS: dict[str, Refused] = {
    # names of losses
    "losses=['los']": training(WithPlain, "'los'", "loss", strategy={"losses": ["los"]}),
    "losses=['loss', 'head']": training(WithPlain, "'head'", "loss", strategy={"losses": ["loss", "head"]}),
    "losses='nothing.*'": training(WithPlain, "nothing.*", "loss", strategy={"losses": "nothing.*"}),
    "losses='('": training(WithPlain, "(", strategy={"losses": "("}),
    "losses=['']": training(WithPlain, "''", strategy={"losses": [""]}),
    "losses=[] with divided classes": training(
        Sharded, "losses=[]", strategy={"losses": []}, kind="ConfigurationError", same=False
    ),
    # losses that no rank can find, or that cannot be global
    **{f"a loss hidden in {place}": hidden(place, "adopt=True", kind="HiddenLossError") for place in PLACES},
    **{f"a loss hidden in {place} without an optimizer": hidden(place, optimise=False) for place in PLACES},
    "a layer that is hidden": training(HiddenLayer, "tools[0]", "Linear"),
    "a parameter of no module": training(LooseParameter),
    "a parameter of no module, adopt=True": training(LooseParameter, strategy={"adopt": True}),
    "global_batch='auto' with a wrapper": training(
        Wrapper, "DistributedLossWrapper", strategy={"global_batch": "auto"}, kind="ConfigurationError", same=False
    ),
    "global_batch='auto' with a memory": training(
        Memory, "CrossBatchMemory", strategy={"global_batch": "auto"}, kind="ConfigurationError", same=False
    ),
    # what DDP waits for
    **{
        f"a layer frozen inside {'the last' if at > 1 else 'a'} step by {ranks}": frozen_inside(ranks, at)
        # in the last step, of which torch says nothing, the gradients would stay those of one rank
        for at in (1, len(batches(TASK)) - 1)
        for ranks in ((0, 1), (0,), (1,))
    },
    "a hook that keeps something of each bucket": training(
        FrozenLayer, "encoder.0.weight", "ddp_comm_state", strategy={"ddp_comm_state": {"of": "buckets"}}
    ),
    "unused parameters": training(
        TwoParts,
        "strategy='ddp_losses_find_unused_parameters_true'",
        "strategy=DDPLossStrategy(find_unused_parameters=True)",
        kind="Exception",
        same=False,
        unsaid="'ddp_find",
    ),
    # shards
    "fully_shard": training(DividedParameters, "encoder", "DTensor", "fully_shard", "microbatched", "fsdp2_ddp_losses"),
    "an optimizer of whole weights": Refused(
        lambda _: fit_sharded(make=Adafactor), ("optimizer of loss.W", "Adafactor")
    ),
    "a user's own clipping": Refused(
        lambda _: fit_sharded(make=Clips), ("gradient_clip_val", "loss.W"), "ConfigurationError", same=False
    ),
    # Five classes on two ranks differ in shape, and DDP itself refuses them; six would be broadcast without a word.
    "shards under plain ddp": training(
        OtherClasses, "ddp_losses", strategy="ddp", kind="RankMismatchError", same=False
    ),
    "ranges that overlap": training(OverlappingShard, "classes of `rows`", "rank 1: 0 to 2 of 4"),
    **{
        f"shards that are broadcast after batch {at}": training(
            Sharded,
            *("ClassShardedLoss(ArcFaceLoss): weight", "Something broadcast the shards"),
            options={"callbacks": [BroadcastsAfter(at)]},
        )
        for at in (LAST - 1, LAST)
    },
    "shards of one part that are broadcast": training(
        ShardedInParts,
        "Something broadcast the shards",
        ranks=4,
        same=False,
        options={"callbacks": [BroadcastsAfter(LAST, [0, 1])]},
    ),
    # data
    "fewer rows of validation than ranks": Refused(
        lambda _: evaluation.validate_rows(2, 2), f"rows of the validation loader: {FEW}", ranks=3
    ),
    "fewer rows of prediction than ranks": Refused(lambda _: evaluation.predict_few(), FEW, ranks=3),
    "a limit that leaves a rank without batches": Refused(
        lambda _: evaluation.retrieve(lightning_ddp_losses.synced, 3, 0.5),
        ("batches of the validation loader within the Trainer's limit", "rank 0: 1 of 2", "rank 1: 0 of 1"),
    ),
    "a data set that all ranks read as a whole": same_rows(Whole, text=SAME_ROWS.format("Whole")),
    "a data set of a known length": same_rows(Sized, text=SAME_ROWS.format("Sized")),
    "a data set that two of three ranks read": same_rows(Pairs, text="got the same on ranks 0, 1", ranks=3),
    # the second of two loaders
    **{
        f"a data set that all ranks read in {stage}": same_rows(
            Divided, Whole, stage=stage, text=f"batches of Whole in {name} (F71)"
        )
        for stage, name in IN_STAGES.items()
    },
}
test_programs = refusals(__name__, "PROGRAMS")


# ---------------------------------------------------------------------- options, before there are ranks


def options(*words: str, make: Callable[..., Any] = DDPLossStrategy, **given: Any) -> Refused:
    return Refused(lambda _: make(**given), words, "ConfigurationError", 0)


def with_fabric(name: str) -> Refused:
    words = ("GlobalBatchLoss", "fabric.setup_module", repr(name))
    return options(*words, make=Fabric, strategy=name, accelerator="cpu", devices=2)


def unknown(*words: str, **given: Any) -> Refused:
    return options("DDPLossStrategy: options: expected its own", *words, **given)


OPTIONS_ALONE: dict[str, Refused] = {
    **{f"losses={value}": options("expected", losses=value) for value in (3, [1], None)},
    **{f"loss_reduce_dtype={value}": options("expected", loss_reduce_dtype=value) for value in ("float17", torch.int8)},
    "adopted": unknown("Did you mean adopt?", adopted=[0]),
    "loss": unknown("Did you mean losses?", loss=[0]),
    "find_unused_parameter": unknown("Did you mean find_unused_parameters?", find_unused_parameter=[0]),
    "process_group_backends": unknown("Did you mean process_group_backend?", process_group_backends=[0]),
    "xyz": unknown("got xyz", xyz=[0]),
    "device_ids": unknown("got device_ids", device_ids=[0]),
    "an option of a subclass": options("Did you mean patience?", make=Own, patienc=2),
    **{
        f"uneven={value!r}": options("one of 'error', 'join', 'stop'", uneven=value)
        for value in ("Join", "", True, None)
    },
    "uneven='join' without losses": options("plain ddp", losses=[], uneven="join"),
    "use_global_sampler without losses": options("which is plain ddp", losses=[], use_global_sampler=True),
    "use_global_sampler='yes'": options("expected one of True, False, got 'yes'", use_global_sampler="yes"),
    "evaluation='once'": options("evaluation: expected one of 'exact', 'padded', got 'once'", evaluation="once"),
    "fsdp2_ddp_losses under Fabric": with_fabric("fsdp2_ddp_losses"),
    "ddp_losses under Fabric": with_fabric("ddp_losses_spawn_find_unused_parameters_true"),
}
test_options = refusals(__name__, "OPTIONS_ALONE")
