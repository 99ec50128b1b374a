"""The module stays the plain module: attributes, keys, optimizer groups, copies in the middle of fit, and after fit."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.counting import CountCollectives
from tests.fits import make_trainer, trainer_alone
from tests.oracle import batches
from tests.slow_parameters import slow_parameters
from tests.strategies.jobs import TASK, Job, fit, fit_alone, loader, make_loss, strategy_of
from tests.strategies.scenarios import LinearProbe, NestedLosses, SharedByTwoLosses


def portrait(module: nn.Module) -> dict[str, Any]:
    """All that a strategy could leave on a module, its submodules and its parameters."""
    found: dict[str, Any] = {}
    # (Lightning leaves `forward` on a LightningModule that was in DDP)
    for name, child in module.named_modules():
        own = {k: v for k, v in vars(child).items() if k != "_trainer" and (name or k != "forward")}
        found[name] = {k: sorted(v) if isinstance(v, dict) else type(v).__name__ for k, v in own.items()}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        hooks = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        found[f"tensor {name}"] = (sorted(vars(tensor)), [bool(hook) for hook in hooks], tensor.dtype)
    return found


class Watch(Callback):  # what the user sees in the middle of fit
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.keys = list(module.state_dict())
        self.names = [name for name, _ in module.named_parameters()]
        self.groups = [[p.shape for p in group["params"]] for group in trainer.optimizers[0].param_groups]
        assert module.loss.W is dict(module.named_parameters())["loss.W"]
        assert isinstance(module.loss, type(make_loss()))
        assert module.loss.get_logits(torch.ones(2, TASK.dim, dtype=torch.float64)).shape == (2, TASK.classes)


def watched(strategy: Any) -> tuple[list[str], list[str], list[Any]]:
    watch = Watch()
    fit(Job, strategy, callbacks=[watch])
    return watch.keys, watch.names, watch.groups


def test_keys_names_and_groups_are_those_of_the_plain_module(pool: RankPool) -> None:
    plain = pool.run(2, watched, "ddp")
    assert pool.run(2, watched, {}) == plain
    assert plain[0][0] == list(Job().state_dict())


TWINS: dict[str, Callable[[Any], Any]] = {
    "deepcopy of module": copy.deepcopy,
    "deepcopy of loss": lambda module: copy.deepcopy(module.loss),
    "pickle of module": lambda module: pickle.loads(pickle.dumps(module)),
    "pickle of loss": lambda module: pickle.loads(pickle.dumps(module.loss)),
    "compile": lambda module: torch.compile(module.loss, backend="eager"),
    "compile of a copy": lambda module: torch.compile(copy.deepcopy(module.loss), backend="eager")._orig_mod,
}


class CopyOnRank0(Callback):  # copies, pickles and compiles on rank 0 only, where a collective would hang
    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_rank == 0 and index == 1:
            features, labels = batches(TASK)[0]
            plain = make_loss()
            plain.load_state_dict(module.loss.state_dict())
            embeddings = module.encoder(features).detach()
            twin = TWINS[self.what](module)
            loss = getattr(twin, "loss", twin)
            assert type(loss).forward is type(plain).forward or self.what == "compile"
            assert loss.W is not module.loss.W or self.what == "compile"
            assert torch.allclose(loss(embeddings, labels), plain(embeddings, labels), rtol=1e-12)
            twin(embeddings, labels) if loss is twin else None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.parametrize("what", slow_parameters(TWINS, {"compile"}))
def test_copies_on_one_rank_in_the_middle_of_fit(pool: RankPool, what: str) -> None:
    assert_all_close(pool.run(2, fit, Job, callbacks=[CopyOnRank0(what)]), fit_alone(Job))


def fit_and_look(make: Any, strategy: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    module = make()
    module.register_buffer("table", torch.ones(2))
    module._ddp_params_and_buffers_to_ignore = ["table"]  # the user's own mark stays
    before = portrait(module)
    trainer = make_trainer(strategy_of(strategy))
    trainer.fit(module, loader())
    assert module._ddp_params_and_buffers_to_ignore == ["table"]
    return before, portrait(module)


@pytest.mark.parametrize("make", [Job, NestedLosses, SharedByTwoLosses, LinearProbe], ids=lambda job: job.__name__)
def test_teardown_restores_the_module_exactly(pool: RankPool, make: type[Job]) -> None:
    plain = pool.run(2, fit_and_look, make, "ddp_find_unused_parameters_true")
    for (before, after), (_, plainly) in zip(pool.run(2, fit_and_look, make, {}), plain, strict=True):
        assert after == plainly
        assert without_root(before) == without_root(after)


def without_root(look: dict[str, Any]) -> dict[str, Any]:
    """Lightning itself changes the LightningModule in a fit; nobody changes what is inside."""
    return {name: entry for name, entry in look.items() if name}


def fail_and_look() -> tuple[dict[str, Any], dict[str, Any]]:
    from tests.strategies.test_refusals import Spoiled

    module = Spoiled("NaN", (1,), 1)
    before = portrait(module)
    try:
        make_trainer(strategy_of({})).fit(module, loader())
    except RuntimeError:
        return before, portrait(module)
    raise AssertionError("no error")


def test_teardown_restores_the_module_after_an_error(pool: RankPool) -> None:
    for before, after in pool.run(2, fail_and_look):
        assert without_root(before) == without_root(after)


def fit_again_and_again(strategies: list[Any]) -> dict[str, Tensor]:
    module = Job()
    for strategy in strategies:
        make_trainer(strategy_of(strategy)).fit(module, loader())
    return dict(module.state_dict())


def fit_again_alone(times: int) -> dict[str, Tensor]:
    module = Job()
    for _ in range(times):
        trainer_alone().fit(module, loader(1, 0))
    return dict(module.state_dict())


@pytest.mark.parametrize("strategies", [[{}, {}], [{}, "ddp"], ["ddp", {}], [{}, {}, "ddp", {}]], ids=str)
def test_the_same_module_fits_again_also_under_ddp(pool: RankPool, strategies: list[Any]) -> None:
    assert_all_close(pool.run(2, fit_again_and_again, strategies), fit_again_alone(len(strategies)))


class Validated(Job):
    def on_validation_start(self) -> None:
        self.values: list[float] = []

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        value = self.loss(self.encoder(batch[0]), batch[1])
        self.values.append(value.item())
        return value

    test_step = predict_step = validation_step


def evaluate(strategy: Any, stage: str) -> tuple[list[str], list[float], dict[str, Any]]:
    module, trainer = Validated(), make_trainer(strategy_of(strategy))
    with CountCollectives() as counter:
        getattr(trainer, stage)(module, loader())
    return counter.take(), module.values, portrait(module)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_runs_one_handshake_of_ours_at_its_end(pool: RankPool, stage: str) -> None:
    """Each barrier and broadcast of Lightning's opens with one more. A broadcast of an object sends its size and its bytes."""
    plain, ours = pool.run(2, evaluate, "ddp", stage), pool.run(2, evaluate, {}, stage)
    for (names, values, look), (our_names, our_values, our_look) in zip(plain, ours, strict=True):
        named_calls = names.count("barrier") + names.count("broadcast_") // 2
        assert named_calls
        assert Counter(our_names) - Counter(names) == {"alltoall_base_": 1 + named_calls}, Counter(names)
        assert not Counter(names) - Counter(our_names)
        assert our_values == values
        assert len(values) == TASK.steps
        assert our_look == look


