"""Rendezvous: a world with new keys in its store, and an error that names the problem before ranks wait for each other.

Under ``torchrun`` the store belongs to the agent and outlives its workers. ``init_process_group`` and ``new_group`` write the same keys in
each attempt. So a restarted rank may read the address of a dead one, and gloo ends in "connectFullMesh ... Connection refused", or NCCL
in a dead rank's id. (torch 2.13, 2026: of 8 restarts of 3 ranks that call ``init_process_group`` alone, 7 ended so.) A world
that this module starts lives under a prefix which its ranks have agreed on in a roll call. Groups made later inherit that. For a world
that somebody else has started under such an agent, our own groups get a prefix of theirs.

Programs that call ``init_process_group`` themselves are safe with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in the environment of every
agent: each attempt then has a separate store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import liveness
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, PeerError, listed

Report: TypeAlias = Mapping[str, Any]
"""Report of a rank about itself: plain values, which travel as JSON."""
Judge: TypeAlias = Callable[[Sequence[Report]], DDPLossError | None]
"""Reports of all ranks -> the error that they amount to."""

_PREFIX = "lightning_ddp_losses/roll_call"
_TOKEN = "token"
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.25
_VERDICT_SECONDS = 5.0  # more than rank 0 waits: so long may its verdict be under way


def hold_roll_call(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout: timedelta,
    name: str = "world",
    report: Report | None = None,
    judge: Judge = lambda reports: None,
) -> tuple[str, Sequence[Report]]:
    """Meet all ranks in a store, which may hold keys of former worlds.

    Rank 0 writes a new token. Each other rank answers the token that it finds with a random word. That token may be a former world's, so
    the rank goes on looking until rank 0 has answered its word.

    Args:
        store: Store that all of them reach.
        rank: Rank of this process among those that meet.
        world_size: Number of ranks that meet.
        timeout: Time to wait for ranks that do not come.
        name: Name of this meeting, if several use a store at a time.
        report: Plain values that this rank reports of itself.
        judge: Function that looks at the reports of all ranks. Every rank calls it.

    Returns:
        A token, equal on all ranks, which no former roll call had, and the reports in rank order.

    Raises:
        PeerError: on every rank that came, naming those that did not, as far as the store can say.
        DDPLossError: on every rank, the error that ``judge`` found.

    Communication: none but the store's.
    """
    own_store = PrefixStore(f"{_PREFIX}/{name}", store)
    if rank == 0:
        token, missing, reports = _call_roll(own_store, world_size, timeout, report or {})
    else:
        token, missing, reports = _answer_roll(own_store, rank, world_size, timeout, report or {})
    error = _missing_error(missing, world_size, timeout) if missing else judge(reports)
    if error is not None:
        error.collective = True
        raise error
    return token, reports


def _call_roll(store: Store, world_size: int, timeout: timedelta, own: Report) -> tuple[str, list[int], list[Report]]:
    """Call the roll, and answer every rank that has come. Return the token, the ranks that have not come, and the reports."""
    # 1. a token that no former world had
    token = secrets.token_hex(8)
    store.set(_TOKEN, token)
    # 2. a word and a report of each rank
    came, missing = [*range(1, world_size)], list[int]()
    try:
        if came:
            store.wait([_here(token, rank) for rank in came], timeout)
    except RuntimeError:
        missing = [rank for rank in came if not store.check([_here(token, rank)])]
        came = [rank for rank in came if rank not in missing]
    if not came:
        return token, missing, [own]
    told = [json.loads(value) for value in store.multi_get([_here(token, rank) for rank in came])]
    # 3. the answers
    reports = [own, *(report for _, report in told)]
    answers = {_verdict(token): json.dumps([missing, reports]), **{_answer_to(word): "" for word, _ in told}}
    store.multi_set([*answers], [*answers.values()])  # type: ignore[attr-defined]
    # this process may hold the store, and end after an error
    with contextlib.suppress(RuntimeError):
        store.wait([_read_by(token, rank) for rank in came], timedelta(seconds=_VERDICT_SECONDS))
    return token, missing, reports


def _answer_roll(
    store: Store, rank: int, world_size: int, timeout: timedelta, own: Report
) -> tuple[str, list[int], list[Report]]:
    """Answer rank 0, which calls the roll. Return what it has found."""
    word, token, reason, pause = secrets.token_hex(8), "", "nothing", _POLL_SECONDS
    end = time.monotonic() + timeout.total_seconds() + _VERDICT_SECONDS
    try:
        # rank 0 lives now if it answers this word
        while time.monotonic() < end:
            called = store.get(_TOKEN).decode() if store.check([_TOKEN]) else ""
            if called != token:
                token, pause = called, _POLL_SECONDS
                store.set(_here(token, rank), json.dumps([word, dict(own)]))
            elif store.check([_answer_to(word)]):
                missing, reports = json.loads(store.get(_verdict(token)))
                store.set(_read_by(token, rank), "")
                return token, missing, reports
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)  # many ranks may wait for a late one
    except RuntimeError as error:  # the store went with the process that held it
        reason = str(error).splitlines()[0]
    if not token and reason == "nothing":
        return token, [0], []
    raise PeerError(
        f"rendezvous of {world_size} ranks",
        expected=f"an answer of rank 0 within {timeout.total_seconds():g} s",
        got=reason,
        fix="Look at the output of rank 0.",
        collective=True,
    )


def _missing_error(missing: Sequence[int], world_size: int, timeout: timedelta) -> DDPLossError:
    return PeerError(
        f"rendezvous of {world_size} ranks",
        expected=f"all of them within {timeout.total_seconds():g} s",
        got=f"no word from rank {listed([*map(str, missing)], 16)}",
        fix="Look at the output of those ranks: they have ended, were never started, or cannot reach the store (MASTER_ADDR, MASTER_PORT). "
        "If nobody starts them, LOCAL_RANK or WORLD_SIZE may be left over from another job: `ddp-losses doctor`.",
        collective=True,
    )


def _here(token: str, rank: int) -> str:
    return f"{token}/here/{rank}"


def _verdict(token: str) -> str:
    return f"{token}/verdict"


def _answer_to(word: str) -> str:
    return f"answer/{word}"


def _read_by(token: str, rank: int) -> str:
    return f"{token}/read/{rank}"


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names gloo's network interface, or several with commas."""

