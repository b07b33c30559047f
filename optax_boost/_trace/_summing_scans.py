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

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _placement, _types
from optax_boost._trace import _frozen_scans, _leaf_scans

# Takes the sum of a leaf, or of some of its layers, the gradient of a use, and the scalars; returns
# the new sum and the new scalars.
Add: TypeAlias = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


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
  frozen: Sequence[_leaf_scans.Frozen],
  *,
  once: bool = False,
) -> tuple[list[jax.Array], Tokens]:
  """Computes the results of a program of `leaves` and `arguments`, and the tokens to pass on.

  Nothing is added for frozen layers. Some of the arguments may be split arrays
  (:mod:`optax_boost._trace._frozen_scans`). If `once`, each layer's gradient is added at once, as a
  sum of squares in the scalars requires.
  """
  uses = _leaf_scans.find_uses(program, len(leaves))
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
      values.append(
        _leaf_scans.Leaf(leaf, number, tuple(range(leaf.ndim)), tuple(np.ravel(flags).tolist()))
      )
  results = list(map(_leaf_scans.as_array, evaluator.evaluate(program, [*values, *arguments])))
  return results, Tokens([evaluator.arrays.get(i) for i in range(len(leaves))], evaluator.scalars)


class _SummingScans(_leaf_scans.LeafScans):
  """Computes a program, and replaces the tokens wherever a leaf is used.

  Attributes:
    arrays: the current token of each leaf, by number.
    scalars: the current scalars.
  """

  def __init__(
    self, needed: set[int], leaves: Sequence[jax.Array], tokens: Tokens, add: Add
  ) -> None:
    super().__init__(needed)
    self._leaves, self._add = leaves, add
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

  def scan_part(
    self,
    equation: _types.Equation,
    shared: Sequence[Any],
    carry: list[jax.Array],
    slices: Sequence[Any],
    length: int,
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    numbers = _leaf_scans.numbers_of(slices)

    def body(loop: tuple[list[jax.Array], Any], inputs: tuple[jax.Array, list[Any]]) -> Any:
      carry, tokens = loop
      self.write(tokens)
      index, layers = inputs
      layers = [
        self._layer(leaf, x, index) if isinstance(leaf, _leaf_scans.Leaf) else x
        for leaf, x in zip(slices, layers, strict=True)
      ]
      carry, results = self.iterate(equation, shared, carry, layers)
      return (carry, self.read(numbers)), results

    arrays = [_layers(x, length) if isinstance(x, _leaf_scans.Leaf) else x for x in slices]
    loop, inputs = (carry, self.read(numbers)), (jnp.arange(length), arrays)
    (carry, tokens), results = _frozen_scans.run_scan(equation, body, loop, inputs, length)
    self.write(tokens)
    return carry, results

  def _layer(self, leaf: _leaf_scans.Leaf, x: jax.Array | None, index: jax.Array) -> jax.Array:
    """Returns what the body of a scan gets of a layer, of which `x` is the slice of the leaf."""
    if x is None:
      axis = leaf.axes[0]
      array = _placement.gather_axes(leaf.array, [axis])
      return leaf.layer(jax.lax.dynamic_slice_in_dim(array, leaf.start + index, 1, axis))
    return leaf.cast(self.sink(leaf.number, x, leaf.axes, leaf.start + index))

  def read(self, numbers: Sequence[int]) -> tuple[dict[int, jax.Array], Any]:
    """Returns the tokens of some leaves, and the scalars; without leaves, no scalars."""
    return {number: self.arrays[number] for number in numbers}, self.scalars if numbers else ()

  def write(self, tokens: tuple[dict[int, jax.Array], Any]) -> None:
    arrays, scalars = tokens
    self.arrays = self.arrays | arrays
    self.scalars = scalars if arrays else self.scalars


def _layers(leaf: _leaf_scans.Leaf, length: int) -> jax.Array | None:
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
