"""Benchmarks against live peers; each is run as ``python -m benchmarks.<method>``."""