_LONGEST = timedelta(minutes=30)  # without a time-out: torch's default for gloo


def start_world(
    address: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    backend: str,
    timeout: timedelta | None = None,
    device: torch.device | None = None,
) -> None:
    """Make the default process group, as ``init_process_group`` does, over separate keys.

    Args:
        address: Address of the host that holds the store: rank 0's, or under ``torchrun`` the agent's.
        port: Port of the store.
        rank: Rank of this process.
        world_size: Number of processes that come.
        backend: Backend, as ``init_process_group`` takes it.
        timeout: Time to wait for a peer, here and in every collective. None: half an hour, torch's own for gloo.
        device: Bound device of an accelerator's backend. None: it is not bound.

    Raises:
        ConfigurationError: on every rank for an unknown network interface or two ranks on one device, on one rank for a port in use.
        PeerError: on every rank that came, naming those that did not come in time.

    Communication: a roll call through the store, then what ``init_process_group`` does.
    """
    timeout = timeout or _LONGEST
    store = _open_store(address, port, rank, timeout)
    process = liveness.ProcessInfo.own()
    report = {"problem": gloo_problem(), "device": nccl_device(backend, device), "process": process}
    token, reports = hold_roll_call(store, rank, world_size, timeout=timeout, report=report, judge=_judge_reports)
    own_store = PrefixStore(token, store)
    with group_errors(rank):
        dist.init_process_group(
            backend,
            store=own_store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device,
        )
    liveness.begin_world(own_store, rank, [liveness.ProcessInfo(*report["process"]) for report in reports])


