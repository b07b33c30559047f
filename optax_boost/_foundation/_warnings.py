"""Warnings that point to the user's line."""

from collections.abc import Sequence
import sys
import warnings

from optax_boost._foundation import _paths

# The packages whose stack frames may lie between a method and the user's line.
_LIBRARIES = ("optax_boost", "jax", "optax", "flax", "contextlib")


class NoEffectWarning(UserWarning):
  """A pattern, mask or method was given a tree in which it matches nothing."""


def warn(message: str, category: type[Warning]) -> None:
  """Issues a warning at the user's line: the innermost stack frame outside of `_LIBRARIES`."""
  frame, level = sys._getframe(1), 2
  while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
    frame, level = frame.f_back, level + 1
  warnings.warn(message, category, stacklevel=level)


def warn_no_effect(message: str, paths: Sequence[str]) -> None:
  """Issues a :class:`NoEffectWarning` whose message ends with a list of the leaves."""
  warn(message + list_leaves(paths), NoEffectWarning)


def list_leaves(paths: Sequence[str]) -> str:
  """Returns the last sentence of a message, which lists the first six leaves."""
  shown = ", ".join(map(_paths.leaf_name, paths[:6])) + (", ..." if len(paths) > 6 else "")
  return f" The leaves are: {shown}."
