"""Random states survive a checkpoint: every generator draws on as if nothing had been."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.doors import derived_seed, read_random_states, seed_generators_, write_random_states_

CPU = torch.device("cpu")


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn()]


@pytest.mark.parametrize("before", [0, 1])
def test_all_generators_go_on(before: int) -> None:
    """Also where one normal number of two is left."""
    for _ in range(before):
        draws()
    file = io.BytesIO()
    torch.save(read_random_states(CPU), file)
    expected = [draws() for _ in range(3)]
    seed_generators_(5, CPU)
    assert draws() != expected[0]
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    # also from the rows of all ranks
    rows = {name: torch.stack([state, state])[1] for name, state in loaded.items()}
    write_random_states_(rows, CPU)
    assert [draws() for _ in range(3)] == expected


def test_a_seed_says_all() -> None:
    seed_generators_(2**63 - 1, CPU)
    expected = draws()
    seed_generators_(2**63 - 1, CPU)
    assert draws() == expected
    seeds = {derived_seed(*numbers) for numbers in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (12, 3), (1, 23)]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_another_generator_of_numpy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        states = read_random_states(CPU)
        expected = np.random.get_bit_generator().state
        write_random_states_(states, CPU)
        assert np.random.get_bit_generator().state == expected
    finally:
        np.random.set_bit_generator(own)
    # sizes do not say which it is: ranks exchange them
    assert [len(state) for state in states.values()] == [len(state) for state in read_random_states(CPU).values()]


def test_the_generator_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any kind of device that torch has a module for."""
    device, state = torch.device("xpu", 0), torch.arange(16, dtype=torch.uint8)
    written: list[Any] = []
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.xpu, "set_rng_state", written.append)
    monkeypatch.setattr(torch.xpu, "manual_seed", written.append)
    states = read_random_states(device)
    write_random_states_(states, device)
    seed_generators_(7, device)
    assert torch.equal(written[0], state)
    assert written[1:] == [7]
