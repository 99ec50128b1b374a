"""One node's agent, as `torchrun` starts it, over workers that come from a process with torch loaded: a restart takes half a second.

python -m tests.faults.agent groups --nodes 2 --ranks 2 --kills 20 --port 29400 --folder DIR
"""

from __future__ import annotations

import argparse
import multiprocessing

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.faults import workers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", choices=["groups"])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch", "lightning", "tests.faults.workers"])
    config = LaunchConfig(
        min_nodes=options.nodes,
        max_nodes=options.nodes,
        nproc_per_node=options.ranks,
        run_id="restarts",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{options.port}",
        # ranks die here and nodes do not: a busy machine that holds up an agent's heartbeat must not end its node
        rdzv_configs={"timeout": 60, "keep_alive_interval": 5, "keep_alive_max_attempt": 12, "last_call_timeout": 1},
        max_restarts=options.kills,
        monitor_interval=0.05,
        start_method="forkserver",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, getattr(workers, options.worker))(options.folder, options.kills)


if __name__ == "__main__":
    main()
