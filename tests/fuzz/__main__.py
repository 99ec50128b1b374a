"""`python -m tests.fuzz --minutes 3 --seed 0`: draw cases in every domain in turn until the time is over; a table at the end."""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from lightning_ddp_losses.testing import RankPool
from tests.fuzz.engine import Count, Finding, explore

DOMAINS = [
    "pml_losses",
    "two_views",
    "torch_losses",
    "class_shards",
    "resumes",
    "towers",
    "metrics",
    "batch_norms",
    "samplers",
    "collectives",
    "backward_orders",
    "call_orders",
    "windows",
    "randomness",
]
BATCH = 40  # cases of a domain before the next one has its turn


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--cases", type=int, default=None, help="stop after so many cases instead")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same cases")
    parser.add_argument("--domains", nargs="*", choices=DOMAINS, default=DOMAINS)
    parser.add_argument("--no-shrink", action="store_true", help="show what was drawn, not a smaller case")
    arguments = parser.parse_args()
    domains = [importlib.import_module(f"tests.fuzz.{name}").DOMAIN for name in arguments.domains]
    counts = {domain.name: Count() for domain in domains}
    findings: list[Finding] = []
    pool = RankPool()
    until = time.monotonic() + 60 * arguments.minutes if arguments.cases is None else float("inf")
    turn = 0

    def over() -> bool:
        if arguments.cases is not None:
            return sum(count.cases for count in counts.values()) >= arguments.cases
        return time.monotonic() >= until

    try:
        while not over():
            for domain in domains:
                if over():
                    break
                found = explore(
                    pool,
                    domain,
                    examples=BATCH,
                    number=arguments.seed * 1_000_003 + turn,
                    count=counts[domain.name],
                    shrink=not arguments.no_shrink,
                    until=until,
                )
                if found is not None:
                    findings.append(found)
                    print(f"\nWRONG in {found.domain}\n{found.text}\n", flush=True)
            turn += 1
    finally:
        pool.close()
    print(f"\nseed {arguments.seed}\n{'domain':<24}{'cases':>8}{'exact':>8}{'refused':>9}{'undefined':>11}")
    for name, count in counts.items():
        print(f"{name:<24}{count.cases:>8}{count.exact:>8}{count.refused:>9}{count.not_defined:>11}")
    for name, count in counts.items():
        for text, times in count.texts.most_common():
            print(f"{name}: refused {times} times: {text[:160]}")
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
