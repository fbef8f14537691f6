"""Measurements of how fast the ranks of this machine communicate.

* `calibrate`: fits the cost model's link (alpha, beta, gamma) to measured times (chapter 03, `python -m bench`).
* `link_speed` measures latency and bandwidth of one backend; `link_report` prints them for every backend (`minidist
  doctor`).
* `sockets`: the bytes that this process sent over TCP, as the kernel counts them.
"""
