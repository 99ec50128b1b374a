"""Two hosts on one machine: network namespaces with an address each and a cable between them, which can be pulled.

Needs no rights but that of making a user namespace, inside of which a process may do as it likes with networks of its own. What was
made ends with the processes in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.processes import ROOT

HOLD = "echo ready; exec sleep infinity"


@dataclass(frozen=True)
class Host:  # a network namespace, and the process that keeps it
    holder: int
    address: str
    interface: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def within(self, *command: str) -> list[str]:
        """The command line that runs a command on this host."""
        return ["nsenter", "--target", str(self.holder), "--user", "--net", "--preserve-credentials", *command]

    def start(self, *arguments: str, folder: Path, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start python on this host, in a session of its own; what it says goes to a file."""
        given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        with output.open("wb") as said:
            process = subprocess.Popen(
                self.within(sys.executable, *arguments),
                env={**os.environ, **given},
                cwd=folder,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def end(self) -> None:
        """End what is left of all sessions that were started here."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def cable(self, state: str) -> None:
        """Pull the cable (`down`) or plug it in (`up`); nothing of it is told to the processes."""
        subprocess.run(self.within("ip", "link", "set", self.interface, state), check=True)


def _hold(command: Sequence[str], stack: contextlib.ExitStack) -> int:
    holder = subprocess.Popen([*command, "sh", "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stderr is not None
    for end in (holder.stderr.close, holder.stdout.close, holder.wait, holder.kill):
        stack.callback(end)
    if holder.stdout.readline().strip() != "ready":
        raise PermissionError(holder.stderr.read().strip())
    return holder.pid


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts, each with a loopback of its own, that reach each other over one cable.

    Raises:
        PermissionError: where this machine makes no namespaces, or lacks the commands.
    """
    with contextlib.ExitStack() as stack:
        try:
            first = Host(_hold(["unshare", "--user", "--map-root-user", "--net"], stack), "10.77.0.1", "cable0")
            # the second one belongs to the first one's user namespace: a cable may reach into it
            second = Host(_hold(first.within("unshare", "--net"), stack), "10.77.0.2", "cable1")
            ends = ["name", first.interface, "type", "veth", "peer", "name", second.interface]
            _run(first, "link", "add", *ends, "netns", str(second.holder))
            for host in (first, second):
                stack.callback(host.end)
                # torchrun's agent waits for its store until the kernel gives up: some seconds, in place of a quarter of an hour
                patience = host.within("sh", "-c", "echo 4 > /proc/sys/net/ipv4/tcp_retries2")
                subprocess.run(patience, check=False)
                _run(host, "address", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _run(host, "link", "set", interface, "up")
        except FileNotFoundError as error:
            raise PermissionError(str(error)) from error
        yield first, second


def _run(host: Host, *arguments: str) -> None:
    done = subprocess.run(host.within("ip", *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@cache
def permitted() -> str:
    """Return why this machine makes no hosts; empty where it does."""
    try:
        with two_hosts():
            return ""
    except PermissionError as error:
        return str(error) or "no user namespaces"
