"""Rank and world size of this process, from the environment variables of its launcher. Does not import torch.

    streamtune --nproc, torchrun, deepspeed   RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    srun                                      SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS ...
    mpirun                                    OMPI_COMM_WORLD_RANK ..., or PMI_RANK, MPI_LOCALRANKID ...

PyTorch and DeepSpeed read only the variables of the first line, so :meth:`RankEnvironment.export_variables` sets them.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from streamtune.base.privacy import allow_rank_connections
from streamtune.distributed.hosts import LOOPBACK, check_host_name
from streamtune.errors import ArgumentError

DEFAULT_PORT = 29500
LAUNCHERS_WITH_LOCAL_SIZE = ("streamtune", "torchrun", "deepspeed")
"""Launchers that always set the number of ranks on a machine."""
SECRET_VARIABLE = "STREAMTUNE_SECRET"
"""Variable with a secret of the ranks; the user sets it if another launcher starts the ranks."""
RUN_ID_VARIABLE = "STREAMTUNE_RUN_ID"
"""Variable with a unique value for each run, to distinguish connections of two runs on the same ports."""


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process, number of ranks, and address of rank 0."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Number of ranks on this machine."""
    master_addr: str = "127.0.0.1"
    """Address of rank 0."""
    master_port: int = DEFAULT_PORT
    launcher: str = "none"
    """``streamtune``, ``torchrun``, ``deepspeed``, ``srun``, ``mpirun`` or ``another launcher``; ``none`` if this
    process is not a rank."""
    run_id: str = ""
    """Id that all ranks of a run share, and that differs between runs."""
    one_machine: bool = False
    """True if all ranks are known to be on this machine."""

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def host(self) -> str:
        """Name of this machine in messages."""
        return os.environ.get("STREAMTUNE_HOST") or socket.gethostname()

    def export_variables(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set variables that PyTorch, DeepSpeed and OpenMP read, unless they are set. Call this before torch is
        imported."""
        if self.launcher == "none":
            return
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        for name, value in variables.items():
            environ.setdefault(name, str(value))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, count_usable_cpus() // self.local_world_size)))
        if self.world_size > 1:
            self.choose_network_interface(environ)

    def choose_network_interface(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set ``GLOO_SOCKET_IFNAME`` to the network interface towards rank 0; on one machine use the loopback, also for
        NCCL.

        Otherwise gloo uses the address of the machine's own host name, which other machines often cannot reach.
        """
        if (interface := network_interface_to("127.0.0.1" if self.one_machine else self.master_addr)) is None:
            return
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if self.one_machine:
            environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def read_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Return rank, world size and address of rank 0 from environment variables; without a launcher, rank 0 of 1.

    Raises:
        ArgumentError: A variable is missing, not a number, or contradicts another variable.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        environment = _environment_from_torchrun(environ)
    elif _read_number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ:
        environment = _environment_from_slurm(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ and "OMPI_COMM_WORLD_SIZE" in environ:
        environment = _environment_from_mpi(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                          "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")  # fmt: skip
    elif "PMI_RANK" in environ and "PMI_SIZE" in environ:
        environment = _environment_from_mpi(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    elif _read_number(environ, "WORLD_SIZE", 1) > 1:
        raise _missing_variable_error("RANK", "the launcher")
    else:
        return RankEnvironment()
    if (
        not 0 <= environment.rank < environment.world_size
        or not 0 <= environment.local_rank < environment.local_world_size
    ):
        raise ArgumentError(
            f"the variables of {environment.launcher} are inconsistent: rank {environment.rank} of "
            f"{environment.world_size}, local rank {environment.local_rank} of {environment.local_world_size}",
            where="environment",
            fix="unset RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, which another program may have set",
        )
    return environment


def _environment_from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    if environ.get(RUN_ID_VARIABLE):
        launcher = "streamtune"
    elif "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    elif "CROSS_RANK" in environ and "LOCAL_SIZE" in environ:
        launcher = "deepspeed"
    else:
        launcher = "another launcher"
    rank, size = _read_number(environ, "RANK"), _read_number(environ, "WORLD_SIZE")
    if "LOCAL_RANK" not in environ and size > 1:
        raise _missing_variable_error("LOCAL_RANK", launcher)
    local_size = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or environ["WORLD_SIZE"]
    environment = RankEnvironment(
        rank,
        _read_number(environ, "LOCAL_RANK", 0),
        size,
        _read_number({"LOCAL_WORLD_SIZE": local_size}, "LOCAL_WORLD_SIZE"),
        launcher=launcher,
    )
    job = (environ.get(name, "") for name in (RUN_ID_VARIABLE, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return _add_address(environment, environ, "/".join(job))


def _environment_from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    size = _read_number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "")
    tasks = expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or str(size))
    node = _read_number(environ, "SLURM_NODEID", 0)
    environment = RankEnvironment(
        _read_number(environ, "SLURM_PROCID"),
        _read_number(environ, "SLURM_LOCALID"),
        size,
        tasks[node] if node < len(tasks) else 0,
        master_addr=nodes[0] if len(nodes) > 1 else "127.0.0.1",
        launcher="srun",
    )
    return _add_address(environment, environ, f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}")


def _environment_from_mpi(
    environ: Mapping[str, str], rank_name: str, size_name: str, local_rank_name: str, local_size_name: str
) -> RankEnvironment:
    world = _read_number(environ, size_name)
    local = _read_number(environ, local_size_name, world if "MASTER_ADDR" not in environ else 0)
    if local != world and "MASTER_ADDR" not in environ:
        raise ArgumentError(
            "mpirun has started ranks on several machines, but the address of rank 0 is not set",
            where="MASTER_ADDR",
            fix="set it to the first host: `mpirun -x MASTER_ADDR=HOST ...`",
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMI_JOBID")
    environment = RankEnvironment(
        _read_number(environ, rank_name), _read_number(environ, local_rank_name), world, local, launcher="mpirun"
    )
    return _add_address(environment, environ, job or str(os.getppid() if local == world else ""))


def _add_address(environment: RankEnvironment, environ: Mapping[str, str], job: str) -> RankEnvironment:
    """Return ``environment`` with address and port of rank 0, from variables or a hash of ``job``, and with the run's
    id."""
    address = environ.get("MASTER_ADDR") or environment.master_addr
    check_host_name(address, "MASTER_ADDR" if environ.get("MASTER_ADDR") else "environment")
    if environ.get(SECRET_VARIABLE):
        job = f"{environ[SECRET_VARIABLE]}/{job}"
    has_job_port = environment.launcher in ("srun", "mpirun") and job
    port = 15000 + int(_sha256(job)[:8], 16) % 5000 if has_job_port else DEFAULT_PORT
    port = _read_number(environ, "MASTER_PORT", port)
    if port > 65535:
        raise ArgumentError(
            f"MASTER_PORT must be a port, found {port}",
            where="environment",
            fix="set it to a free port from 1024 to 65535 on all ranks",
        )
    has_all_ranks = environment.local_world_size == environment.world_size
    return replace(
        environment,
        master_addr=address,
        master_port=port,
        run_id=_sha256(f"{job}/{address}/{port}/{environment.world_size}")[:32],
        one_machine=has_all_ranks and (environment.launcher in LAUNCHERS_WITH_LOCAL_SIZE or address in LOOPBACK),
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if not value and default is not None:
        return default
    if value is None:
        raise _missing_variable_error(name, "the launcher")
    if not value.strip().isdecimal():
        raise ArgumentError(
            f"the variable {name} must be a number, found '{value}'",
            where="environment",
            fix=f"unset {name}, or start the ranks with --nproc, torchrun, deepspeed, srun or mpirun",
        )
    return int(value)


def _missing_variable_error(name: str, launcher: str) -> ArgumentError:
    return ArgumentError(
        f"this process is one of several ranks, but {launcher} has not set {name}",
        where="environment",
        fix="start the ranks with --nproc, torchrun, deepspeed, srun or mpirun",
    )


def expand_nodes(text: str) -> list[str]:
    """Return the host names in a Slurm node list: ``n[01-03,7],gpu2`` -> ``n01, n02, n03, n7, gpu2``."""
    nodes: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        nodes += _expand_node_entry(entry)
    return nodes


def _expand_node_entry(entry: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", entry)
    if match is None:
        return [entry]
    numbers: list[str] = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [match[1] + number + rest for number in numbers for rest in _expand_node_entry(match[3])]


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's ``TASKS_PER_NODE``: ``2(x3),1`` -> ``2, 2, 2, 1``."""
    tasks: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is not None:
            tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def count_usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def network_interface_to(host: str) -> str | None:
    """Return the name of the network interface by which this machine reaches ``host``; None if it is unknown."""
    import psutil  # 20 ms

    try:
        with allow_rank_connections():
            address = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0]
            with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
                probe.connect((address[4][0], 9))  # on a datagram socket this only chooses the route; nothing is sent
                local_address, remote_address = probe.getsockname()[0], address[4][0]
    except OSError:
        return None
    # The route to this machine's own address is the loopback, but other machines use the address's interface.
    interface_address = remote_address if local_address == remote_address else local_address
    for name, addresses in psutil.net_if_addrs().items():
        if any(str(entry.address).partition("%")[0] == interface_address for entry in addresses):
            return str(name)
    return None
