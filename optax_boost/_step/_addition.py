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
from optax_boost._step import _slots, _state

if TYPE_CHECKING:
  from optax_boost._step import _accumulation

# The weight of the micro-batch, or -1 if it is not valid; the loss scale; the sum of the squares of
# the gradients so far.
_Scalars: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


class Added(NamedTuple):
  """A micro-batch that is in its window's sum already.

  Attributes:
    accumulator: the sum with the micro-batch.
    squares: the sum of the squares of its gradient, without the loss scale, if it is read.
    overflows: whether a value that the gradient replaces has overflowed.
  """

  accumulator: optax.Updates
  squares: _types.FloatScalar
  overflows: _types.Condition = False


@dataclasses.dataclass(frozen=True)
class Addition:
  """The arithmetic of a window's sum, for one leaf or layer at a time.

  Attributes:
    step: a step with windows.
    window: its slot.
    state: the state of the step before the micro-batch.
    measures: whether to sum up the squares of the gradient, too.
  """

  step: _slots.Step
  window: "_accumulation.Accumulate"
  state: _state.StepState
  measures: bool

  def scalars(self, extra_args: _types.ExtraArgs) -> _Scalars:
    """Returns the scalars for :meth:`add`."""
    state = self.state
    weight = self.window.take_weight(extra_args)
    weight = jnp.where(self.window.weight_is_valid(state.accumulation, weight), weight, -1.0)
    scale = state.scaling.loss_scale if self.step.scaling else 1.0
    return weight, jnp.asarray(scale, float), jnp.zeros([], float)

  def add(self, total: jax.Array, g: jax.Array, scalars: _Scalars) -> tuple[jax.Array, _Scalars]:
    """Returns the sum with a gradient, and the new scalars."""
    weight, scale, squares = scalars
    if self.step.precision:
      g = _arrays.widen(g)
    if self.step.scaling:
      g = self.step.scaling.unscale(scale.astype(jnp.float32), g)
    if self.measures:
      squares += _arrays.sum_squares_of_tree(g).astype(squares.dtype)
    addend = self.window.addend(weight, total, g)
    return total + jnp.where(weight >= 0, addend, jnp.zeros_like(addend)), (weight, scale, squares)
