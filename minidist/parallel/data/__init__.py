"""Data parallelism: the gradient reducer, buckets, replicas."""
