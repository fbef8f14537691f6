"""Torchrun agents of one elastic job on this machine, each as if it were a node, around a rendezvous store of our own.

The store is in the test's process, so that any agent can be killed: torchrun itself ends if the node of the rendezvous
endpoint does.
"""

import os
import signal
import threading
import time
import uuid
from pathlib import Path

from torch.distributed import TCPStore

from tests.helpers.processes import is_alive
from tests.helpers.small_run import DEADLINE_S, Command, descendants

# torchrun's defaults find a lost node after 15 s, and then wait another 30 s for other nodes.
_TIMEOUTS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"

_ENVIRON = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see "Elastic runs" in docs/reference.md
    "OMP_NUM_THREADS": "1",  # each agent believes that it has the machine's cores for itself
}


class Agents:
    """A job of torchrun agents; a context manager that ends them all. `start` adds one.

    endpoint: the address at which one of the agents serves the rendezvous; None for a store in this process.
    """

    def __init__(
        self,
        folder: Path,
        *train: str,
        nodes: str = "1:4",
        ranks_per_node: int = 1,
        max_restarts: int = 5,
        endpoint: str | None = None,
    ):
        self._store = None
        if endpoint is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            endpoint = f"127.0.0.1:{self._store.port}"
        self.folder, self.agents, self._never = folder, [], threading.Event()
        self._arguments = (
            *("torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(ranks_per_node)),
            *("--max-restarts", str(max_restarts), "--rdzv-backend", "c10d", "--rdzv-id", uuid.uuid4().hex),
            *("--rdzv-endpoint", endpoint),
        )
        self._train = train

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_) -> None:
        for agent in self.agents:
            agent.command.process.kill()
        for agent in self.agents:
            agent.reader.join()
            agent.command.process.wait()

    def start(
        self, *, namespace: str | None = None, address: str = "127.0.0.1", is_host: bool = False, **environ: str
    ) -> "Agent":
        """Start an agent, which joins the job.

        namespace: the network namespace of the agent, if it is not this one. address: of the agent. is_host: whether it
        serves the rendezvous. environ: additional environment variables.
        """
        rendezvous = f"is_host={str(is_host).lower()},{_TIMEOUTS}"
        module = (*self._arguments, "--rdzv-conf", rendezvous, "--local-addr", address, "-m", "minidist")
        prefix = ("ip", "netns", "exec", namespace) if namespace else ()
        environ = _ENVIRON | environ
        agent = Agent(Command("train", *self._train, module=module, folder=self.folder, environ=environ, prefix=prefix))
        self.agents.append(agent)
        return agent

    def output(self) -> str:
        """What all agents and their ranks have printed so far."""
        return "".join(f"--- agent {n}\n{agent.output}" for n, agent in enumerate(self.agents))

    def wait_for(self, condition, deadline_s: float = DEADLINE_S) -> None:
        """Wait until `condition()` is true. Fails when all agents have ended.

        Raises TimeoutError with all output at the deadline, which a busy machine may miss.
        """
        end_s = time.monotonic() + deadline_s
        while not condition():
            ended = all(agent.command.process.poll() is not None for agent in self.agents)
            assert not ended or condition(), f"all agents have ended:\n{self.output()}"
            if time.monotonic() >= end_s:
                raise TimeoutError(f"not within {deadline_s} s:\n{self.output()}")
            self._never.wait(0.05)  # of a reading, without taking the ranks' cores


class Agent:
    """One torchrun agent, whose output a thread reads."""

    def __init__(self, command: Command):
        self.command = command
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def output(self) -> str:
        """What the agent and its ranks have printed so far."""
        return self.command.output

    def ranks(self) -> list[int]:
        """The process ids of its ranks."""
        pid = self.command.process.pid
        return [child for child, parent in descendants(pid).items() if parent == pid and is_alive(child)]

    def kill(self) -> None:
        """Kill the agent, and with it its ranks, as the loss of a node does."""
        self.command.process.kill()

    def terminate(self) -> None:
        """Send the agent SIGTERM, as the scheduler does when it takes a node back."""
        os.kill(self.command.process.pid, signal.SIGTERM)

    def end(self) -> int:
        """Wait for the end of the agent; returns the exit code."""
        code = self.command.process.wait(DEADLINE_S)
        self.reader.join(DEADLINE_S)
        return code

    def _read(self) -> None:
        for line in self.command.process.stdout:
            self.command.output += line
