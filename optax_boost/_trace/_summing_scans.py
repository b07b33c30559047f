"""Evaluates a loss whose backward pass adds each layer's gradient to a sum, layer by layer.

The gradient of a leaf that a scan slices then never exists as a whole. Each leaf has a *token*: an
array like the leaf's sum, which the loss passes on unchanged. A :func:`_sink` stands between a leaf
and its use. Forward, it returns its arguments. Backward, it gets the gradient of the use, and the
cotangent of the token, which is the sum so far, and adds the one to the other. So the caller passes
the old sums as the cotangents of the tokens that :func:`evaluate` returns, and gets the new sums as
the cotangents of the tokens that it passed. The loss is differentiated by the tokens alone.

A scan that slices a leaf carries the leaf's token, and its body has the sink; in the backward pass,
XLA adds to the sum in place. A leaf with another use has one sink before all of its uses.

>>> import jax, jax.numpy as jnp
>>> def loss_fn(w, x):
...   return jnp.sum(jax.lax.scan(lambda x, w: (x * w, None), x, w)[0])
>>> w, x = jnp.array([2.0, 3.0]), jnp.array([1.0, 5.0])
>>> program = jax.make_jaxpr(loss_fn)(w, x)
>>> add = lambda total, g, scalars: (total + g, scalars)
>>> def with_tokens(tokens):
...   (loss,), tokens = evaluate(program, [w], [x], tokens, add, [False])
...   return loss, tokens
>>> _, pull = jax.vjp(with_tokens, Tokens([jnp.zeros(2)], ()))
>>> ((sums, _),) = pull((1.0, Tokens([jnp.array([100.0, 200.0])], ())))
>>> sums[0].tolist()
[118.0, 212.0]
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _placement, _types
from optax_boost._trace import _frozen_scans, _jaxpr

# Takes the sum of a leaf, or of some of its layers, the gradient of a use, and the scalars; returns
# the new sum and the new scalars.
Add: TypeAlias = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
# Whether a leaf is frozen; or an array of a bool for each layer that broadcasts against the leaf.
Frozen: TypeAlias = bool | np.ndarray
# The equations that may stand between a leaf and a scan: each layer of the result is computed from
# one layer of the leaf.
_VIEWS = ("convert_element_type", "reduce_precision", "transpose")


class Tokens(NamedTuple):
  """The arrays that the loss passes on: forward any values, backward the sums.

  Attributes:
    arrays: for each leaf, an array of the shape and dtype of its sum; None if it is always frozen.
      If the first layers of a leaf are always frozen, the sum lacks these layers.
    scalars: a tree of scalars that each addition gets, and may change.
  """

  arrays: Sequence[jax.Array | None]
  scalars: Any


def evaluate(
  program: _types.Jaxpr,
  leaves: Sequence[jax.Array],
  arguments: Sequence[Any],
  tokens: Tokens,
  add: Add,
  frozen: Sequence[Frozen],
  *,
  once: bool = False,
) -> tuple[list[jax.Array], Tokens]:
  """Computes the results of a program of `leaves` and `arguments`, and the tokens to pass on.

  Nothing is added for frozen layers. Some of the arguments may be split arrays
  (:mod:`optax_boost._trace._frozen_scans`). If `once`, each layer's gradient is added at once, as a
  sum of squares in the scalars requires.
  """
  uses = _find_uses(program, len(leaves))
  evaluator = _SummingScans(uses.needed, leaves, tokens, add)
  values: list[Any] = []
  obstacles = uses.find_obstacles(frozen, once)
  for number, (leaf, flags, obstacle) in enumerate(zip(leaves, frozen, obstacles, strict=True)):
    if np.all(flags):
      values.append(jax.lax.stop_gradient(leaf))
    elif obstacle:
      sink = functools.partial(evaluator.sink, number)
      values.append(_frozen_scans.split_frozen(leaf, flags, sink))
    else:
      values.append(_Leaf(leaf, number, tuple(range(leaf.ndim)), tuple(np.ravel(flags).tolist())))
  results = list(map(_as_array, evaluator.evaluate(program, [*values, *arguments])))
  return results, Tokens([evaluator.arrays.get(i) for i in range(len(leaves))], evaluator.scalars)


def _find_uses(program: _types.Jaxpr, count: int) -> "_Uses":
  """Returns the uses of the first `count` arguments of a program."""
  uses = _Uses(set(_equations_of(program, {0})))
  shapes = [variable.aval.shape for variable in program.jaxpr.invars]
  leaves = [_View(i, tuple(range(len(shape)))) for i, shape in enumerate(shapes[:count])]
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


class _View(NamedTuple):
  """A leaf behind casts and transposes: its number, and which of its axes each dimension is."""

  number: int
  axes: tuple[int, ...]


class _Uses(_jaxpr.Interpreter[_View | None]):
  """Notes along which axes scans slice a leaf, and by what else a leaf is used.

  Only the equations whose ids are in `needed` count.
  """

  def __init__(self, needed: set[int]) -> None:
    self.needed = needed
    self.scanned: dict[int, list[int]] = {}
    self.others: dict[int, str] = {}

  def constant(self, value: jax.typing.ArrayLike) -> None:
    return None

  def find_obstacles(self, frozen: Sequence[Frozen], once: bool) -> list[str]:
    """Returns for each leaf why its gradient can't be added layer by layer; "" if it can."""
    obstacles = []
    for number, flags in enumerate(frozen):
      axes, others = self.scanned.get(number, []), self.others.get(number)
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

  def note(self, values: Sequence[_View | None], use: str) -> None:
    for view in values:
      if view is not None:
        self.others.setdefault(view.number, use)

  def visit(self, equation: _types.Equation, inputs: list[_View | None]) -> Sequence[_View | None]:
    name = equation.primitive.name
    if id(equation) not in self.needed:
      return [None] * len(equation.outvars)
    if name in _VIEWS:
      return [inputs[0] and _moved(inputs[0], equation)]
    if _jaxpr.is_plain_call(equation):
      return super().visit(equation, inputs)
    unsliced = len(inputs)
    if name == "scan":
      unsliced = sum(_jaxpr.scan_operands(equation))
      for view in inputs[unsliced:]:
        if view is not None:
          self.scanned.setdefault(view.number, []).append(view.axes[0])
    self.note(inputs[:unsliced], f"`{name}`")
    return [None] * len(equation.outvars)