def _open_store(address: str, port: int, rank: int, timeout: timedelta) -> Store:
    """Return the store of the world. Rank 0 holds it if no agent does."""
    holds = rank == 0 and not _agent_holds_store()
    try:
        listener = _listener(address, port) if holds else None
        return TCPStore(
            address,
            port,
            is_master=holds,
            timeout=timeout,
            wait_for_workers=False,  # the roll call names missing ranks
            multi_tenant=True,
            master_listen_fd=listener,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch's own rendezvous
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        if holds:
            raise ConfigurationError(
                f"MASTER_PORT {port}",
                expected="a free port on the host of rank 0, MASTER_ADDR",
                got=reason,
                fix="Choose another port, equal on all nodes; torchrun's --rdzv-endpoint, or --standalone on one node, finds one.",
            ) from error
        raise PeerError(
            f"rendezvous at {address}:{port}",
            expected=f"the store of rank 0 within {timeout.total_seconds():g} s",
            got=reason,
            fix="MASTER_ADDR and MASTER_PORT must name the host of rank 0, and be reachable from every node; look at the output of rank 0.",
        ) from error


def _listener(address: str, port: int) -> int | None:
    """Return a socket that listens at this address alone, which torch's own store does not: it listens on every interface.

    None, for torch's own way, if the address does not belong to this host (one that a router or a cluster's service translates).

    Raises:
        OSError: for a port in use.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # a port that a former run has just left
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return listener.detach()  # the store closes it


def _agent_holds_store() -> bool:
    """Return whether ``torchrun``'s agent holds the store, which then outlives this world."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


# ---------------------------------------------------------------------- reports of the ranks


def gloo_problem() -> str | None:
    """Return the problem of the network interface that gloo is to use. None if there is none."""
    names = os.environ.get(GLOO_INTERFACE, "")
    try:
        for name in filter(None, names.split(",")):
            dist.ProcessGroupGloo.create_device(interface=name)
    except RuntimeError as error:
        known = ", ".join(known_name for _, known_name in socket.if_nameindex())
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        return f"{GLOO_INTERFACE}={names} on {socket.gethostname()}: {reason} (interfaces: {known})"
    return None


def device_identity(device: torch.device) -> str:
    """Return the identity of a device over all nodes. It is empty for the CPU, which ranks share."""
    if device.type == "cpu":
        return ""
    uuid = ""
    # the device's number counts what CUDA_VISIBLE_DEVICES has left
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties_of is not None:
        uuid = getattr(properties_of(device), "uuid", "")
    return f"{socket.gethostname()} {uuid or device}"


def nccl_device(backend: str | None, device: torch.device | None) -> str | None:
    """Return the identity that no two ranks of NCCL may share. None for another backend."""
    if device is None or "nccl" not in str(backend):
        return None
    identity = device_identity(device)
    # ranks that NCCL takes for other hosts may share a device
    host = os.environ.get("NCCL_HOSTID", "")
    return f"{host} {identity}".strip() if identity else None


def _judge_reports(reports: Sequence[Report]) -> DDPLossError | None:
    """Return the error that the reports of all ranks amount to."""
    problems = {rank: report["problem"] for rank, report in enumerate(reports) if report["problem"]}
    if problems:
        return ConfigurationError(
            "network interface of gloo, which carries our messages between hosts",
            expected="one that has an address",
            ranks=problems,
            fix=f"Set {GLOO_INTERFACE} to an interface that reaches the other nodes, on each node, or leave it out.",
        )
    return shared_device_error([report["device"] for report in reports])


def shared_device_error(devices: Sequence[str | None]) -> DDPLossError | None:
    """Return the error for ranks that use one device, which NCCL takes for a fault or waits over. None if each has its own."""
    ranks_of: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        if device is not None:
            ranks_of.setdefault(device, []).append(rank)
    shared = {rank: device for device, ranks in ranks_of.items() if len(ranks) > 1 for rank in ranks}
    if not shared:
        return None
    return ConfigurationError(
        "devices of NCCL",
        expected="one device per rank",
        ranks=dict(sorted(shared.items())),
        fix="Give each rank a device of its own (devices=, CUDA_VISIBLE_DEVICES, torch.cuda.set_device(local_rank)), or let ranks "
        "share one with process_group_backend='gloo'.",
    )


@contextlib.contextmanager
def group_errors(rank: int) -> Iterator[None]:
    """Say what to do if a peer does not come to make a group inside the block, or if gloo's interface does not reach it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DDPLossError):
            raise
        text = str(error)
        # the first is of a TCP store, the second of a file's
        if isinstance(error, dist.DistStoreError) or "Wait timeout" in text:
            raise PeerError(
                f"rank {rank} waited to make a process group",
                expected="every rank to come to the first loss, metric or layer of this package",
                got=f"no answer from some rank ({text.splitlines()[0]})",
                fix="Look at the ranks' output for the first error; where there is none, a rank left out what the others did "
                "(a branch on rank or on local data), or has ended.",
                page="F37",
            ) from error
        if any(mark in text for mark in ("connectFullMesh", "gloo/transport")):
            raise _interface_error(text) from error
        raise


def _interface_error(text: str) -> ConfigurationError:
    interface = os.environ.get(GLOO_INTERFACE)
    chosen = f"the address that {socket.gethostname()} has by name"
    if interface:
        chosen = f"{GLOO_INTERFACE}={interface}"
    return ConfigurationError(
        "network interface of gloo",
        expected="one at which the other ranks can be reached",
        got=f"{chosen} ({text.splitlines()[0]})",
        fix=f"Set {GLOO_INTERFACE} on each node to the interface between the nodes (`ip -br address` lists them); where a rank "
        "has died, its output says more.",
    )


# ---------------------------------------------------------------------- groups in a world of somebody else


@contextlib.contextmanager
def own_keys(rank: int, ranks: Sequence[int], timeout: timedelta | None) -> Iterator[None]:
    """Let groups that are made inside the block use separate keys, if the world's store may hold those of a dead world.

    Args:
        rank: Rank of this process in the world.
        ranks: Ranks of all that come here.
        timeout: Time to wait for them.

    Communication: none, or a roll call through the store where an agent holds the store of a world that somebody else has started.
    """
    store = compat.default_store()
    if not _agent_holds_store() or liveness.has_begun() or store is None or len(ranks) == 1:
        yield
        return
    name = "groups/" + "-".join(map(str, ranks))
    token, _ = hold_roll_call(store, ranks.index(rank), len(ranks), timeout=timeout or _LONGEST, name=name)
    with compat.world_store_prefixed(token):
        yield
