"""Several hosts on one machine: network namespaces around a switch, each behind a link of limited rate.

    with Hosts(3, mbit=400) as hosts, hosts.workers([0, 1, 1, 2], function, *args) as workers:
        for rank, said in workers:
            ...

Links, addresses and the switch are in namespaces of their own: nothing outside sees or reaches them, and they vanish
with the namespaces. Leaving the block removes the namespaces; those of a run that was killed are removed at the next
start. All hosts share the kernel, its memory and its process ids.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from transfuse.testing.ranks import listening

__all__ = ["LINK", "Hosts", "Traffic", "Unavailable", "call", "settle", "traffic"]

#: The name of every host's one interface besides loopback.
LINK = "wire"
#: How much a link's queue holds before packets are dropped, as time at the link's rate.
QUEUE_SECONDS = 0.05
#: How long a link may go unserved on a busy machine before rate is lost. After a pause this much goes through at once.
BURST_SECONDS = 0.005
#: Space for the largest packet that is handed to a link at once, whatever the rate.
LEAST_BURST_BYTES = 1 << 17
#: Into how many parts the ports of each end are divided, a power of two. Each pair of parts has a rate of its own.
FLOWS = 32
#: Timeout of the ranks' group: long, since one rank may wait for another that fills gigabytes with random numbers.
TIMEOUT = timedelta(minutes=5)

_NAMESPACES = Path("/var/run/netns")
_NAME = re.compile(r"transfuse-(?P<pid>\d+)-(?P<started>\d+)-\d+-(?:switch|host\d+)")
_CLONE_NEWNET = 0x40000000
_serial = itertools.count()


class Unavailable(Exception):
    """Hosts cannot be made here. The message says why."""


class Traffic(NamedTuple):
    """Bytes that went over a host's link, including one header for each packet as the host saw it."""

    received: int
    sent: int


