"""Wrappers, each of which holds an optimizer; none imports another."""
