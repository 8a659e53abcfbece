"""How the ranks find each other: rank 0 listens on one address, the others come there and prove that they are of its
job (handshake.py)."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass

from hkd_hpc.comm.control.handshake import POLL_S, SEND_S, Newcomer, introduce, receive, send
from hkd_hpc.comm.control.watch import Problem
from hkd_hpc.comm.control.wire import Message
from hkd_hpc.comm.interfaces import LOCALHOST, own_address
from hkd_hpc.comm.launchers import Hint
from hkd_hpc.common.errors import RunError, UsageError

LOWEST_PORT, PORTS = 20000, 12000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens. Several ports: rank 0 takes the first free one, and the others try them in turn."""

    host: str
    ports: tuple[int, ...]
    token: str


@dataclass(frozen=True)
class Member:
    """One process of the job. `host` names the machine for people, `machine` distinguishes two machines of one name."""

    rank: int
    host: str
    machine: str
    pid: int

    @classmethod
    def here(cls, rank: int) -> Member:
        """This process."""
        return cls(rank, socket.gethostname(), machine_name(), os.getpid())

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Topology:
    """All processes of the job by rank, as this `rank` sees them."""

    rank: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.members)

    @property
    def hosts(self) -> list[str]:
        """Names by rank, which tell the machines apart: where two have one name, those with the boot id."""
        hosts, machines = [member.host for member in self.members], [member.machine for member in self.members]
        return machines if len(set(machines)) > len(set(hosts)) else hosts

    @property
    def local_rank(self) -> int:
        """The place of this rank among those of its machine."""
        return self._on_this_machine().index(self.rank)

    @property
    def local_size(self) -> int:
        """How many ranks are on this machine."""
        return len(self._on_this_machine())

    def _on_this_machine(self) -> list[int]:
        return [member.rank for member in self.members if member.machine == self.members[self.rank].machine]


def machine_name() -> str:
    """Host name and boot id: clones of one image may share the name, containers of one machine the boot id."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"[:200]


def random_address(machines: Sequence[str], env: Mapping[str, str]) -> Address:
    """For a world in which rank 0 can pass its address on (MPI): any free port, or the user's MASTER_PORT.

    machines: of all ranks; where they are one, nobody outside need reach it. A MASTER_ADDR is taken all the same.
    """
    is_one_machine = len(set(machines)) == 1
    if env.get("MASTER_ADDR"):
        host = _resolved(env["MASTER_ADDR"], is_one_machine)
    else:
        host = LOCALHOST if is_one_machine else own_address([machine.split("/")[0] for machine in machines[1:]])
    return Address(host, (_port(env) if env.get("MASTER_PORT") else 0,), secrets.token_hex(16))


def derived_address(hint: Hint, env: Mapping[str, str]) -> Address:
    """For a world without MPI: the same candidates in every rank, from the names of the job and of the step.

    HKD_TOKEN, a secret in the job's environment, makes the token one that nobody else can derive.

    A MASTER_PORT is taken as it is, unless torchrun's agent holds it.
    """
    names = ["HKD_TOKEN", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
    if hint.launcher == "slurm":
        names += ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"]
    key = "/".join([str(os.getuid()), str(hint.size)] + [f"{name}={env.get(name, '')}" for name in names])
    digest = hashlib.sha256(os.fsencode(key)).digest()
    ports = tuple(LOWEST_PORT + int.from_bytes(digest[i : i + 4], "big") % PORTS for i in range(len(digest) - 3))
    if env.get("MASTER_PORT") and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        ports = (_port(env),)
    return Address(_master_host(hint, env), ports, digest.hex())


def listen(address: Address) -> socket.socket:
    """Rank 0's listening socket, bound to the one address. Raises UsageError naming the port if it is taken."""
    reason: str | None = ""
    for port in address.ports:
        try:
            return _bound(address.host, port)
        except OSError as error:
            reason = error.strerror
    ports = f"port {address.ports[0]}" if len(address.ports) == 1 else f"any of {len(address.ports)} ports"
    ports = "any port" if address.ports == (0,) else ports
    raise UsageError(
        f"rank 0 cannot listen on {ports} of {address.host} ({reason}): "
        f"set MASTER_PORT to a free port, or unset it (and MASTER_ADDR to an address of rank 0's host)"
    )


