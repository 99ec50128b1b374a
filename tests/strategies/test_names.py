"""The strategy's names, its options from Python and YAML, and `losses=[]`, which is plain DDP bit for bit."""

from __future__ import annotations

import copy
import re
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.testing import RankPool
from tests.counting import StepCollectives
from tests.doors import Advice, remember_global_value
from tests.fits import QUIET, make_trainer, said_on_rank_zero
from tests.processes import ROOT, run_python
from tests.strategies.jobs import TASK, Job, assert_as_alone, fit, loader, strategy_of
from tests.strategies.scenarios import Alternating, NoLossAtAll

DDP_NAMES = sorted(name for name in StrategyRegistry if StrategyRegistry[name]["strategy"] is DDPStrategy)


def test_every_name_of_ddp_has_its_twin() -> None:
    assert "ddp" in DDP_NAMES
    assert len(DDP_NAMES) >= 12
    for name in DDP_NAMES:
        twin = name.replace("ddp", "ddp_losses", 1)
        assert StrategyRegistry[twin]["strategy"] is DDPLossStrategy
        assert StrategyRegistry[twin]["init_params"] == StrategyRegistry[name]["init_params"]
    ours = [name for name in StrategyRegistry if StrategyRegistry[name]["strategy"] is DDPLossStrategy]
    assert len(ours) == len(DDP_NAMES)


@pytest.mark.parametrize("name", ["ddp_losses", "ddp_losses_find_unused_parameters_true"])
def test_the_names_train(pool: RankPool, name: str) -> None:
    assert_as_alone(pool, Job, name)


def yaml_strategy(arguments: dict[str, Any]) -> DDPLossStrategy:
    entry = {"class_path": "lightning_ddp_losses.DDPLossStrategy", "init_args": arguments}
    trainer = {"strategy": entry, "accelerator": "cpu", "devices": dist.get_world_size()}
    cli = LightningCLI(
        Job,
        run=False,
        save_config_callback=None,
        args={"trainer": trainer | QUIET},
        trainer_defaults={"plugins": [{"class_path": "lightning_ddp_losses.testing.RankEnvironment"}]},
        seed_everything_default=False,
    )
    assert isinstance(cli.trainer.strategy, DDPLossStrategy)
    cli.trainer.fit(cli.model, loader())
    return cli.trainer.strategy


def compare_yaml_and_python(arguments: dict[str, Any], python: dict[str, Any]) -> None:
    ours, theirs = yaml_strategy(arguments), strategy_of(python)
    make_trainer(theirs).fit(Job(), loader())
    private = ("_ddp_kwargs", "_timeout", "_start_method")
    assert {name: getattr(ours, name) for name in private} == {name: getattr(theirs, name) for name in private}
    assert ours._losses.options == theirs._losses.options


# Lightning's CLI calls jsonargparse by names that jsonargparse deprecates
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("arguments", "python"),
    [
        ({}, {}),
        ({"losses": ["loss"], "adopt": True, "check_calls": False}, None),
        ({"find_unused_parameters": True, "bucket_cap_mb": 1}, None),
        ({"losses": "lo.*", "gradient_as_bucket_view": True}, None),
        ({"loss_reduce_dtype": "bfloat16"}, {"loss_reduce_dtype": torch.bfloat16}),
        ({"timeout": "0:01:00"}, {"timeout": timedelta(minutes=1)}),
    ],
    ids=str,
)
def test_yaml_and_python_mean_the_same(pool: RankPool, arguments: dict[str, Any], python: Any) -> None:
    pool.run(2, compare_yaml_and_python, arguments, arguments if python is None else python)


def count(make: Any, strategy: Any, **options: Any) -> list[list[str]]:
    counter = StepCollectives()
    fit(make, strategy, callbacks=[counter], **options)
    return counter.steps


class ManyClasses(Job):  # its loss has more gradient than travels in a handshake
    def build(self, loss: str) -> None:
        self.loss = pml.ArcFaceLoss(5000, TASK.dim).double()


@pytest.mark.parametrize(("job", "most"), [(Job, 1), (ManyClasses, 2)])
def test_one_frame_and_one_reduction_beside_ddp(pool: RankPool, job: type[Job], most: int) -> None:
    """Few bytes of the losses' gradients travel in the handshake of the call check. More of them take one reduction."""
    plain = pool.run(2, count, Job, "ddp")[0]
    for options, extra in (({}, most), ({"check_calls": False}, 1), ({"losses": []}, 0)):
        for steps in pool.run(2, count, job, options):
            # the first batches show DDP's own set-up
            assert list(map(len, steps))[2:] == [len(step) + extra for step in plain[2:]]