def fit_with_validation(strategy: Any) -> dict[str, Tensor]:
    module = Validated()
    trainer = make_trainer(strategy_of(strategy), num_sanity_val_steps=2, max_epochs=2, val_check_interval=2)
    # the ranks validate on different numbers of batches: nothing of ours may wait for a peer there
    trainer.fit(module, loader(), loader())
    return dict(module.state_dict())


def test_validation_inside_fit(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fit_with_validation, {}), fit_alone(Job, max_epochs=2))


# What looks out for faults (peers that are gone, signals, checkpoints, restarts) takes next to nothing of a step in
# which none comes.

WATCHING = {"liveness", "interruptions", "rendezvous", "roll_call", "resume"}


class CountCalls(Callback):  # counts Python's calls by file, from the end of the second batch to that of the fourth
    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            sys.setprofile(self._count)
        if index == 3:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.by_file[Path(frame.f_code.co_filename).stem] += 1


def calls_by_file() -> Counter[str]:
    count = CountCalls()
    make_trainer("ddp_losses", callbacks=[count]).fit(Job(), loader())
    return count.by_file


def test_a_step_without_faults_pays_less_than_a_hundredth_for_them(pool: RankPool) -> None:
    """In calls, of a step of a few milliseconds; no message of their own goes to any rank."""
    for calls in pool.run(2, calls_by_file):
        watching = sum(calls[name] for name in WATCHING)
        assert 0 < watching <= sum(calls.values()) / 100, calls.most_common(20)
