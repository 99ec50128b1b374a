"""Rendezvous: a world with new keys in its store, and an error that names the problem before ranks wait for each other.

Under ``torchrun`` the store belongs to the agent and outlives its workers, while ``init_process_group`` and ``new_group`` write the same
keys in each attempt. A restarted rank may therefore read the address of a dead rank, so that gloo fails with "connectFullMesh ...
Connection refused", or NCCL uses a dead rank's id. (torch 2.13, 2026: of 8 restarts of 3 ranks that only call ``init_process_group``, 7
failed like this.) A world started by this module uses a key prefix on which its ranks have agreed in a roll call. Groups created later
inherit the prefix. In a world started by other code under such an agent, our internal groups use a separate prefix.

Programs that call ``init_process_group`` themselves are safe with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in the environment of every
agent, which gives each attempt a separate store.
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

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed import liveness
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, PeerError, listed

Report: TypeAlias = Mapping[str, Any]
"""Report of a rank about itself: plain values, sent as JSON."""
Judge: TypeAlias = Callable[[Sequence[Report]], DDPLossError | None]
"""Function from the reports of all ranks to the resulting error, if any."""

_PREFIX = "lightning_ddp_losses/roll_call"
_TOKEN = "token"
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.25
_VERDICT_SECONDS = 5.0  # time allowed for rank 0's verdict to arrive, in addition to the time that rank 0 waits


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
    """Synchronise all ranks through a store, which may contain keys of former worlds.

    Rank 0 writes a new token. Each other rank answers the token that it finds with a random word. This token may belong to a former world,
    so the rank keeps polling until rank 0 has answered its word.

    Args:
        store: Store that all ranks can reach.
        rank: Rank of this process among the participants.
        world_size: Number of participants.
        timeout: Time to wait for missing ranks.
        name: Name of this roll call, if several use a store at a time.
        report: Plain values that this rank reports about itself.
        judge: Function that checks the reports of all ranks. Every rank calls it.

    Returns:
        A token, equal on all ranks and different from the tokens of former roll calls, and the reports in rank order.

    Raises:
        PeerError: on every rank that took part, naming the missing ranks, as far as the store has this information.
        DDPLossError: on every rank, the error returned by ``judge``.

    Communication: through the store only.
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
    """Call the roll and answer every rank that responded. Return the token, the missing ranks, and the reports."""
    # 1. a new token, different from the tokens of former worlds
    token = secrets.token_hex(8)
    store.set(_TOKEN, token)
    # 2. a word and a report from each rank
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
    # this process may hold the store, and exit after an error
    with contextlib.suppress(RuntimeError):
        store.wait([_read_by(token, rank) for rank in came], timedelta(seconds=_VERDICT_SECONDS))
    return token, missing, reports


def _answer_roll(
    store: Store, rank: int, world_size: int, timeout: timedelta, own: Report
) -> tuple[str, list[int], list[Report]]:
    """Answer the roll call of rank 0, and return its result."""
    word, token, reason, pause = secrets.token_hex(8), "", "nothing", _POLL_SECONDS
    end = time.monotonic() + timeout.total_seconds() + _VERDICT_SECONDS
    try:
        # an answer to this word proves that rank 0 is currently alive
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
    except RuntimeError as error:  # the process that held the store has exited
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
"""The environment variable that names gloo's network interface, or several interfaces separated by commas."""

_LONGEST = timedelta(minutes=30)  # used without a timeout: torch's default for gloo


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
    """Create the default process group like ``init_process_group``, under separate store keys.

    Args:
        address: Address of the host that holds the store: rank 0's, or under ``torchrun`` the agent's.
        port: Port of the store.
        rank: Rank of this process.
        world_size: Number of processes.
        backend: Backend, as in ``init_process_group``.
        timeout: Time to wait for a peer, during the rendezvous and in every collective. If None, half an hour, torch's default for gloo.
        device: Device to bind an accelerator's backend to. If None, it is not bound.

    Raises:
        ConfigurationError: on every rank for an unknown network interface or two ranks on one device, on one rank for a port in use.
        PeerError: on every rank that took part, naming the ranks that were missing at the timeout.

    Communication: a roll call through the store, then the communication of ``init_process_group``.
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
    """Return the store of the world. Rank 0 hosts it unless an agent does."""
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
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # same default as torch's own rendezvous
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
    """Return a socket that listens only at this address, unlike torch's own store, which listens on every interface.

    Returns None, which selects torch's own behaviour, if the address does not belong to this host (it is translated by a router or a
    cluster's service).

    Raises:
        OSError: for a port in use.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # allow a port that a former run has just released
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
    """Return the problem of the network interface selected for gloo, or None if it can be used."""
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
    """Return an identity of a device that is unique over all nodes. It is empty for the CPU, which ranks share."""
    if device.type == "cpu":
        return ""
    uuid = ""
    # the index of the device only counts the devices listed in CUDA_VISIBLE_DEVICES
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties_of is not None:
        uuid = getattr(properties_of(device), "uuid", "")
    return f"{socket.gethostname()} {uuid or device}"


def nccl_device(backend: str | None, device: torch.device | None) -> str | None:
    """Return the identity that must differ between any two NCCL ranks. None for another backend."""
    if device is None or "nccl" not in str(backend):
        return None
    identity = device_identity(device)
    # ranks that NCCL treats as different hosts may share a device
    host = os.environ.get("NCCL_HOSTID", "")
    return f"{host} {identity}".strip() if identity else None


def _judge_reports(reports: Sequence[Report]) -> DDPLossError | None:
    """Return the error that follows from the reports of all ranks, or None."""
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
    """Return the error for ranks that share a device, on which NCCL fails or hangs. None if each rank has a separate device."""
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
    """Explain errors inside the block: a peer that does not take part in creating a group, or is unreachable via gloo's interface."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DDPLossError):
            raise
        text = str(error)
        # the first condition matches a TCP store, the second a file store
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


# ---------------------------------------------------------------------- groups in a world started by other code


@contextlib.contextmanager
def own_keys(rank: int, ranks: Sequence[int], timeout: timedelta | None) -> Iterator[None]:
    """Use separate store keys for groups created inside the block, if the world's store may contain keys of a dead world.

    Args:
        rank: Rank of this process in the world.
        ranks: Ranks of all participants.
        timeout: Time to wait for them.

    Communication: none, or a roll call through the store if an agent holds the store of a world that was started by other code.
    """
    store = torch_compat.default_store()
    if not _agent_holds_store() or liveness.has_begun() or store is None or len(ranks) == 1:
        yield
        return
    name = "groups/" + "-".join(map(str, ranks))
    token, _ = hold_roll_call(store, ranks.index(rank), len(ranks), timeout=timeout or _LONGEST, name=name)
    with torch_compat.world_store_prefixed(token):
        yield