class AlreadyReported(Exception):
    """The job cannot start, and rank 0 prints why: end with this exit code and without another line."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def accept_all(
    listener: socket.socket, token: str, me: Member, size: int, problem: Problem
) -> tuple[dict[int, socket.socket], list[Member]]:
    """Rank 0: take in every other rank, then send all the members. Returns connections and members, both by rank.

    Raises UsageError for two processes of one rank or of another size, RunError if the guard sees a problem.
    """
    with _Door(listener, token, me, size) as door:
        while len(door.members) < size:
            _raise_on(problem, door.members, size)
            door.open_once()
    return door.links, [door.members[rank] for rank in range(size)]


class _Door:
    """Rank 0's listening socket: takes in whoever is of the job, whatever others do at the same time.

    At its end those who are in are told of all members, or of what went wrong; the others are sent away.
    """

    def __init__(self, listener: socket.socket, token: str, me: Member, size: int) -> None:
        self._listener, self._token, self._size = listener, token, size
        self.members: dict[int, Member] = {0: me}
        self.links: dict[int, socket.socket] = {}
        self._newcomers: set[Newcomer] = set()
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Door:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_told = isinstance(error, (UsageError, RunError))
        answer: Message = {"error": str(error) if is_told else "rank 0 was interrupted"}
        if error is None:
            answer = {"members": [asdict(self.members[rank]) for rank in range(self._size)]}
        for link in self.links.values():
            send(link, answer)
        for newcomer in list(self._newcomers):
            if newcomer.hello:
                send(newcomer.link, answer)
            self._send_away(newcomer)
        self._selector.close()

    def open_once(self) -> None:
        """Wait a moment for whatever comes first: newcomers, or what they say."""
        for event, _ in self._selector.select(POLL_S):
            if event.data is None:
                self._meet()
            elif isinstance(event.data, Member):  # nobody sends before the answer: it has closed
                raise RunError(f"{event.data} ended while the job was starting")
            else:
                self._hear(event.data)
        for newcomer in [newcomer for newcomer in self._newcomers if newcomer.is_late]:
            self._send_away(newcomer)

    def _meet(self) -> None:
        try:
            link = self._listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has left
        except OSError as error:
            raise UsageError(
                f"rank 0 cannot take in more than {len(self.members)} of {self._size} ranks ({error.strerror}): raise "
                "the number of files that a process may have open there (ulimit -n), now "
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
            ) from None
        newcomer = Newcomer(link, self._token)
        self._newcomers.add(newcomer)
        self._selector.register(link, selectors.EVENT_READ, newcomer)

    def _hear(self, newcomer: Newcomer) -> None:
        if not newcomer.read(self._checked):
            self._send_away(newcomer)
        elif newcomer.hello and newcomer.is_ready:
            member = self._checked(newcomer.hello)
            self.members[member.rank], self.links[member.rank] = member, newcomer.link
            self._newcomers.remove(newcomer)
            self._selector.modify(newcomer.link, selectors.EVENT_READ, member)

    def _send_away(self, newcomer: Newcomer) -> None:
        self._newcomers.remove(newcomer)
        self._selector.unregister(newcomer.link)
        newcomer.link.close()

    def _checked(self, hello: Message) -> Member:
        """The newcomer, if its rank and size fit the job."""
        member = Member(**hello["member"])
        if hello["size"] != self._size or not 0 < member.rank < self._size:
            raise UsageError(
                f"{member} says it is one of {hello['size']} ranks, rank 0 knows of {self._size}: "
                f"start all ranks with the same WORLD_SIZE"
            )
        if other := self.members.get(member.rank):
            raise UsageError(f"a duplicate rank: {member} and {other} both say they are rank {member.rank}")
        return member


def join(address: Address, me: Member, size: int, problem: Problem) -> tuple[socket.socket, list[Member]]:
    """Other ranks: find rank 0 and wait until all are in. Returns the connection and the members by rank.

    Raises RunError if the guard sees a problem, AlreadyReported if rank 0 does.
    """
    while True:
        for port in address.ports:
            link = _connected(address.host, port)
            if link is None:
                continue
            is_rank_0 = introduce(link, address.token, {"size": size, "member": asdict(me)}, problem)
            answer = receive(link, problem) if is_rank_0 else None
            if answer and "error" in answer:
                raise AlreadyReported(1)
            if answer and "members" in answer:
                return link, [Member(**member) for member in answer["members"]]
            link.close()
        _raise_on(problem)
        time.sleep(0.05)


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: `n[01-04,7],m2` gives n01."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _master_host(hint: Hint, env: Mapping[str, str]) -> str:
    """Where rank 0 runs, as an IPv4 address: MASTER_ADDR, this host if it has all ranks, or the step's first node."""
    name = env.get("MASTER_ADDR")
    if not name and hint.local_size == hint.size:
        return LOCALHOST
    name = name or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    return _resolved(name, hint.local_size == hint.size)


def _resolved(name: str, is_one_machine: bool) -> str:
    """The IPv4 address of rank 0's host. Raises UsageError where it has none."""
    try:
        address = socket.gethostbyname(name)
        is_alias = address.startswith("127.") and not name.startswith("127.") and name != "localhost"
        if is_alias and not is_one_machine:  # Debian's /etc/hosts gives a host's own name as 127.0.1.1
            return own_address([])
        return address
    except (OSError, ValueError):  # ValueError: no name of a host at all
        raise UsageError(
            f"the host of rank 0, {name!r}, has no address here: set MASTER_ADDR to an address "
            f"of it that every rank can reach"
        ) from None


def _port(env: Mapping[str, str]) -> int:
    text = env["MASTER_PORT"]
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise UsageError(f"MASTER_PORT={text!r} is not a port; allowed: 1 to 65535")
    return int(text)


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        return listener
    except OSError:
        listener.close()
        raise


def _connected(host: str, port: int) -> socket.socket | None:
    """A connection; None if nobody listens there."""
    try:
        return socket.create_connection((host, port), timeout=SEND_S)
    except OSError:
        return None


def _raise_on(problem: Problem, members: Container[int] = (), size: int = 0) -> None:
    text = problem()
    if text:
        missing = [str(rank) for rank in range(size) if rank not in members]
        raise RunError(text + (f" (not yet here: rank {', '.join(missing)})" if missing else ""))
