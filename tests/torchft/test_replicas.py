"""Two replicas of two ranks each, as torchft runs them: our losses over the ranks of a replica, torchft's mean over the replicas.

torchft knows one replica's rank 0 from another one's by a server beside them, the lighthouse. Every step begins with a quorum: who takes
part. What is reduced over the replicas is reduced between equal ranks of them, so inside a replica torch's DDP has to take the mean first.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from lightning_ddp_losses import GlobalBatchLoss
from tests.doors import process_groups
from tests.faults.ranks import Ended, run_ranks
from tests.oracle import Encoder, Task, assert_close, batches

REPLICAS, RANKS, STEPS, KILLED_AT = 2, 2, 6, 3
WAIT = timedelta(seconds=120)  # as long as a busy machine may need
SILENT_MS = 5000  # a replica that the lighthouse has not heard of for so long is gone
SLICES = [slice(0, 4), slice(4, 6)]  # of a replica's batch: uneven


class Both(nn.Module):  # an encoder and a learnable loss over its embeddings
    def __init__(self, *, is_global: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Encoder(Task()).double()
        loss = ProxyAnchorLoss(Task().classes, Task().dim).double()
        self.loss: nn.Module = GlobalBatchLoss(loss) if is_global else loss

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = self.loss(self.encoder(features), labels)
        return value


def batch_of(replica: int, step: int) -> tuple[Tensor, Tensor]:
    return batches(Task(seed=replica, steps=STEPS, rows=6))[step]


def train(replica: int, lighthouse: str, folder: Path, is_killed: bool) -> None:
    """What each rank of a replica does; those of replica 1 may be killed."""
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    dist.init_process_group("gloo", timeout=WAIT)
    rank, module = dist.get_rank(), Both(is_global=True)
    model = DistributedDataParallel(module)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=WAIT),
        load_state_dict=module.load_state_dict,
        state_dict=module.state_dict,
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        use_async_quorum=False,  # who has just come takes part at once
        timeout=WAIT,
        quorum_timeout=WAIT,
        connect_timeout=WAIT,
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, torch.optim.SGD(module.parameters(), 0.1))
    # the lighthouse has heard of both before a quorum of one is possible
    (folder / f"here-{replica}-{rank}").touch()
    while len(list(folder.glob("here-*"))) < REPLICAS * RANKS:
        time.sleep(0.05)
    took_part = []
    while (step := manager.current_step()) < STEPS:
        if is_killed and replica == 1 and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        features, labels = batch_of(replica, step)
        optimizer.zero_grad()
        # 1. the loss of the replica's batch, and the mean of gradients over its ranks
        model(features[SLICES[rank]], labels[SLICES[rank]]).backward()
        # 2. the mean over the replicas
        for parameter in module.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        took_part.append(manager.num_participants())
    state = module.state_dict()
    torch.save({"state": state, "took part": took_part}, folder / f"state-{replica}-{rank}")
    manager.shutdown(wait=False)
    process_groups.close(world=True)


def expected(is_killed: bool) -> dict[str, Tensor]:
    """One process: the mean over the replicas that are there of each one's loss."""
    module = Both(is_global=False)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        replicas = range(1 if is_killed and step >= KILLED_AT else REPLICAS)
        optimizer.zero_grad()
        torch.stack([module(*batch_of(replica, step)) for replica in replicas]).mean().backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("is_killed", [False, True], ids=["both stay", "one is killed"])
def test_two_replicas_are_one_process(tmp_path: Path, is_killed: bool) -> None:
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=120_000, heartbeat_timeout_ms=SILENT_MS
    )

    def run(replica: int) -> Ended:
        folder = tmp_path / f"replica-{replica}"
        folder.mkdir()
        return run_ranks(
            RANKS,
            train,
            replica,
            lighthouse.address(),
            tmp_path,
            is_killed,
            folder=folder,
            seconds=WAIT.total_seconds(),
        )

    try:
        with ThreadPoolExecutor(REPLICAS) as threads:
            first, second = threads.map(run, range(REPLICAS))
    finally:
        lighthouse.shutdown()
    assert first.codes == [0, 0], first
    assert second.codes == ([-9, -9] if is_killed else [0, 0]), second
    number = [REPLICAS] * KILLED_AT + [1 if is_killed else REPLICAS] * (STEPS - KILLED_AT)
    for replica in range(1 if is_killed else REPLICAS):
        for rank in range(RANKS):
            found = torch.load(tmp_path / f"state-{replica}-{rank}", weights_only=True)
            assert found["took part"] == number
            assert_close(found["state"], expected(is_killed))
