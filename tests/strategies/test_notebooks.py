"""In a notebook each strategy of the package is made, or names the one that a notebook can start; Lightning's advice leaves the package."""

from __future__ import annotations

import pytest
from lightning.fabric.utilities import imports
from lightning.pytorch import Trainer

from lightning_ddp_losses import ConfigurationError, DDPLossStrategy, ModelParallelLossStrategy

OPTIONS = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
REFUSED = {
    "ddp_losses": "ddp_losses",
    "ddp_losses_spawn": "ddp_losses_spawn",
    "ddp_losses_find_unused_parameters_true": "ddp_losses_find_unused_parameters_true",
    "DDPLossStrategy": DDPLossStrategy,
    "fsdp2_ddp_losses": "fsdp2_ddp_losses",
    "ModelParallelLossStrategy": ModelParallelLossStrategy,
}
MADE = {
    "ddp_losses_notebook": "ddp_losses_notebook",
    "ddp_losses_fork": "ddp_losses_fork",
    "start_method": lambda: DDPLossStrategy(start_method="fork"),
}


@pytest.fixture(autouse=True)
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Lightning take this process for a notebook's kernel."""
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_strategy_that_no_notebook_can_start_names_the_one_that_can(name: str) -> None:
    strategy = REFUSED[name]
    with pytest.raises(ConfigurationError) as raised:
        Trainer(strategy=strategy if isinstance(strategy, str) else strategy(), **OPTIONS)
    assert "in a notebook" in str(raised.value)
    assert 'Trainer(strategy="ddp_losses_notebook")' in str(raised.value)
    assert "'ddp_notebook'" not in str(raised.value)


@pytest.mark.parametrize("name", MADE)
def test_a_strategy_that_forks_is_made(name: str) -> None:
    strategy = MADE[name]
    trainer = Trainer(strategy=strategy if isinstance(strategy, str) else strategy(), **OPTIONS)
    assert isinstance(trainer.strategy, DDPLossStrategy)
