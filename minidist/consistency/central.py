"""A central server inside the trainer: one rank sums the gradients, updates, and sends the parameters to all ranks.

The server alone has masters and optimizer states. The simple version is `minidist.simple.consistency.central_step`.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from minidist.comm import Group, P2POp, batch_send_recv, recv, send
from minidist.parallel.data.naive import NaiveReducer
from minidist.parameters import ParamSpecs


class ParameterServerReducer(NaiveReducer):
    """Gradient reducer with a parameter server: one rank sums the gradients, updates, and sends the parameters to all.

    parameters, specs: as in `GradientReducer`. group: all ranks. server: the group rank of the server.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs, group: Group, server: int):
        super().__init__(parameters, specs, [group])
        self._group = group
        self._server = server
        alone = (group.ranks[server],)
        self.master_specs = {
            name: replace(spec, replicas=alone, contributors=alone)
            for name, spec in self.master_specs.items()
            if group.rank == server
        }
        if group.rank != server:
            self.masters = {}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the reduced gradients, by parameter name, on the server; {} on the other ranks."""
        return super().gradients() if self.masters else {}

    def finish_reductions(self) -> None:
        """Collective: sum all gradients on the server and set `.grad` there; None for a parameter that no rank used."""
        parts = [total.reshape(-1) for total in self._sums.values()]
        parts.append(parts[0].new_tensor([float(name in self._used) for name in self._sums]))
        flat = torch.cat(parts)
        self._sum_on_server(flat)
        if self._group.rank == self._server:
            *sums, counts = flat.split([part.numel() for part in parts])
            for parameter, total, count in zip(self._parameters.values(), sums, counts.tolist(), strict=True):
                parameter.grad = total.view_as(parameter) if count else None

    @torch.no_grad()
    def gather_params(self) -> None:
        """Collective: broadcast the server's parameters to all ranks."""
        flat = torch.cat([parameter.reshape(-1) for parameter in self._parameters.values()])
        self._send_from_server(flat)
        for parameter, part in zip(
            self._parameters.values(), flat.split([p.numel() for p in self._parameters.values()]), strict=True
        ):
            parameter.copy_(part.view_as(parameter))

    def _sum_on_server(self, flat: Tensor) -> None:
        """Collective: add all ranks' `flat` (n,) to the server's, in rank order; the other ranks' does not change."""
        if self._group.rank != self._server:
            send(flat, self._server, self._group)
            return
        received = torch.empty_like(flat)
        for rank in self._other_ranks():
            recv(received, rank, self._group)
            flat += received

    def _send_from_server(self, flat: Tensor) -> None:
        """Collective: overwrite all ranks' `flat` (n,) with the server's, which sends it to each of them."""
        if self._group.rank != self._server:
            recv(flat, self._server, self._group)
        else:
            batch_send_recv([P2POp("send", flat, rank) for rank in self._other_ranks()], self._group)

    def _other_ranks(self) -> list[int]:
        """Return the group ranks that are not the server."""
        return [rank for rank in range(self._group.size) if rank != self._server]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return all parameters, by name, on the server; {} on the other ranks."""
        return super().checkpoint_tensors() if self.masters else {}
