"""The integers that a program alone tells: the indices and counters by which it takes layers.

The *numbers* of a vector of integers are its entries. The numbers of one integer are its value, or
its values in the iterations of a loop, in their order.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types

Numbers: TypeAlias = tuple[int, ...]

_MOST = 4096
# The arithmetic of the primitives with which programs compute an index.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
  **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "rem": np.fmod},
  **{"max": np.maximum, "min": np.minimum, "lt": np.less, "rev": lambda x: x[::-1]},
  "clamp": lambda low, x, high: np.clip(x, low, high),
  "select_n": lambda which, *cases: np.choose(which, cases),
  **dict.fromkeys(
    ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"), lambda x: x
  ),
}


def numbers_of(constant: jax.typing.ArrayLike) -> Numbers | None:
  """Returns the numbers of a small vector or scalar of integers; None for other constants."""
  is_small = np.ndim(constant) < 2 and 0 < np.size(constant) <= _MOST
  if isinstance(constant, jax.core.Tracer) or not is_small:
    return None
  is_integer = jnp.issubdtype(jnp.result_type(constant), jnp.integer)
  return tuple(map(int, np.ravel(np.asarray(constant)))) if is_integer else None


def compute(equation: _types.Equation, numbers: Sequence[Numbers | None]) -> Numbers | None:
  """Returns the numbers of an equation's result, or None if the program alone doesn't tell.

  `numbers` has the numbers of each operand.
  """
  name, aval = equation.primitive.name, equation.outvars[0].aval
  if name == "iota" and len(aval.shape) == 1 and aval.size <= _MOST:
    return tuple(range(aval.size))
  function = _ARITHMETIC.get(name)
  if function is None or None in numbers or len(aval.shape) > 1:
    return None
  sizes = {len(each) for each in numbers if each is not None} - {1}
  if len(sizes) > 1 or (name == "broadcast_in_dim" and aval.size not in (1, *sizes)):
    return None
  return tuple(map(int, np.ravel(function(*map(np.array, numbers)))))


def counters(
  equation: _types.Equation, body: _types.Jaxpr, begins: dict[int, Numbers | None], carry: slice
) -> dict[int, Numbers]:
  """Returns the numbers of the carries that a loop counts up or down by one.

  `begins` has the numbers with which carries begin. The keys are positions among the arguments of
  the loop's body; the slice `carry` selects the carries among these arguments.
  """
  length = equation.params.get("length", 0)
  if not 0 < length <= _MOST:
    return {}
  jaxpr, found = body.jaxpr, {}
  maker = {result: each for each in jaxpr.eqns for result in each.outvars}
  for position, begin in begins.items():
    made = maker.get(jaxpr.outvars[position - carry.start])
    if (
      begin is None or len(begin) != 1 or made is None or made.primitive.name not in ("add", "sub")
    ):
      continue
    counter, other = made.invars
    if counter is jaxpr.invars[position] and isinstance(other, jax_core.Literal):
      step = int(other.val) if made.primitive.name == "add" else -int(other.val)
      if step in (1, -1):
        found[position] = tuple(range(begin[0], begin[0] + step * length, step))
  return found


def picked(
  equation: _types.Equation, result: int, numbers: Sequence[Numbers | None]
) -> dict[int, Numbers]:
  """Returns the index of the entry that a result takes along each dimension of operand 0.

  In a loop, the dict has the index in each iteration. `numbers` has the numbers of each operand.
  The dict lacks dimensions of which the result takes several entries, or an entry whose index the
  program alone doesn't tell.
  """
  name, settings = equation.primitive.name, equation.params
  shape = equation.invars[0].aval.shape
  starts: dict[int, Numbers | None] = {}
  if name == "slice":
    limits = zip(settings["start_indices"], settings["limit_indices"], strict=True)
    starts = {dim: (start,) for dim, (start, limit) in enumerate(limits) if limit - start == 1}
  elif name == "split":
    begins = np.cumsum([0, *settings["sizes"]])
    if settings["sizes"][result] == 1:
      starts = {settings["axis"]: (int(begins[result]),)}
  elif name == "unstack":
    starts = {settings["axis"]: (result,)}
  elif name == "dynamic_slice":
    sizes = enumerate(settings["slice_sizes"])
    starts = {dim: numbers[1 + dim] for dim, size in sizes if size == 1}
  elif name == "gather" and equation.invars[1].aval.size == 1:
    (dim, *others) = settings["dimension_numbers"].start_index_map
    if not others and settings["slice_sizes"][dim] == 1:
      starts = {dim: numbers[1]}
  return {dim: start for dim, start in starts.items() if start is not None and shape[dim] > 1}
