"""The integers that a program alone tells, by which it takes single entries of a leaf.

A loop's counter has many values, so its number is not known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types

# The arithmetic of the primitives with which programs compute an index.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
  **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "rem": np.fmod},
  **{"max": np.maximum, "min": np.minimum, "lt": np.less},
  "clamp": lambda low, x, high: np.clip(x, low, high),
  "select_n": lambda which, *cases: np.choose(which, cases),
  **dict.fromkeys(
    ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"), lambda x: x
  ),
}


def number_of(constant: jax.typing.ArrayLike) -> int | None:
  """Returns the value of a constant that is one integer, else None."""
  if isinstance(constant, jax.core.Tracer) or np.size(constant) != 1:
    return None
  is_integer = jnp.issubdtype(jnp.result_type(constant), jnp.integer)
  return int(np.ravel(np.asarray(constant))[0]) if is_integer else None


def compute(equation: _types.Equation, numbers: Sequence[int | None]) -> int | None:
  """Returns the number of an equation's result, or None if the program alone doesn't tell.

  `numbers` has the numbers of the operands.
  """
  function = _ARITHMETIC.get(equation.primitive.name)
  if function is None or None in numbers or equation.outvars[0].aval.size != 1:
    return None
  return int(function(*numbers))


def picked(equation: _types.Equation, result: int, numbers: Sequence[int | None]) -> dict[int, int]:
  """Returns the index of the entry that a result takes along each dimension of operand 0.

  `numbers` has the numbers of the operands. The dict lacks dimensions of which the result takes
  several entries, or an entry whose index the program alone doesn't tell.
  """
  name, settings = equation.primitive.name, equation.params
  shape = equation.invars[0].aval.shape
  starts: dict[int, int | None] = {}
  if name == "slice":
    limits = zip(settings["start_indices"], settings["limit_indices"], strict=True)
    starts = {dim: start for dim, (start, limit) in enumerate(limits) if limit - start == 1}
  elif name == "split":
    begins = np.cumsum([0, *settings["sizes"]])
    if settings["sizes"][result] == 1:
      starts = {settings["axis"]: int(begins[result])}
  elif name == "unstack":
    starts = {settings["axis"]: result}
  elif name == "dynamic_slice":
    sizes = enumerate(settings["slice_sizes"])
    starts = {dim: numbers[1 + dim] for dim, size in sizes if size == 1}
  elif name == "gather" and equation.invars[1].aval.size == 1:
    (dim, *others) = settings["dimension_numbers"].start_index_map
    if not others and settings["slice_sizes"][dim] == 1:
      starts = {dim: numbers[1]}
  return {dim: start for dim, start in starts.items() if start is not None and shape[dim] > 1}
