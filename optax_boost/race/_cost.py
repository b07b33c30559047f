"""Counts the gradients that a train step computes: in its trace, or while it runs.

The loss's output passes through an identity that leaves a mark in the program: one where the loss
is evaluated alone, another where it is pulled back. Marks outside of control flow are counted in
the trace, without compiling anything. Marks inside a loop or a conditional (the trials of a line
search, a refresh on some steps) count themselves while the program runs.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from optax_boost import _jaxpr

_BACKWARD, _FORWARD = "_race_backward", "_race_forward"


class Evaluations(NamedTuple):
  """Backward passes with their forward passes, and forward passes alone."""

  gradients: float
  forwards: float

  @property
  def cost(self) -> float:
    """Both in gradients: a backward pass takes about as long as two forward passes."""
    return self.gradients + self.forwards / 3


class Counter:
  """Marks the evaluations of a loss, and counts those of a program that runs."""

  def __init__(self) -> None:
    self._counts = {_BACKWARD: 0, _FORWARD: 0}

  def mark(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same loss, with marks."""
    forward, backward = self._identity(_FORWARD), self._identity(_BACKWARD)
    marked = jax.custom_vjp(lambda value: forward(value))
    marked.defvjp(lambda value: (value, None), lambda _, cotangent: (backward(cotangent),))

    def mark_scalar(value: Any) -> Any:
      # The train step refuses other losses, with a better message.
      return marked(value) if getattr(value, "shape", None) == () else value

    def loss(*args: Any) -> Any:
      output = loss_fn(*args)
      if isinstance(output, tuple) and len(output) == 2:
        return mark_scalar(output[0]), output[1]
      return mark_scalar(output)

    return loss

  def _identity(self, name: str) -> Callable[[jax.Array], jax.Array]:
    """An identity whose equation bears a name, and which counts its runs."""

    def count(_: jax.Array) -> None:
      self._counts[name] += 1

    def identity(value: jax.Array) -> jax.Array:
      jax.debug.callback(count, value)
      return value

    # A jitted function gives its name to its equation.
    identity.__name__ = name
    return jax.jit(identity)

  def take(self) -> Evaluations:
    """The evaluations since the last call; waits for programs that still run."""
    jax.effects_barrier()
    taken = Evaluations(*self._counts.values())
    self._counts = dict.fromkeys(self._counts, 0)
    return taken


def traced(jaxpr: Any) -> Evaluations | None:
  """Counts the marks in a program; None where their number depends on its values."""
  total = np.zeros(2)
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    name = equation.params.get("name")
    if name in (_BACKWARD, _FORWARD):
      total += (name == _BACKWARD, name == _FORWARD)
      continue
    count = np.zeros(2)
    for inner in _jaxpr.sub_jaxprs(equation):
      inside = traced(inner)
      if inside is None:
        return None
      count += inside
    if count.any() and equation.primitive.name in ("while", "cond"):
      return None
    total += equation.params["length"] * count if equation.primitive.name == "scan" else count
  return Evaluations(*total.tolist())
