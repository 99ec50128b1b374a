"""What is called waste: reducing a value that is global already, and nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_ddp_losses.distributed.global_values import remember_global_value
from lightning_ddp_losses.strategies.loss_parallelism import Advice


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
