"""Wrappers, which hold an optimizer; none imports another.

A wrapper says what the optimizer sees, whether its step is made, and what becomes of the result.
"""
