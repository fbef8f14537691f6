"""`minidist doctor`: checks this machine, and suggests a fix for each problem."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minidist.errors import RunError, UserError

TORCH = ((2, 11), (2, 14))  # first supported version, first unsupported one
PYTHON = (3, 11)
_GIB = 2**30
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine, and suggest a fix for each problem. The exit code is 0 if training can run, else 1."""

    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of this machine: one line of the doctor's report.

    name: the part of the machine that was checked. value: its state, as text. problem: a description of the problem,
    None without one. fix: how to solve the problem. blocks: whether training cannot run because of the problem.
    """

    name: str
    value: str
    problem: str | None = None
    fix: str | None = None
    blocks: bool = False


def doctor(options: DoctorOptions) -> int:
    """Check this machine, print what was found and how to fix problems; return 0 if training can run, else 1."""
    findings = [_run_check(name, check) for name, check in CHECKS.items()]
    can_train = not any(finding.blocks for finding in findings)
    if options.json:
        print(json.dumps({"can_train": can_train, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        _print_findings(findings, can_train)
    return 0 if can_train else 1


def _run_check(name: str, check: Callable[[str], Finding]) -> Finding:
    """Run one check; return its finding, or a finding that says why the check failed."""
    try:
        return check(name)
    except (OSError, ImportError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        return Finding(name, "unknown", f"the check failed: {type(error).__name__}: {first}", "see the message")


def _print_findings(findings: list[Finding], can_train: bool) -> None:
    """Print the findings as a table, then each problem with its fix."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        state = Text("ok", "green")
        if finding.problem:
            state = Text("stops", "bold red") if finding.blocks else Text("note", "yellow")
        table.add_row(finding.name, state, Text(finding.value))
    console.print(table)
    for finding in findings:
        if finding.problem:
            console.print(Text(f"\n{finding.name}: {finding.problem}\n  {finding.fix}"))
    console.print(f"\nTraining {'can' if can_train else 'cannot'} run here.", highlight=False)


def _check_python(name: str) -> Finding:
    """Check the version of Python."""
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"
    if sys.version_info < PYTHON:
        return Finding(name, value, "minidist needs Python 3.11 or later", "install a later Python", blocks=True)
    return Finding(name, value)


