"""Evaluates a loss in which some leaves of the params are only sliced by scans.

Such a leaf enters the program as a :class:`Leaf`, and a subclass of :class:`LeafScans` decides what
a scan does with its layers. Each subclass has *tokens*: arrays that go into scans and come out of
them, as they go into the calls around the scans and come out of these.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types
from optax_boost._trace import _frozen_scans, _jaxpr

# Whether a leaf is frozen; or an array of a bool for each layer that broadcasts against the leaf.
Frozen: TypeAlias = bool | np.ndarray
# The equations that may stand between a leaf and a scan: each layer of the result is computed from
# one layer of the leaf.
_VIEWS = ("convert_element_type", "reduce_precision", "transpose")


def find_uses(program: _types.Jaxpr, count: int) -> "Uses":
  """Returns the uses of the first `count` arguments of a program."""
  uses = Uses(set(_equations_of(program, {0})))
  shapes = [variable.aval.shape for variable in program.jaxpr.invars]
  leaves = [View(i, tuple(range(len(shape)))) for i, shape in enumerate(shapes[:count])]
  loss, *_ = uses.run(program, [*leaves, *[None] * (len(shapes) - count)])
  uses.note([loss], "the loss")
  return uses


def _equations_of(program: _types.Program, results: set[int]) -> Iterator[int]:
  """Yields the ``id`` of each equation on which the results with the indices `results` depend.

  Enters plain calls. Other uses of a leaf, as for a norm in aux, have no gradient.
  """
  jaxpr = getattr(program, "jaxpr", program)
  # The ids of variables, since literals can't be hashed.
  needed = {id(jaxpr.outvars[i]) for i in results}
  for equation in reversed(jaxpr.eqns):
    found = {i for i, variable in enumerate(equation.outvars) if id(variable) in needed}
    if found:
      yield id(equation)
      needed |= set(map(id, equation.invars))
      if _jaxpr.is_plain_call(equation):
        for called in _jaxpr.sub_jaxprs(equation):
          yield from _equations_of(called, found)


class Slicing(NamedTuple):
  """Along which axis a scan slices a leaf, and the ``id`` of its equation."""

  axis: int
  scan: int


class View(NamedTuple):
  """A leaf behind casts and transposes: its number, and which of its axes each dimension is."""

  number: int
  axes: tuple[int, ...]


class Uses(_jaxpr.Interpreter[View | None]):
  """Notes along which axes scans slice a leaf, and by what else a leaf is used.

  Only the equations whose ids are in `needed` count.
  """

  def __init__(self, needed: set[int]) -> None:
    self.needed = needed
    self.scanned: dict[int, list[Slicing]] = {}
    self.others: dict[int, str] = {}

  def constant(self, value: jax.typing.ArrayLike) -> None:
    return None

  def find_obstacles(self, frozen: Sequence[Frozen], once: bool) -> list[str]:
    """Returns for each leaf why its gradient can't be added layer by layer; "" if it can."""
    obstacles = []
    for number, flags in enumerate(frozen):
      axes = [slicing.axis for slicing in self.scanned.get(number, [])]
      others = self.others.get(number)
      if others is not None:
        obstacles.append(f"{others} uses it outside of a scan")
      elif not axes:
        obstacles.append("no scan slices it")
      elif once and len(axes) > 1:
        obstacles.append("several scans slice it")
      elif np.ndim(flags) and set(axes) != {np.argmax(np.shape(flags))}:
        obstacles.append("scans slice it along another axis than that of its groups of layers")
      else:
        obstacles.append("")
    return obstacles

  def note(self, values: Sequence[View | None], use: str) -> None:
    for view in values:
      if view is not None:
        self.others.setdefault(view.number, use)

  def visit(self, equation: _types.Equation, inputs: list[View | None]) -> Sequence[View | None]:
    name = equation.primitive.name
    if id(equation) not in self.needed:
      return [None] * len(equation.outvars)
    if name in _VIEWS:
      return [inputs[0] and moved(inputs[0], equation)]
    if _jaxpr.is_plain_call(equation):
      return super().visit(equation, inputs)
    unsliced = len(inputs)
    if name == "scan":
      unsliced = sum(_jaxpr.scan_operands(equation))
      for view in inputs[unsliced:]:
        if view is not None:
          self.scanned.setdefault(view.number, []).append(Slicing(view.axes[0], id(equation)))
    self.note(inputs[:unsliced], f"`{name}`")
    return [None] * len(equation.outvars)