class Hosts:
    """``count`` hosts, each with a link of ``mbit`` Mbit/s in both directions. Raises :class:`Unavailable` on entry.

    ``links`` says which hosts have links of another rate. With ``flow_mbit`` each connection has that rate of its own
    too, as in clouds: uploads are divided by the lower bits of their port.
    """

    def __init__(
        self,
        count: int,
        mbit: float = 400.0,
        links: Mapping[int, float] | None = None,
        *,
        flow_mbit: float | None = None,
    ) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"1 to 200 hosts, got {count}")
        if mbit <= 0:
            raise ValueError(f"mbit must be positive, got {mbit}")
        self.count, self.mbit = count, mbit
        self._links = dict(links or {})
        self._flow_mbit = flow_mbit
        self._prefix = f"transfuse-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}-"

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")
        _remove(name for name in _namespaces() if _abandoned(name))
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def namespace(self, host: int) -> str:
        """The namespace's name, for ``ip netns exec``."""
        return f"{self._prefix}host{range(self.count)[host]}"

    @property
    def switch(self) -> str:
        """The namespace of the switch. There the link of host ``i`` ends in the interface ``port{i}``."""
        return self._prefix + "switch"

    def address(self, host: int) -> str:
        """The address at which other hosts reach this host."""
        return f"10.231.0.{range(self.count)[host] + 1}"

    def workers(
        self, placement: Sequence[int], function: Callable[..., None], *args: object, timeout: timedelta = TIMEOUT
    ) -> AbstractContextManager[Iterator[tuple[int, Any]]]:
        """Start a rank on each host that ``placement`` names, for the length of a ``with`` block.

        As with :func:`listening`, ``function(rank, *args)`` finds a default group; here the group uses the hosts'
        links, and ``timeout`` is the group's.
        """
        return listening(len(placement), _work, [self.namespace(host) for host in placement], timeout, function, args)

    def _make(self) -> None:
        switch = self.switch
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for host in range(self.count):
            name, port = self.namespace(host), f"port{host}"
            call("ip", "netns", "add", name)
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", name)
            # No IPv6 addresses: there is only one way to reach a host.
            call("ip", "-n", name, "link", "set", LINK, "addrgenmode", "none", "up")
            call("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", LINK)
            call("ip", "-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
            # A rate limit applies to sending: at the host's end to its uploads, at the switch's end to its downloads.
            mbit = self._links.get(host, self.mbit)
            _limit(name, LINK, mbit) if self._flow_mbit is None else _limit_flows(name, LINK, self._flow_mbit)
            _limit(switch, port, mbit)

    def _remove(self) -> None:
        if left := _remove(name for name in _namespaces() if name.startswith(self._prefix)):
            raise OSError("; ".join(left))


def _limit(namespace: str, device: str, mbit: float) -> None:
    bytes_per_second = mbit * 1e6 / 8
    burst = max(LEAST_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
    limit = burst + max(LEAST_BURST_BYTES, round(bytes_per_second * QUEUE_SECONDS))
    bucket = ("tbf", "rate", f"{round(bytes_per_second)}bps", "burst", str(burst), "limit", str(limit))
    call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _limit_flows(namespace: str, device: str, mbit: float) -> None:
    """Give each connection a rate of its own. Two whose ports have the same lower bits share one."""
    lines = [f"qdisc add dev {device} root handle 1: htb"]
    # Connections between two processes differ in one of their ports: all of one end's may have the same.
    for number in range(FLOWS * FLOWS):
        ours, theirs = divmod(number, FLOWS)
        lines.append(f"class add dev {device} parent 1: classid 1:{number + 1:x} htb rate {mbit}mbit burst 128k")
        match = f"match ip sport {ours} {FLOWS - 1:#x} match ip dport {theirs} {FLOWS - 1:#x}"
        lines.append(f"filter add dev {device} parent 1: protocol ip prio 1 u32 {match} flowid 1:{number + 1:x}")
    call("tc", "-n", namespace, "-batch", "-", said="\n".join(lines))


def traffic() -> Traffic:
    """In a worker: the bytes that have gone over its host's link so far."""
    # Of the thread that reads, because threads enter namespaces one by one.
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    numbers = next(line.split(":")[1] for line in lines if line.strip().startswith(f"{LINK}:")).split()
    return Traffic(int(numbers[0]), int(numbers[8]))


def settle(namespace: str, timeout: timedelta = TIMEOUT, *, interface: str = LINK) -> None:
    """Called in the main thread of each rank of a default group over loopback, before it has threads: move to a host.

    Replaces the group by one over this interface of the hosts.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    # The connection to the store stays as it is, on the machine's own loopback.
    store = PrefixStore("hosts", dist.distributed_c10d._get_default_store())
    # Wait until all ranks have made the old group: leaving it earlier would break it for ranks that still connect.
    store.set(f"rank{rank}", "here")
    store.wait([f"rank{other}" for other in range(count)], timeout)
    dist.destroy_process_group()
    _enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)


def _work(
    rank: int, namespaces: list[str], timeout: timedelta, function: Callable[..., None], args: tuple[object, ...]
) -> None:
    settle(namespaces[rank], timeout)
    function(rank, *args)


def _enter(namespace: str) -> None:
    """Enter a namespace, for this thread and the threads that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", namespace)
    finally:
        os.close(fd)


def call(program: str, *args: str, said: str | None = None) -> str:
    """Run a program, to which ``said`` is said, and return what it prints."""
    path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise Unavailable(f"`{program}` is not installed (Debian: apt-get install iproute2)")
    # In a session of its own, so that Ctrl-C reaches only the caller.
    command = [path, *args]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=120, start_new_session=True)
    if done.returncode != 0:
        raise Unavailable(f"`{shlex.join([program, *args])}` failed: {done.stderr.strip()}")
    return done.stdout


def _namespaces() -> list[str]:
    """The namespaces of all runs."""
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(_NAMESPACES) if _NAME.fullmatch(name))
    return []


def _remove(namespaces: Iterable[str]) -> list[str]:
    """Remove all of them, and report failures."""
    failures = []
    for name in namespaces:
        try:
            call("ip", "netns", "delete", name)
        except Unavailable as error:
            failures.append(str(error))
    return failures


def _abandoned(namespace: str) -> bool:
    """Whether the namespace's run has ended. A process id may be reused, but not with the same start time."""
    match = _NAME.fullmatch(namespace)
    assert match is not None
    return _started(int(match["pid"])) != int(match["started"])


def _started(pid: int) -> int | None:
    """When this process was started, in ticks since the machine booted."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