def _moved(view: Any, equation: _types.Equation) -> Any:
  """Returns a view, or a leaf, after an equation of `_VIEWS`."""
  if equation.primitive.name == "transpose":
    axes = tuple(view.axes[i] for i in equation.params["permutation"])
    return (
      view._replace(axes=axes) if isinstance(view, _View) else dataclasses.replace(view, axes=axes)
    )
  if isinstance(view, _View):
    return view
  cast = functools.partial(equation.primitive.bind, **equation.params)
  return dataclasses.replace(view, casts=(*view.casts, cast))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Leaf:
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


class _SummingScans(_frozen_scans.SplitScans):
  """Computes a program, and replaces the tokens wherever a leaf is used.

  Attributes:
    arrays: the current token of each leaf, by number.
    scalars: the current scalars.
  """

  def __init__(
    self, needed: set[int], leaves: Sequence[jax.Array], tokens: Tokens, add: Add
  ) -> None:
    self._needed, self._leaves, self._add = needed, leaves, add
    self.arrays = {i: token for i, token in enumerate(tokens.arrays) if token is not None}
    self.scalars = tokens.scalars

  def sink(self, number: int, x: jax.Array, axes: tuple[int, ...], start: Any) -> jax.Array:
    """Returns layers of a leaf, from `start` on; their gradient is added to the leaf's sum.

    `x` and `axes` are as for :func:`_sink`.
    """
    token = self.arrays[number]
    # If the first layers are always frozen, the sum begins after them.
    skipped = sum(self._leaves[number].shape) - sum(token.shape)
    x, self.arrays[number], self.scalars = _sink(
      self._add, axes, x, start - skipped, token, self.scalars
    )
    return x

  def visit(self, equation: _types.Equation, inputs: list[Any]) -> Sequence[Any]:
    if id(equation) not in self._needed:
      inputs = list(map(_as_array, inputs))
    if not any(isinstance(value, _Leaf) for value in inputs):
      return super().visit(equation, inputs)
    if equation.primitive.name in _VIEWS:
      return [_moved(inputs[0], equation)]
    if "policy" not in equation.params:  # a scan that slices leaves, or a plain call
      return _jaxpr.Evaluator.visit(self, equation, inputs)
    # A call of `jax.checkpoint`, into which tokens go, and out of it.
    (program,) = _jaxpr.sub_jaxprs(equation)
    numbers = _numbers(inputs)

    def run(inputs: list[Any], tokens: Any) -> tuple[list[Any], Any]:
      self._write(tokens)
      return self.run(program, inputs), self._read(numbers)

    settings = {key: equation.params[key] for key in ("policy", "prevent_cse")}
    results, tokens = jax.checkpoint(run, **settings)(inputs, self._read(numbers))
    self._write(tokens)
    return results

  def bounds_of(self, value: Any) -> Sequence[int]:
    if not isinstance(value, _Leaf):
      return super().bounds_of(value)
    return [i for i, pair in enumerate(itertools.pairwise(value.frozen), 1) if len(set(pair)) > 1]

  def split(self, value: Any, bounds: Sequence[int]) -> Sequence[Any]:
    if not isinstance(value, _Leaf):
      return super().split(value, bounds)
    frozen = np.broadcast_to(value.frozen, bounds[-1])
    return [dataclasses.replace(value, start=i, frozen=(bool(frozen[i]),)) for i in bounds[:-1]]

  def scan_part(
    self,
    equation: _types.Equation,
    shared: Sequence[Any],
    carry: list[jax.Array],
    slices: Sequence[Any],
    length: int,
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    numbers = _numbers(slices)

    def body(loop: tuple[list[jax.Array], Any], inputs: tuple[jax.Array, list[Any]]) -> Any:
      carry, tokens = loop
      self._write(tokens)
      index, layers = inputs
      layers = [
        self._layer(leaf, x, index) if isinstance(leaf, _Leaf) else x
        for leaf, x in zip(slices, layers, strict=True)
      ]
      carry, results = self.iterate(equation, shared, carry, layers)
      return (carry, self._read(numbers)), results

    arrays = [_layers(x, length) if isinstance(x, _Leaf) else x for x in slices]
    loop, inputs = (carry, self._read(numbers)), (jnp.arange(length), arrays)
    (carry, tokens), results = _frozen_scans.run_scan(equation, body, loop, inputs, length)
    self._write(tokens)
    return carry, results

  def _layer(self, leaf: _Leaf, x: jax.Array | None, index: jax.Array) -> jax.Array:
    """Returns what the body of a scan gets of a layer, of which `x` is the slice of the leaf."""
    if x is None:
      axis, *others = leaf.axes
      array = _placement.gather_axes(leaf.array, [axis])
      x = jax.lax.dynamic_index_in_dim(array, leaf.start + index, axis, keepdims=False)
      x = jnp.transpose(x, [*map(sorted(others).index, others)])
    else:
      x = self.sink(leaf.number, x, leaf.axes, leaf.start + index)
    # Casts are made here, not before the scan, so that no cast copy of the leaf is needed.
    for cast in leaf.casts:
      x = cast(x)
    return x

  def _read(self, numbers: Sequence[int]) -> tuple[dict[int, jax.Array], Any]:
    """Returns the tokens of some leaves, and the scalars; without leaves, no scalars."""
    return {number: self.arrays[number] for number in numbers}, self.scalars if numbers else ()

  def _write(self, tokens: tuple[dict[int, jax.Array], Any]) -> None:
    arrays, scalars = tokens
    self.arrays = self.arrays | arrays
    self.scalars = scalars if arrays else self.scalars


def _numbers(values: Sequence[Any]) -> list[int]:
  """Returns the numbers of the leaves among `values` that are trained, at least in part."""
  leaves = [value for value in values if isinstance(value, _Leaf) and not all(value.frozen)]
  return list(dict.fromkeys(leaf.number for leaf in leaves))


def _as_array(value: Any) -> Any:
  """Returns an array in place of a leaf."""
  if not isinstance(value, _Leaf):
    return value
  return functools.reduce(
    lambda x, cast: cast(x), value.casts, jnp.transpose(value.array, value.axes)
  )


def _layers(leaf: _Leaf, length: int) -> jax.Array | None:
  """Returns the layers of a leaf for a scan to slice; None for frozen layers.

  Of frozen layers, each iteration takes one by its index, since a slice of a leaf is a copy. Of
  trained layers, the derivative of a scan keeps what the iterations take, but not what it slices.
  """
  if any(leaf.frozen):
    return None
  array = leaf.array
  if length < array.shape[leaf.axes[0]]:
    array = _placement.gather_axes(array, leaf.axes[:1])
    array = jax.lax.slice_in_dim(array, leaf.start, leaf.start + length, axis=leaf.axes[0])
  return jnp.transpose(array, leaf.axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sink(
  add: Add, axes: tuple[int, ...], x: jax.Array, position: Any, token: jax.Array, scalars: Any
) -> tuple[jax.Array, jax.Array, Any]:
  """Returns ``x, token, scalars``; backward, adds the gradient of `x` to the cotangent of `token`.

  `x` is a leaf, and `axes` is empty; or several layers along the axis ``axes[0]``; or one layer,
  without this axis, and with the others in the order ``axes[1:]``. The sums of layers begin at the
  index `position`.
  """
  return x, token, scalars


def _forward(add: Add, axes: Any, x: Any, position: Any, token: Any, scalars: Any) -> Any:
  return (x, token, scalars), position


def _backward(add: Add, axes: tuple[int, ...], position: Any, cotangents: Any) -> Any:
  g, total, scalars = cotangents
  if not axes:
    return None, None, *add(total, g, scalars)
  if g.ndim < total.ndim:
    g = jnp.moveaxis(g[None], range(g.ndim + 1), axes)
  layers = jax.lax.dynamic_slice_in_dim(total, position, g.shape[axes[0]], axes[0])
  layers, scalars = add(layers, g, scalars)
  total = jax.lax.dynamic_update_slice_in_dim(total, layers, position, axes[0])
  return None, None, total, scalars


_sink.defvjp(_forward, _backward)
