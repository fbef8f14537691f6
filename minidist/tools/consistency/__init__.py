"""Consistency measured: asynchronous workers on a virtual clock (`clock`)."""
