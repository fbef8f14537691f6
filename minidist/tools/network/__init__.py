"""How fast the ranks of this machine exchange messages: calibration, link speeds, bytes counted by the kernel."""
