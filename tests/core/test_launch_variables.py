"""Variables that another job left behind are named before anything waits for its ranks."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_ddp_losses.errors import ConfigurationError
from tests.doors import is_of_this_machine, left_over, refuse_foreign_address

ELSEWHERE = "10.255.255.1"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, []),
        ({"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, []),
        ({"MASTER_ADDR": ELSEWHERE}, [f"MASTER_ADDR={ELSEWHERE} is no address of this machine"]),
        ({"MASTER_ADDR": "no.such.host.invalid"}, ["MASTER_ADDR=no.such.host.invalid is no address of this machine"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0: a Trainer starts no ranks"]),
        ({"RANK": "1", "WORLD_SIZE": "7"}, ["RANK=1, WORLD_SIZE=7: torch's init_process_group"]),
        ({"SLURM_NTASKS": "4"}, ["SLURM_NTASKS=4: Lightning expects that srun starts"]),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}, []),
        # a launcher's own
        ({"TORCHELASTIC_RUN_ID": "7", "LOCAL_RANK": "0", "MASTER_ADDR": ELSEWHERE}, []),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, []),
    ],
)
def test_what_no_launcher_explains_is_named(environment: dict[str, str], named: list[str]) -> None:
    found = left_over(environment)
    assert len(found) == len(named)
    assert all(sentence.startswith(start) for sentence, start in zip(found, named, strict=True))


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("localhost", True), (ELSEWHERE, False), ("no.such.host.invalid", False)],
)
def test_addresses_of_this_machine(address: str, expected: bool) -> None:
    assert is_of_this_machine(address) == expected


def test_ranks_of_one_node_do_not_wait_at_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", ELSEWHERE)
    refuse_foreign_address(LightningEnvironment(), num_nodes=2)
    refuse_foreign_address(TorchElasticEnvironment(), num_nodes=1)
    with pytest.raises(ConfigurationError, match=rf"MASTER_ADDR: expected an address of this machine.*got {ELSEWHERE}"):
        refuse_foreign_address(LightningEnvironment(), num_nodes=1)
