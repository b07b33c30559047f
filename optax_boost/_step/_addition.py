"""Adds the gradients of a micro-batch to their window inside of the backward pass.

The backward pass of a train step calls :meth:`Addition.add` with each gradient as soon as it is
known, and the step gets an :class:`Added` in place of gradients. A micro-batch is then judged after
it was added.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays, _types
from optax_boost._step import _kept_leaves, _slots, _state

if TYPE_CHECKING:
  from optax_boost._step import _accumulation

# The weight of the micro-batch, or -1 if it is not valid; the loss scale; the sum of the squares of
# the gradients so far.
_Scalars: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


class Added(NamedTuple):
  """A micro-batch that is in its window's sum already, or what it adds to the sum.

  Attributes:
    accumulator: the sum with the micro-batch, or None.
    squares: the sum of the squares of its gradient, without the loss scale, if it is read.
    overflows: whether a value that the gradient replaces has overflowed.
    addend: what the micro-batch adds, if there is no `accumulator`.
  """

  accumulator: optax.Updates | None
  squares: _types.FloatScalar
  overflows: _types.Condition = False
  addend: optax.Updates | None = None


@dataclasses.dataclass(frozen=True)
class Addition:
  """The arithmetic of a window's sum, for one leaf or layer at a time.

  Attributes:
    step: a step with windows.
    window: its slot.
    state: the state of the step before the micro-batch.
    measures: whether to sum up the squares of the gradient, too.
    in_backward: whether the backward pass adds; else whole gradients are added.
    axes: the mesh axes over which gradients and weights differ, if each device has its own sum.
  """

  step: _slots.Step
  window: "_accumulation.Accumulate"
  state: _state.StepState
  measures: bool
  in_backward: bool = True
  axes: tuple[str, ...] = ()

  def weight(self, extra_args: _types.ExtraArgs) -> _types.FloatScalar:
    """Returns the weight of the micro-batch on all devices; NaN if one of them is negative."""
    weight = self.window.take_weight(dict(extra_args))
    if not self.axes:
      return weight
    return jax.lax.psum(jnp.where(weight >= 0, weight, jnp.nan), self.axes)

  def scalars(self, extra_args: _types.ExtraArgs) -> _Scalars:
    """Returns the scalars for :meth:`add`."""
    adds = self.window.weight_is_valid(self.state.accumulation, self.weight(extra_args))
    weight = self.window.take_weight(dict(extra_args))
    if self.axes:
      # A device without tokens adds nothing, though its mean over no tokens may be NaN.
      adds &= weight > 0
    return jnp.where(adds, weight, -1.0), self._scale(), jnp.zeros([], float)

  def add(self, total: jax.Array, g: jax.Array, scalars: _Scalars) -> tuple[jax.Array, _Scalars]:
    """Returns the sum with a gradient, and the new scalars."""
    weight, scale, squares = scalars
    g = self._unscale(g, scale)
    if self.measures:
      squares += _arrays.sum_squares_of_tree(g).astype(squares.dtype)
    addend = self.window.addend(weight, total, g)
    return total + jnp.where(weight >= 0, addend, jnp.zeros_like(addend)), (weight, scale, squares)

  def take_kept(self, grads: optax.Updates) -> optax.Updates:
    """Returns the gradients of the leaves that some step trains."""
    return _kept_leaves.kept_by(self.step, grads, self.state.inner_state).take(grads)

  def add_whole(self, grads: optax.Updates, weights: jax.Array) -> Added:
    """Returns what the gradients of all devices add to their sums, one entry for each device."""
    grads = self._unscale(grads, self._scale())

    def addend(total: jax.Array, g: jax.Array) -> jax.Array:
      weight = weights.reshape(-1, *[1] * (g.ndim - 1))
      return jnp.where(weight > 0, self.window.addend(weight, total, g), jnp.zeros_like(total))

    squares = jnp.zeros([], float)
    if self.measures:
      squares = _arrays.sum_squares_of_tree(grads) / weights.size
    addends = jax.tree.map(addend, self.state.accumulation.accumulator, grads)
    return Added(None, squares, addend=addends)

  def _scale(self) -> jax.Array:
    return jnp.asarray(self.state.scaling.loss_scale if self.step.scaling else 1.0, float)

  def _unscale(self, grads: optax.Updates, scale: jax.Array) -> optax.Updates:
    if self.step.precision:
      grads = jax.tree.map(_arrays.widen, grads)
    if self.step.scaling:
      grads = self.step.scaling.unscale(scale.astype(jnp.float32), grads)
    return grads
