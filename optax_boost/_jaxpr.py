"""Looking into traced programs."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jax_core


def sub_jaxprs(equation: Any) -> Iterator[Any]:
  """The programs that an equation holds.

  Args:
    equation: an equation of a jaxpr.

  Yields:
    Jaxprs, closed or not.
  """
  for setting in equation.params.values():
    for item in setting if isinstance(setting, list | tuple) else [setting]:
      if isinstance(item, jax_core.ClosedJaxpr | jax_core.Jaxpr):
        yield item


def inlined(equation: Any) -> Any:
  """The one program that an equation stands for, with its arguments and results: a call.

  Args:
    equation: an equation of a jaxpr (``jit``, ``checkpoint``, ``custom_jvp_call``, ...).

  Returns:
    The jaxpr, closed or not, or None if the equation is no plain call.
  """
  jaxprs = list(sub_jaxprs(equation))
  if len(jaxprs) != 1:
    return None
  inside = getattr(jaxprs[0], "jaxpr", jaxprs[0])
  fits = len(inside.invars) == len(equation.invars) and len(inside.outvars) == len(equation.outvars)
  return jaxprs[0] if fits else None


def has_convolution(jaxpr: Any) -> bool:
  """Whether a program holds a convolution, at any depth.

  Args:
    jaxpr: a jaxpr, closed or not.

  Returns:
    Whether it does.
  """
  return any(
    equation.primitive.name == "conv_general_dilated"
    or any(has_convolution(inside) for inside in sub_jaxprs(equation))
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
  )
