"""The precision of the products in a traced program."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from optax_boost._trace import _jaxpr

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def precisions(function: Callable[..., Any], *args: Any) -> list[Any]:
  """The precision of each product and convolution of a program, if JAX's default is bfloat16.

  CPUs compute products in float32 whatever is asked, so results would not tell.
  """
  with jax.default_matmul_precision("bfloat16"):
    program = jax.make_jaxpr(lambda *args: function(*args))(*args)
  return [e.params["precision"] for e in _equations(program.jaxpr) if "precision" in e.params]


def _equations(program: Any) -> Iterator[Any]:
  for equation in program.eqns:
    yield equation
    for inner in _jaxpr.sub_jaxprs(equation):
      yield from _equations(getattr(inner, "jaxpr", inner))