def moved(view: Any, equation: _types.Equation) -> Any:
  """Returns a view, or a leaf, after an equation of `_VIEWS`."""
  if equation.primitive.name == "transpose":
    axes = tuple(view.axes[i] for i in equation.params["permutation"])
    return (
      view._replace(axes=axes) if isinstance(view, View) else dataclasses.replace(view, axes=axes)
    )
  if isinstance(view, View):
    return view
  cast = functools.partial(equation.primitive.bind, **equation.params)
  return dataclasses.replace(view, casts=(*view.casts, cast))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Leaf:
  """A leaf that only scans use.

  Attributes:
    array: the leaf, before any cast or transpose.
    number: the leaf's number.
    axes: which axis of the leaf each dimension is, after the transposes; scans slice the first.
    frozen: for each layer, or for all, whether it is frozen.
    casts: the casts between the leaf and its use, as functions.
    start: the index of the first layer that a scan uses.
  """

  array: jax.Array
  number: int = dataclasses.field(metadata={"static": True})
  axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  frozen: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
  casts: tuple[Callable[[jax.Array], jax.Array], ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )
  start: int = dataclasses.field(default=0, metadata={"static": True})

  def cast(self, x: jax.Array) -> jax.Array:
    """Returns an array after the casts.

    A scan casts a layer in its body, so that no cast copy of the leaf is needed.
    """
    return functools.reduce(lambda x, cast: cast(x), self.casts, x)

  def layer(self, x: jax.Array) -> jax.Array:
    """Returns what the body of a scan gets of a layer; `x` is the leaf's slice, of length 1."""
    axis, *others = self.axes
    return self.cast(jnp.transpose(x.squeeze(axis), [*map(sorted(others).index, others)]))


class LeafScans(_frozen_scans.SplitScans):
  """Computes a program in which some values are leaves that only scans slice.

  Equations whose ids are not in `needed` get arrays.
  """

  def __init__(self, needed: set[int]) -> None:
    self._needed = needed

  def read(self, numbers: Sequence[int]) -> Any:
    """Returns the tokens of some leaves, a tree of arrays."""
    raise NotImplementedError

  def write(self, tokens: Any) -> None:
    """Replaces the tokens that :meth:`read` returned."""
    raise NotImplementedError

  def visit(self, equation: _types.Equation, inputs: list[Any]) -> Sequence[Any]:
    if id(equation) not in self._needed:
      inputs = list(map(as_array, inputs))
    if not any(isinstance(value, Leaf) for value in inputs):
      return super().visit(equation, inputs)
    if equation.primitive.name in _VIEWS:
      return [moved(inputs[0], equation)]
    if "policy" not in equation.params:  # a scan that slices leaves, or a plain call
      return _jaxpr.Evaluator.visit(self, equation, inputs)
    # A call of `jax.checkpoint`, into which tokens go, and out of it.
    (program,) = _jaxpr.sub_jaxprs(equation)
    numbers = numbers_of(inputs)

    def run(inputs: list[Any], tokens: Any) -> tuple[list[Any], Any]:
      self.write(tokens)
      return self.run(program, inputs), self.read(numbers)

    settings = {key: equation.params[key] for key in ("policy", "prevent_cse")}
    results, tokens = jax.checkpoint(run, **settings)(inputs, self.read(numbers))
    self.write(tokens)
    return results

  def bounds_of(self, value: Any) -> Sequence[int]:
    if not isinstance(value, Leaf):
      return super().bounds_of(value)
    return [i for i, pair in enumerate(itertools.pairwise(value.frozen), 1) if len(set(pair)) > 1]

  def split(self, value: Any, bounds: Sequence[int]) -> Sequence[Any]:
    if not isinstance(value, Leaf):
      return super().split(value, bounds)
    frozen = np.broadcast_to(value.frozen, bounds[-1])
    return [dataclasses.replace(value, start=i, frozen=(bool(frozen[i]),)) for i in bounds[:-1]]


def numbers_of(values: Sequence[Any]) -> list[int]:
  """Returns the numbers of the leaves among `values` that are trained, at least in part."""
  leaves = [value for value in values if isinstance(value, Leaf) and not all(value.frozen)]
  return list(dict.fromkeys(leaf.number for leaf in leaves))


def as_array(value: Any) -> Any:
  """Returns an array in place of a leaf."""
  return value.cast(jnp.transpose(value.array, value.axes)) if isinstance(value, Leaf) else value
