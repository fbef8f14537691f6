"""Figures of real machines, for the question of when a kind of parallelism pays: data sheets, not measurements."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One accelerator in a cluster, by its data sheets. Bandwidths are in one direction, per accelerator.

    flops_per_s: dense matrix products in bf16. memory_bytes_per_s: of its own memory. node_bytes_per_s: to another
    accelerator of the same node. network_bytes_per_s: to another node. source: where the figures are from.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    node_bytes_per_s: float
    network_bytes_per_s: float
    source: str


MACHINES = {
    "A100": Machine(312e12, 2.04e12, 300e9, 25e9, "NVIDIA A100 80 GB SXM; NVLink 3; InfiniBand HDR, 200 Gbit/s"),
    "H100": Machine(989.4e12, 3.35e12, 450e9, 50e9, "NVIDIA H100 SXM5; NVLink 4; InfiniBand NDR, 400 Gbit/s"),
    "H100, Ethernet": Machine(989.4e12, 3.35e12, 450e9, 12.5e9, "NVIDIA H100 SXM5; NVLink 4; Ethernet, 100 Gbit/s"),
}
