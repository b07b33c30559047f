"""Records snapshots of the params in the optimizer state while training.

Each leaf of the params has a *ring*: an array with room for `capacity` snapshots along its first
axis. Snapshot number i, counted from 0, is written to row i % capacity, which overwrites the oldest
snapshot once the ring is full. So a step moves no other row. :func:`snapshots` returns the rows in
the order of time.

An example with every=2 and capacity=3, in which the params before step t are the number t. The
snapshots before the steps 0, 2, 4 and 6 are written to the rows 0, 1, 2 and 0:

  >>> tx = record_trajectory(every=2, capacity=3)
  >>> state = tx.init(jnp.zeros([]))
  >>> for step in range(8):
  ...   _, state = tx.update(jnp.zeros([]), state, jnp.float32(step))
  >>> state.snapshots.tolist(), int(state.snapshot_count)
  ([6.0, 2.0, 4.0], 4)
  >>> snapshots(state).tolist()
  [2.0, 4.0, 6.0]
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness, _protocol, _state_check, _transformation
from optax_boost._foundation import (
  _arrays,
  _checks,
  _conditionals,
  _mesh_axes,
  _placement,
  _tree_checks,
  _trees,
  _types,
)
from optax_boost._methods._dim_reduce import _flax_boxes

_METHOD = "record_trajectory"


@_protocol.declares(metrics=("trajectory/notfinite_count",))
class TrajectoryState(NamedTuple):
  """State of :func:`record_trajectory`.

  Attributes:
    snapshots: a tree like the params with leaves ``[capacity, *leaf.shape]``, in which snapshot
      number i is row ``i % capacity``. :func:`snapshots` returns the rows in the order of time.
    count: scalar int32, the number of steps made.
    snapshot_count: scalar int32, the number of snapshots taken, including overwritten ones.
    notfinite_count: scalar int32, the number of snapshots that were not taken because the params
      were not finite.
  """

  snapshots: optax.Params
  count: _types.IntScalar  # type: ignore[assignment]  # hides the method of tuples
  snapshot_count: _types.IntScalar
  notfinite_count: _types.IntScalar


def record_trajectory(
  every: int,
  capacity: int,
  dtype: jax.typing.DTypeLike | None = None,
  *,
  axis_name: _types.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Records snapshots of the params in its state and returns the updates unchanged.

  A snapshot of the params is taken before the steps 0, `every`, 2 `every`, ..., and the last
  `capacity` snapshots are kept. The place of `record_trajectory` in a chain does not matter. If
  params are not finite, no snapshot is taken and `notfinite_count` grows. Donate the state, as
  ``make_train_step`` does; otherwise every step copies all snapshots.

  Args:
    every: steps from one snapshot to the next. Raising it covers more of the training. The paper
      (see :func:`dim_reduce`) takes one or two snapshots per epoch.
    capacity: the number of snapshots kept, each as large as the params. A subspace of k dimensions
      needs 2 k or more. Static.
    dtype: a floating dtype in which snapshots are stored. bfloat16 halves the memory, and loses
      changes of a weight beyond its first 3 digits. None: the dtype of the params.
    axis_name: inside ``shard_map``, the mesh axes over which the params are sharded, so that either
      all devices along these axes take a snapshot or none does. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Snapshots in its state
    are sharded as the params are.

  Raises:
    ValueError: in ``update``: the state was made with another `capacity`, or an axis is not bound.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> tx = optax.chain(optax.sgd(0.5), optax_boost.record_trajectory(every=2, capacity=3))
    >>> params = {"w": jnp.array(16.0)}
    >>> state = tx.init(params)
    >>> for _ in range(8):
    ...   updates, state = tx.update(params, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> optax_boost.snapshots(state)["w"].tolist()
    [4.0, 1.0, 0.25]
  """
  _checks.check_whole_number("every", every)
  _checks.check_whole_number("capacity", capacity, static=True)
  _checks.check_floating_dtype("dtype", dtype, optional=True)
  _mesh_axes.check_axis_name("axis_name", axis_name)

  def init(params: optax.Params) -> TrajectoryState:
    def ring(p: jax.Array) -> jax.Array:
      # A broadcast keeps the sharding of the leaf. `jnp.zeros` gets only a shape, no sharding.
      return jnp.broadcast_to(jnp.zeros_like(p, dtype=dtype), (capacity, *jnp.shape(p)))

    return TrajectoryState(
      snapshots=_flax_boxes.unboxed(jax.tree.map(ring, params)),
      count=jnp.zeros([], jnp.int32),
      snapshot_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
    )

  def step(
    updates: optax.Updates, state: TrajectoryState, params: optax.Params
  ) -> tuple[optax.Updates, TrajectoryState]:
    if lengths := {len(ring) for ring in jax.tree.leaves(state.snapshots)} - {capacity}:
      raise ValueError(
        f"`{_METHOD}` needs a state with room for `capacity` snapshots, {capacity}; got one for"
        f" {lengths.pop()}. Pass the `capacity` of the run that made it."
      )
    # Without this check, a leaf of another shape could be broadcast into a row of the ring.
    state_shapes = [ring.shape[1:] for ring in jax.tree.leaves(state.snapshots)]
    shapes = list(map(jnp.shape, jax.tree.leaves(params)))
    _state_check.check_shapes(_METHOD, state_shapes, shapes)

    def take_snapshot() -> TrajectoryState:
      good = _mesh_axes.on_all_devices(_finiteness.all_finite(params), axis_name, _METHOD)
      slot = state.snapshot_count % capacity

      def write(ring: jax.Array, p: jax.Array) -> jax.Array:
        ring = _place_ring(ring, p)
        old = jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False)
        row = jnp.where(good, p.astype(ring.dtype), old)
        return jax.lax.dynamic_update_index_in_dim(ring, row, slot, 0)

      return state._replace(
        snapshots=_trees.map_leaves(write, state.snapshots, params),
        snapshot_count=_arrays.increment_if(good, state.snapshot_count),
        notfinite_count=_arrays.increment_if(~good, state.notfinite_count),
      )

    # If the state is donated, neither branch of `cond` copies the rings: a snapshot writes only one
    # row.
    state = _conditionals.cond(state.count % every == 0, take_snapshot, lambda: state)
    return updates, state._replace(count=optax.safe_increment(state.count))

  return _transformation.transformation(_METHOD, TrajectoryState, init, step, needs_params=True)