def _check_torch(name: str) -> Finding:
    """Check the version of torch."""
    low, below = (".".join(map(str, version)) for version in TORCH)
    fix = f"pip install 'torch>={low},<{below}'"
    try:
        import torch
    except ImportError as error:
        return Finding(name, "not installed", f"torch cannot be imported: {error}", fix, blocks=True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    value = f"{torch.__version__}, {build} build"
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if not TORCH[0] <= version < TORCH[1]:
        return Finding(name, value, f"minidist is tested with torch >= {low} and < {below} only", fix)
    return Finding(name, value)


def _check_backends(name: str) -> Finding:
    """Check which communication backends this torch has."""
    import torch

    there = torch.distributed.is_available()
    gloo = there and torch.distributed.is_gloo_available()
    nccl = there and torch.distributed.is_nccl_available()
    value = ", ".join(b for b, found in (("gloo", gloo), ("nccl", nccl)) if found) or "none"
    if not gloo:
        return Finding(name, value, "this torch has no gloo", "install torch from pytorch.org or PyPI", blocks=True)
    if torch.cuda.is_available() and not nccl:
        return Finding(name, value, "there are GPUs, but no nccl", "install a CUDA build of torch for Linux")
    return Finding(name, value)


def _check_devices(name: str) -> Finding:
    """List GPUs and memory; a GPU that torch does not see is a problem."""
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    devices = [f"cuda:{i} {gpu.name} {gpu.total_memory / _GIB:.0f} GiB" for i, gpu in enumerate(gpus)]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    value = "; ".join([*devices, f"cpu, {pages / _GIB:.1f} GiB of memory"])
    if not gpus and list(Path("/dev").glob("nvidia[0-9]*")):
        return Finding(name, value, "there is a GPU that torch does not see", "install a CUDA build of torch")
    return Finding(name, value)


def _check_cores(name: str) -> Finding:
    """Report how many cores this process may use."""
    from minidist.tools.launch import usable_cores

    usable, seen = usable_cores(), os.cpu_count()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else seen
    return Finding(name, f"{usable} usable; the machine has {seen}, the affinity mask {allowed}")


def _check_threads(name: str) -> Finding:
    """Check how many threads each rank would get."""
    from minidist.tools.launch import threads_per_rank, usable_cores

    fix = "unset OMP_NUM_THREADS"
    try:
        asked = {ranks: threads_per_rank(ranks) for ranks in (1, 2, 4)}
    except UserError as error:
        return Finding(name, "unknown", str(error), fix, blocks=True)
    value = ", ".join(f"{threads} with {ranks} rank{'s' * (ranks > 1)}" for ranks, threads in asked.items())
    own = {ranks: threads_per_rank(ranks, {}) for ranks in asked}
    if asked == own:
        return Finding(name, value)
    value += f" (OMP_NUM_THREADS is {asked[1]})"
    if 2 * asked[2] > max(2, usable_cores()):
        many = f"two ranks would run {2 * asked[2]} threads on {usable_cores()} cores, which is many times slower"
        return Finding(name, value, many, fix)
    return Finding(name, value)


def _check_interfaces(name: str) -> Finding:
    """Check the network interfaces and the address of the host name."""
    found = {interface: _find_ipv4_address(interface) for _, interface in socket.if_nameindex()}
    value = ", ".join(f"{interface} {address or 'no IPv4 address'}" for interface, address in found.items())
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    if loopback not in found:
        fix = "set GLOO_SOCKET_IFNAME to an interface that is up"
        return Finding(name, value or "none", f"there is no loopback interface {loopback}", fix)
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        problem = f"the host name {socket.gethostname()} has no address, by which gloo finds other machines"
        return Finding(name, value, problem, "for several machines, set GLOO_SOCKET_IFNAME to their common interface")
    return Finding(name, value)


def _find_ipv4_address(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if Linux reports none."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _check_shared_memory(name: str) -> Finding:
    """Report how the shm backend gets its memory."""
    shm = Path("/dev/shm")
    mounted = f"/dev/shm {shutil.disk_usage(shm).total / _GIB:.2f} GiB" if shm.is_dir() else "no /dev/shm"
    memfd = hasattr(os, "memfd_create")
    if memfd:
        os.close(os.memfd_create("minidist-doctor"))
    # The shm backend needs no mount: its memory comes from memfd_create, or from an unlinked temporary file.
    return Finding(name, f"memfd_create {'works' if memfd else 'is missing, so temporary files are used'}; {mounted}")


def _check_disk(name: str) -> Finding:
    """Check that the current folder is writable, and report its free space."""
    free = shutil.disk_usage(".").free
    value = f"{free / _GIB:.1f} GiB free in {Path.cwd()}"
    if not os.access(".", os.W_OK):
        return Finding(name, value, "this folder is not writable", "change to another folder, or give --folder")
    return Finding(name, value)


def _all_reduce_rank_sum(world) -> float:
    """Collective: return the sum of (rank + 1) over all ranks, by one all-reduce."""
    import torch

    from minidist.comm import GroupSpec, all_reduce, bind
    from minidist.mesh import Mesh

    group = bind(world, Mesh(dp=world.size), [GroupSpec("probe", ("dp",))])["probe"]
    total = torch.tensor([world.rank + 1.0])
    all_reduce(total, group)
    return total.item()


def _check_ranks(name: str) -> Finding:
    """Start two ranks and let them communicate."""
    from minidist.tools.launch import RankServer

    fix = "see the message; if a firewall or container blocks 127.0.0.1, allow it"
    try:
        with RankServer() as server:
            server.run(
                _all_reduce_rank_sum, 1, backend="gloo", deadline_s=120
            )  # waits for the server, which imports torch
            start_s = time.perf_counter()
            values = server.run(_all_reduce_rank_sum, 2, backend="gloo", deadline_s=60).values
            took_s = time.perf_counter() - start_s
    except (RunError, UserError) as error:
        return Finding(name, "failed", str(error), fix, blocks=True)
    if values != [3.0, 3.0]:
        return Finding(name, "failed", f"an all_reduce of 1 and 2 gave {values}", fix, blocks=True)
    return Finding(name, f"two ranks started by {server.method}, with an all_reduce over gloo: {took_s:.2f} s")


def _check_links(name: str) -> Finding:
    """Measure latency and bandwidth of each backend."""
    from minidist.tools.network.link_report import report_link_speeds

    return Finding(name, "\n".join(report_link_speeds()))


def _check_compiler(name: str) -> Finding:
    """Look for the C++ compiler that torch.compile needs."""
    found = next((path for tool in ("c++", "g++", "clang++") if (path := shutil.which(tool))), None)
    if found is None:
        return Finding(
            name, "none", "torch.compile needs a C++ compiler on the CPU", "install g++ or clang to use --compile"
        )
    return Finding(name, found)


def _check_extras(name: str) -> Finding:
    """List the optional packages that are missing, by extra."""
    try:
        requirements = importlib.metadata.requires("minidist") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "unknown: minidist is not installed", "minidist is not installed", "pip install -e .")
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        package, extra = re.match(r"[\w.-]+", requirement)[0], re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if extra:
            missing.setdefault(extra[1], []).extend([] if _is_installed(package) else [package])
    value = "; ".join(f"{extra}: {'without ' + ', '.join(lack) if lack else 'all'}" for extra, lack in missing.items())
    return Finding(name, value)


def _is_installed(package: str) -> bool:
    """Return whether a package is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


CHECKS: dict[str, Callable[[str], Finding]] = {
    "Python": _check_python,
    "torch": _check_torch,
    "backends": _check_backends,
    "devices": _check_devices,
    "cores": _check_cores,
    "threads per rank": _check_threads,
    "interfaces": _check_interfaces,
    "shared memory": _check_shared_memory,
    "disk": _check_disk,
    "ranks": _check_ranks,
    "links": _check_links,
    "C++ compiler": _check_compiler,
    "extras": _check_extras,
}
