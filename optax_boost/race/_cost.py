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

# A backward pass takes about two forward passes, so that a forward pass alone is a third of both.
FORWARD_SHARE = 1 / 3
_FORWARD, _BACKWARD = "_race_forward", "_race_backward"


class Evaluations(NamedTuple):
  """Backward passes with their forward passes, and forward passes alone."""

  gradients: float
  forwards: float

  @property
  def cost(self) -> float:
    """Both in gradient evaluations."""
    return self.gradients + FORWARD_SHARE * self.forwards


class Counter:
  """Marks the evaluations of a loss, and counts those of a program that runs."""

  def __init__(self) -> None:
    self._counts = np.zeros(2)

  def mark(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same loss, with marks."""

    def forward(_: jax.Array) -> None:
      self._counts[1] += 1

    def backward(_: jax.Array) -> None:
      self._counts[0] += 1

    # The name of a jitted function is the name of its equation.
    def _race_forward(value: jax.Array) -> jax.Array:
      jax.debug.callback(forward, value)
      return value

    def _race_backward(cotangent: jax.Array) -> jax.Array:
      jax.debug.callback(backward, cotangent)
      return cotangent

    @jax.custom_vjp
    def marked(value: jax.Array) -> jax.Array:
      return jax.jit(_race_forward)(value)

    marked.defvjp(
      lambda value: (value, None),
      lambda _, cotangent: (jax.jit(_race_backward)(cotangent),),
    )

    def loss(*args: Any) -> Any:
      output = loss_fn(*args)
      if isinstance(output, tuple) and len(output) == 2:
        return marked_if_scalar(output[0]), output[1]
      return marked_if_scalar(output)

    def marked_if_scalar(value: Any) -> Any:
      # The train step refuses other losses, with a better message.
      return marked(value) if getattr(value, "shape", None) == () else value

    return loss

  def take(self) -> Evaluations:
    """The evaluations since the last call; waits for programs that still run."""
    jax.effects_barrier()
    taken = Evaluations(*self._counts.tolist())
    self._counts[:] = 0
    return taken


def traced(jaxpr: Any) -> Evaluations | None:
  """Counts the marks in a program; None where their number depends on what it computes."""
  total = np.zeros(2)
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    name = equation.params.get("name")
    if name in (_BACKWARD, _FORWARD):
      total[0 if name == _BACKWARD else 1] += 1
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
