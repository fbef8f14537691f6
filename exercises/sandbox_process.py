"""The inside of a sandbox: drop privileges, set limits, then become the rank server for a learner's code.

`exercises.sandbox` starts this process, in the namespaces of bubblewrap or as root without them. Everything that runs
here may be under the control of the learner's code later, so the client trusts nothing that comes from it.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
from collections.abc import Sequence

from minidist.tools.launch.protocol import MessageSocket
from minidist.tools.launch.server import main as serve_ranks

SCRATCH = "minidist-scratch"
_CLONE_NEWIPC, _CLONE_NEWNET = 0x08000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_FILE_BYTES = 64 << 20
_OPEN_FILES = 1024


def main(
    fd: int, preload: Sequence[str], uid: int | None, private: bool, processes: int, memory_bytes: int, folder: str
) -> None:
    """Run the rank server of a sandbox for the client at the other end of socket `fd`.

    uid: become this user and its group; None: stay. private: enter a network and an IPC namespace of its own first, if
    the system permits it. processes: limit for all processes of this user. memory_bytes: limit per process. folder: for
    temporary files; the folder for the files of checks is created in it.

    Its first message to the client has three file descriptors: of the folder of checks, of `folder` and of /dev/shm.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    gained = []
    if private and libc.unshare(_CLONE_NEWNET) == 0:
        _set_loopback_up()
        gained.append("network")
    if private and libc.unshare(_CLONE_NEWIPC) == 0:
        gained.append("ipc")
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the sandbox can trace another or write to its memory
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _set_limit(kind, limit)
    scratch = os.path.join(folder, SCRATCH)
    os.mkdir(scratch, 0o755)
    folders = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (scratch, folder, "/dev/shm")]
    with socket.socket(fileno=os.dup(fd)) as connection:
        MessageSocket(connection).send({"event": "folders", "gained": gained, "scratch": scratch}, tuple(folders))
    for descriptor in folders:
        os.close(descriptor)
    os.chdir(folder)
    serve_ranks(fd, "fork", preload)


def _set_limit(kind: int, limit: int) -> None:
    """Lower a resource limit of this process, as far as it is permitted. kind: such as `resource.RLIMIT_NPROC`."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (limit, limit))


def _set_loopback_up() -> None:
    """Turn on the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