def test_all_losses_share_what_travels(pool: RankPool) -> None:
    plain = pool.run(2, count, Job, "ddp")[0]
    steps = pool.run(2, count, Alternating, {})[0]
    assert [len(step) for step in steps[2:]] == [len(step) + 1 for step in plain[2:]]
    idle = pool.run(2, count, NoLossAtAll, {})[0]
    assert len(idle[3]) <= len(plain[3]) + 1, "a step without a loss costs no more than one with"


def test_nothing_travels_on_a_batch_that_does_not_synchronise(pool: RankPool) -> None:
    steps = pool.run(2, count, Alternating, {}, accumulate_grad_batches=TASK.steps)[0]
    plain = pool.run(2, count, Job, "ddp", accumulate_grad_batches=TASK.steps)[0]
    assert [len(step) for step in steps[1:-1]] == [len(step) for step in plain[1:-1]]


def test_one_rank_talks_to_nobody(pool: RankPool) -> None:
    plain = pool.run(1, count, Job, "ddp")[0]
    steps = pool.run(1, count, Job, {})[0]
    assert [len(step) for step in steps] <= [len(step) for step in plain]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_losses_is_plain_ddp_bit_for_bit(pool: RankPool, world_size: int, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.4}
    plain: list[dict[str, Tensor]] = pool.run(world_size, fit, Job, "ddp", **options)
    ours: list[dict[str, Tensor]] = pool.run(world_size, fit, Job, {"losses": []}, **options)
    for one, other in zip(plain, ours, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


class Own(DDPLossStrategy):  # a user's subclass with an option of its own
    def __init__(self, *, patience: int = 1, **options: Any) -> None:
        super().__init__(**options)


def test_options_of_a_subclass_and_of_what_it_is_derived_from_are_known() -> None:
    Own(patience=2, adopt=True, process_group_backend="gloo", static_graph=True)


class Weightless(Job):
    def build(self, loss: str) -> None:
        self.loss = pml.SupConLoss()


def fit_with_log(options: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    with said_on_rank_zero() as said:
        return fit(Weightless, options), "\n".join(said)


@pytest.mark.parametrize("losses", [["loss"], "loss"], ids=str)
def test_a_named_loss_without_weights_is_a_note_and_trains_as_found_by_type(pool: RankPool, losses: Any) -> None:
    note = "SupConLoss `loss`, named in `losses`, has no parameters"
    by_name = pool.run(2, fit_with_log, {"losses": losses})
    by_type = pool.run(2, fit_with_log, {})
    assert [note in text for _, text in by_name] == [True, False]
    assert not any(note in text for _, text in by_type)
    for (one, _), (other, _) in zip(by_name, by_type, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


YAML_OF_README = re.compile(r"```yaml\n(trainer:\n  strategy:.*?)```", re.DOTALL)
PLAIN_CLI = """
import sys, yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = yaml.safe_load(sys.argv.pop())["trainer"]
more = {"accelerator": "cpu", "devices": 1, "logger": False}
cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args={"trainer": {**trainer, **more}})
print(type(cli.trainer.strategy).__name__)
"""


@pytest.mark.slow
def test_the_yaml_of_the_readme_needs_no_import_of_the_package() -> None:
    (shown,) = YAML_OF_README.findall((ROOT / "README.md").read_text())
    done = run_python("-c", PLAIN_CLI, shown)
    assert done.stdout.strip() == "DDPLossStrategy", done.stderr


def test_a_copy_of_a_strategy_looks_after_its_own_module() -> None:
    strategy, module = DDPLossStrategy(["loss"]), Job()
    twin = copy.copy(strategy)
    twin.connect(module)
    assert twin._losses.module is module
    assert strategy.lightning_module is None
    assert twin._losses.options.losses == ["loss"]


@pytest.mark.parametrize(("name", "meant"), [("ddp_loses", "ddp_losses"), ("fsdp2_dp_losses", "fsdp2_ddp_losses")])
def test_a_misspelt_name_is_answered_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=f"invalid strategy name: .*Did you mean {meant}\\? Names of ours: ddp_losses, "
    ):
        Trainer(strategy=name, accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match="invalid strategy name") as caught:
        Trainer(strategy="zzz", accelerator="cpu", devices=1)
    assert "Did you mean" not in str(caught.value)


# What is called waste: reducing a value that is global already, and nothing else.


def test_a_global_value_that_is_reduced_is_called_waste_once() -> None:
    advice, value = Advice(), torch.tensor(16.25)
    remember_global_value(value)
    with pytest.warns(UserWarning, match="leave out sync_dist=True"):
        advice.global_already(value.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice.global_already(value)


def test_a_number_of_batches_that_the_loss_rounds_to_is_no_waste() -> None:
    remember_global_value(torch.tensor(16.25))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Advice().global_already(torch.tensor(16))
