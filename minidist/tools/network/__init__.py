"""How fast ranks communicate: the cost model, and measurements of this machine.

* `cost`, `overlap`: modelled bytes and times of collectives, and of gradient buckets in backward.
* `calibrate`: fits the cost model's link (alpha, beta, gamma) to measured times (chapter 03, `python -m bench`).
* `link_speed` measures latency and bandwidth of one backend; `link_report` prints them for every backend (`minidist
  doctor`).
* `sockets`: the bytes that this process sent over TCP, as the kernel counts them.
"""
