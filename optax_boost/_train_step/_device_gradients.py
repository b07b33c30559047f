"""Computes the loss and its gradient on each device, for the device's own sum of a window.

Each device takes the mean over its own rows of the batch. With equal weights, the mean over the
devices is the mean over the batch. If the weight is the number of tokens on each device, the
weighted mean is the mean over all tokens.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _types
from optax_boost._step import _addition, _device_sums
from optax_boost._train_step import _objective, _traced_loss


def value_and_added(
  sums: _device_sums.DeviceSums,
  objective: _objective.Objective,
  addition: _addition.Addition,
  inputs: _traced_loss.Differentiated,
  arguments: tuple[Any, ...],
  extra_args_of: Callable[[_types.Batch, Any], _types.ExtraArgs],
) -> tuple[Any, _addition.Added, list[jax.Array], _types.FloatScalar]:
  """Returns what :meth:`Objective.value_and_added` returns, and the weight of the micro-batch.

  `arguments` are the model state, the batch and the keys. The loss and the floats of aux are means
  over the devices by weight, integers of aux are sums, and arrays are joined along the first axis.
  """
  model_state, batch, *rngs = arguments
  accumulation, scaling = addition.state.accumulation, addition.state.scaling

  def on_device(
    own: optax.Updates, batch: _types.Batch, inputs: Any, scalars: Any, model_state: Any, rngs: Any
  ) -> Any:
    join = _Join(sums.axes)
    own_state = jax.tree.map(join.own_keys, model_state)
    rngs = [jax.random.fold_in(key, jax.lax.axis_index(sums.axes)) for key in rngs]
    of_objective, accumulation, scaling = scalars
    on_rows = objective.at(inputs, (own_state, batch, *rngs), of_objective)
    window = accumulation._replace(accumulator=own)
    state = addition.state._replace(accumulation=window, scaling=scaling)
    local = dataclasses.replace(addition, state=state, axes=sums.axes)
    weights_of = lambda aux: extra_args_of(batch, aux[1])  # noqa: E731
    if local.in_backward:
      output, added, new_values = on_rows.value_and_added(inputs[0], local, weights_of)
      new, squares, overflows = added[:3]
    else:
      output, grads, new_values = on_rows.value_and_grad(inputs[0])
      new, squares, overflows = local.take_kept(grads), jnp.zeros([]), False
    value, (new_state, aux) = output
    extra_args = extra_args_of(batch, aux)
    total, weight = local.weight(extra_args), local.window.take_weight(extra_args)
    # A key that the forward pass has not changed is kept, though it was another on each device.
    kept = dict(zip(map(id, jax.tree.leaves(own_state)), jax.tree.leaves(model_state), strict=True))
    same = (
      join.mean(value, weight, total),
      jax.tree.map(lambda x: kept[id(x)] if id(x) in kept else join.state(x), new_state),
      jax.tree.map(lambda x: None if jnp.ndim(x) else join.aux(x, weight, total), aux),
      jax.lax.pmean(squares, sums.axes),
      jax.lax.psum(jnp.asarray(overflows, jnp.int32), sums.axes) > 0,
      jax.lax.pmax(list(new_values), sums.axes),
      total,
    )
    own = jax.tree.map(lambda x: x[None], (new, weight))
    return same, (*own, jax.tree.map(lambda x: x if jnp.ndim(x) else None, aux))

  scalars = objective.scalars, accumulation._replace(accumulator=()), scaling
  same, (sums_or_grads, weights, rows) = sums.map(
    on_device, accumulation.accumulator, batch, inputs, scalars, model_state, rngs
  )
  value, model_state, scalars, squares, overflows, new_values, weight = same
  is_none = lambda x: x is None  # noqa: E731
  aux = jax.tree.map(lambda x, y: y if x is None else x, scalars, rows, is_leaf=is_none)
  added = _addition.Added(sums_or_grads, squares, overflows)
  if not addition.in_backward:
    added = addition.add_whole(sums_or_grads, weights)
  return (value, (model_state, aux)), added, new_values, weight


@dataclasses.dataclass(frozen=True)
class _Join:
  """Makes one value of what the devices along the mesh axes `axes` have."""

  axes: tuple[str, ...]

  def own_keys(self, x: jax.Array) -> jax.Array:
    """Returns other keys on each device; arrays that are no keys are returned unchanged."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return x
    place = jax.lax.axis_index(self.axes)
    fold = jax.vmap(lambda key: jax.random.fold_in(key, place))
    return fold(x.reshape(-1)).reshape(x.shape)

  def mean(self, x: jax.Array, weight: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the mean over the devices by weight; the plain mean if all weights are zero."""
    weighted = jax.lax.psum(jnp.where(weight > 0, weight * x, 0), self.axes) / total
    return jnp.where(total > 0, weighted, jax.lax.pmean(x, self.axes)).astype(x.dtype)

  def aux(self, x: jax.typing.ArrayLike, weight: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the mean of a number in aux, and the sum of an integer, such as a count."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
      return self.mean(x, weight, total)
    return jax.lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.int32)), self.axes)

  def state(self, x: jax.Array) -> jax.Array:
    """Returns the mean of statistics; of integers and keys, those of the first device."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
      return jax.lax.pmean(x, self.axes)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      data = self.state(jax.random.key_data(x))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.lax.all_gather(x, self.axes)[0]
