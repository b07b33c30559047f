"""Compositions of wrappers, ours and optax's, against an interpreter in NumPy."""
