"""``make_optimizer``: an optimizer whose state is placed by a function of the user."""

from flax import nnx
import jax
import optax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _types
from optax_boost.nnx import _model


def make_optimizer(
  model: _model.Model,
  tx: optax.GradientTransformation,
  *,
  wrt: _model.Filter = nnx.Param,
  opt_state_sharding: _types.ShardingFn,
) -> nnx.Optimizer:
  """Makes an ``nnx.Optimizer`` whose state lies where a function says, whatever the params do.

  So the state may be spread over devices that all have the whole params (ZeRO-1). No device ever
  holds the whole state, and the train step keeps its places.

  Args:
    model: the model, which is not changed.
    tx: the transformation.
    wrt: the filter of the variables that are trained, as for ``nnx.Optimizer``.
    opt_state_sharding: a function from a ``jax.ShapeDtypeStruct`` to a sharding, which places each
      array of the state, as in :meth:`optax_boost.TrainStep.init`.

  Examples:
    >>> from flax import nnx
    >>> import jax, optax, optax_boost.nnx
    >>> auto = jax.sharding.AxisType.Auto
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(auto,))
    >>> def shard(x):
    ...   spread = x.ndim > 0 and x.shape[0] % mesh.size == 0
    ...   return jax.NamedSharding(mesh, jax.P("data") if spread else jax.P())
    >>> model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> optimizer = optax_boost.nnx.make_optimizer(
    ...   model, optax.adam(1e-3), opt_state_sharding=shard
    ... )
    >>> moments = optimizer.opt_state[0].mu.kernel[...]
    >>> moments.addressable_shards[0].data.shape[0] == 8 // mesh.size
    True
  """
  _model.check(model, tree=True)
  _checks.check_transformation("tx", tx)
  _checks.check_callable("opt_state_sharding", opt_state_sharding, "opt_state_sharding(x)")

  # Optimizers make their state where the params are.
  structure, params, collections = _model.split(wrt, model)
  params = jax.tree.map(lambda x: _train_step.put(x, opt_state_sharding), params)
  (spread,) = _model.merge(structure, params, collections)
  optimizer = nnx.Optimizer(spread, tx, wrt=wrt)
  opt_state = _model.as_pure(optimizer.opt_state)
  leaves, structure_of_state = jax.tree.flatten(opt_state)
  places = _train_step.by_leaf(opt_state_sharding, tx, opt_state)
  leaves = list(map(_train_step.put, leaves, places))
  _model.write_opt_state(jax.tree.unflatten(structure_of_state, leaves), optimizer)
  return optimizer