def _place_ring(ring: jax.Array, snapshot: jax.Array) -> jax.Array:
  """Returns the ring; shards it as `snapshot` is sharded if the ring itself has no sharding.

  A ring of a restored state may have no sharding. On a mesh with Explicit axes, no sharded snapshot
  can be written to such a ring.
  """
  sharding = jax.typeof(snapshot).sharding
  if any(jax.typeof(ring).sharding.spec) or not any(sharding.spec):
    return ring
  traced = isinstance(ring, jax.core.Tracer) or isinstance(snapshot, jax.core.Tracer)
  # Outside of a trace, only `device_put` moves the ring to the devices of the mesh, not `reshard`.
  like: Any = sharding if traced else snapshot.sharding
  spec = jax.sharding.PartitionSpec(None, *like.spec)
  placed = jax.sharding.NamedSharding(like.mesh, spec)
  return _placement.place_by(ring, placed) if traced else jax.device_put(ring, placed)


def snapshots(opt_state: optax.OptState) -> optax.Params:
  """Returns the snapshots in an optimizer state, the oldest first.

  Args:
    opt_state: the state of any chain with one :func:`record_trajectory`; not traced. Under ``jit``,
      pass the state itself to :func:`fit_subspace`.

  Returns:
    A tree like the params with leaves ``[m, *leaf.shape]``, in the dtype of the stored snapshots.

  Raises:
    ValueError: no snapshot was taken yet, or ``init`` was called under ``vmap``, so that the state
      belongs to several runs.
    TypeError: the state is traced.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> tx = optax_boost.record_trajectory(every=1, capacity=4)
    >>> state = tx.init(jnp.zeros(2))
    >>> for step in range(3):
    ...   _, state = tx.update(jnp.ones(2), state, jnp.full(2, step, jnp.float32))
    >>> optax_boost.snapshots(state).tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
  """
  state = one_trajectory(opt_state, "snapshots")
  if isinstance(state.snapshot_count, jax.core.Tracer):
    raise TypeError(
      "`snapshots` needs a state whose values are known; got a traced one. Under `jit`, pass the"
      " state itself to `fit_subspace`."
    )
  count = int(state.snapshot_count)
  if not count:
    raise ValueError(
      "`snapshots` needs a state that has recorded a snapshot; got one after"
      f" {int(state.count)} steps with {int(state.notfinite_count)} snapshots that were not finite."
      " Make a step first."
    )

  return jax.tree.map(
    lambda ring: ring[:count] if count <= len(ring) else jnp.roll(ring, -(count % len(ring)), 0),
    state.snapshots,
  )


def one_trajectory(opt_state: optax.OptState, function: str) -> TrajectoryState:
  """Returns the TrajectoryState in an optimizer state.

  Raises ValueError, which names `function`, unless there is exactly one, and it belongs to one run:
  ``init`` was not called under ``vmap``.
  """
  states = _trees.find_states(opt_state, TrajectoryState)
  if len(states) != 1:
    structure = str(jax.tree.structure(opt_state))
    raise ValueError(
      f"`{function}` needs an optimizer state with one TrajectoryState; got {len(states)} of"
      f" them in {structure[:200]}. Is `optax_boost.record_trajectory` part of the chain, once?"
    )
  _tree_checks.require_one_run(states[0].snapshot_count, function)
  return states[0]
