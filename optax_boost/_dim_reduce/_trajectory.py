"""The trajectory of the weights: snapshots of the params, kept while training.

Three places to keep them, and what each is for:

  record_trajectory   in the optimizer state, on the device: nothing to do beside the step, saved
                      and resumed with the optimizer; `capacity` times the params, half of that in
                      bfloat16
  SnapshotStore       in host memory, filled between steps: for params of which the device holds
                      only a few copies
  CheckpointSnapshots on disk, where a run has saved its checkpoints (``_checkpoints.py``)
"""

import collections
from collections.abc import Sequence
import numbers
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree

_METHOD = "record_trajectory"


@_protocol.declares(metrics=("trajectory/notfinite_count",))
class TrajectoryState(NamedTuple):
  """State of :func:`record_trajectory`.

  Attributes:
    snapshots: a tree like the params with leaves ``[capacity, *leaf.shape]``: a ring, in which
      snapshot number i lies at ``i % capacity``. :func:`snapshots` reads it in order.
    count: scalar int32, the number of steps made.
    snapshot_count: scalar int32, the snapshots taken so far, those since overwritten included.
    notfinite_count: scalar int32, the snapshots not taken because the params were not finite.
  """

  snapshots: optax.Params
  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  snapshot_count: jax.Array
  notfinite_count: jax.Array


def record_trajectory(
  every: int,
  capacity: int,
  dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Keeps every n-th snapshot of the params and leaves the updates as they are.

  Snapshots are taken of the params that ``update`` is given: those that the steps 0, `every`,
  2 `every`, ... start from. The last `capacity` of them are kept. Where in a chain it stands does
  not matter. Params that are not finite are not taken, but counted.

  It costs memory, `capacity` times the params, and on the steps that take a snapshot a pass over
  the params; the state must be donated (``make_train_step`` does), or every step copies all of
  it. Under ``vmap`` XLA may pass over all snapshots at every step.

  Args:
    every: steps from one snapshot to the next. For a subspace of k dimensions, so many that at
      least 2 k snapshots cover the part of the training that it shall describe; the reference takes
      one or two per epoch.
    capacity: how many snapshots are kept, at least one more than the dimensions wanted. It sets
      shapes, so it is static.
    dtype: what snapshots are stored in, a floating dtype. bfloat16 halves the memory; it rounds
      each weight to 3 digits, so changes of a weight below that are lost. None: as the params.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. The state is a
    :class:`TrajectoryState`, its snapshots sharded as the params are.

  Raises:
    ValueError: a number is out of range; in ``update``: no params, or a tree that does not fit.
    TypeError: an argument or a leaf is of the wrong kind.

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

  References:
    Li, Tan, Huang, Tao, Liu, Huang, `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be
    Trained in Tiny Subspaces <https://arxiv.org/abs/2103.11154>`_, 2022.
  """
  _base.check_whole_number("every", every)
  _base.check_whole_number("capacity", capacity, static=True)
  if dtype is not None:
    _base.check_floating_dtype("dtype", dtype)

  def init_fn(params: optax.Params) -> TrajectoryState:
    _tree.check_floating(params, _METHOD)

    def ring(p: Any) -> jax.Array:
      # A broadcast keeps the sharding of the leaf, which `jnp.zeros` of a shape would not know.
      return jnp.broadcast_to(jnp.zeros_like(p, dtype=dtype), (capacity, *jnp.shape(p)))

    return TrajectoryState(
      snapshots=jax.tree.map(ring, params),
      count=jnp.zeros([], jnp.int32),
      snapshot_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
    )

  def update_fn(
    updates: optax.Updates,
    state: TrajectoryState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, TrajectoryState]:
    del extra_args
    _base.require_params(params, _METHOD)
    _base.require_state(state, TrajectoryState, _METHOD)
    _tree.check_same_tree(updates, params, _METHOD)

    def taken() -> TrajectoryState:
      good = _tree.all_finite(params)
      slot = state.snapshot_count % capacity

      def write(p: jax.Array, ring: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False)
        row = jnp.where(good, p.astype(ring.dtype), old)
        return jax.lax.dynamic_update_index_in_dim(ring, row, slot, 0)

      return state._replace(
        snapshots=jax.tree.map(write, params, state.snapshots),
        snapshot_count=state.snapshot_count + good.astype(jnp.int32),
        notfinite_count=state.notfinite_count + (~good).astype(jnp.int32),
      )

    # Only the rings pass through the branches, written in place where they are donated.
    state = jax.lax.cond(state.count % every == 0, taken, lambda: state)
    return updates, state._replace(count=optax.safe_increment(state.count))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def find_trajectories(tree: Any) -> list[TrajectoryState]:
  """The states of :func:`record_trajectory` in a tree.

  Args:
    tree: an optimizer state, or any tree.

  Returns:
    They, in the order of the leaves.
  """

  def is_trajectory(node: Any) -> bool:
    return isinstance(node, TrajectoryState)

  return [n for n in jax.tree.leaves(tree, is_leaf=is_trajectory) if is_trajectory(n)]


def snapshots(opt_state: optax.OptState) -> optax.Params:
  """The snapshots in an optimizer state, the oldest first.

  Args:
    opt_state: the state of any chain that holds one :class:`TrajectoryState`. Its values must be
      known: under ``jit`` pass the state itself to :func:`fit_subspace`.

  Returns:
    A tree like the params with leaves ``[m, *leaf.shape]``, in the dtype they are stored in.

  Raises:
    ValueError: there is none, or more than one, no snapshot was taken yet, or the state is one of
      a population.
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
  taken = int(state.snapshot_count)
  if not taken:
    raise ValueError(
      "`snapshots` needs a state that has recorded something; got one after"
      f" {int(state.count)} steps with {int(state.notfinite_count)} snapshots that were not finite."
      " Make a step first."
    )

  def ordered(ring: jax.Array) -> jax.Array:
    if taken <= len(ring):
      return ring[:taken]
    oldest = taken % len(ring)
    return jnp.concatenate([ring[oldest:], ring[:oldest]])

  return jax.tree.map(ordered, state.snapshots)


def one_trajectory(opt_state: optax.OptState, function: str) -> TrajectoryState:
  """The one :class:`TrajectoryState` of an optimizer state.

  Args:
    opt_state: the optimizer state.
    function: who asks, for messages.

  Returns:
    The state.

  Raises:
    ValueError: there is none, or more than one, or it is that of a population.
  """
  found = find_trajectories(opt_state)
  if len(found) != 1:
    structure = str(jax.tree.structure(opt_state))
    raise ValueError(
      f"`{function}` needs an optimizer state with one TrajectoryState; got {len(found)} of them in"
      f" {structure[:200]}. Is `optax_boost.record_trajectory` part of the chain, once?"
    )
  if jnp.ndim(found[0].snapshot_count):
    raise ValueError(
      f"`{function}` needs the state of one run; got that of a population of shape"
      f" {jnp.shape(found[0].snapshot_count)}. Take a member with"
      " `jax.tree.map(lambda x: x[i], state)`, or map over them with `jax.vmap`."
    )
  return found[0]


class SnapshotStore(Sequence[Any]):
  """Keeps every n-th snapshot of the params in host memory, called between steps.

  Each device moves what it holds of the params itself, sharded params are not gathered. Where the
  platform has pinned host memory, the copy is started and not waited for; the params may be
  donated to the next step at once. Snapshots come back one at a time, to where the params were,
  so that :func:`fit_subspace_streamed` needs few of them on the device. The store is no optimizer
  state: it ends with the process.

  Args:
    every: calls of :meth:`record` from one snapshot to the next.
    capacity: how many snapshots are kept; older ones are dropped.
    dtype: what snapshots are stored in, a floating dtype. None: as the params.

  Raises:
    ValueError: a number is out of range.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> store = optax_boost.SnapshotStore(every=10, capacity=3, dtype=jnp.bfloat16)
    >>> for step in range(50):
    ...   store.record({"w": jnp.full(2, step, jnp.float32)})
    >>> store.steps, store[0]["w"].tolist()
    ([20, 30, 40], [20.0, 20.0])
  """

  def __init__(self, every: int, capacity: int, dtype: jax.typing.DTypeLike | None = None):
    _base.check_whole_number("every", every)
    _base.check_whole_number("capacity", capacity, static=True)
    if dtype is not None:
      _base.check_floating_dtype("dtype", dtype)
    self._every = every
    self._dtype = dtype
    self._calls = 0
    self._kept: collections.deque[tuple[int, Any]] = collections.deque(maxlen=capacity)

  @property
  def steps(self) -> list[int]:
    """The calls of :meth:`record`, counted from 0, that the kept snapshots come from."""
    return [step for step, _ in self._kept]

  def record(self, params: optax.Params) -> None:
    """Takes a snapshot, if it is time for one.

    Args:
      params: the params after (or before) a step.

    Raises:
      TypeError: a leaf is no floating-point array.
    """
    if self._calls % self._every == 0:
      _tree.check_floating(params, "SnapshotStore")
      self._kept.append((self._calls, jax.tree.map(self._to_host, params)))
    self._calls += 1

  def __len__(self) -> int:
    return len(self._kept)

  def __getitem__(self, index: Any) -> Any:
    if not isinstance(index, numbers.Integral):
      raise TypeError(f"`SnapshotStore` needs a whole number as index; got {_base.shorten(index)}.")
    return jax.tree.map(_to_device, self._kept[int(index)][1])

  def _to_host(self, leaf: Any) -> Any:
    if self._dtype is not None:
      leaf = leaf.astype(self._dtype)
    if not isinstance(leaf, jax.Array):
      return np.array(leaf)
    device: Any = next(iter(leaf.sharding.device_set))
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
      return np.array(leaf)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"), may_alias=False)


def _to_device(leaf: Any) -> Any:
  if not isinstance(leaf, jax.Array):
    return leaf
  device: Any = next(iter(leaf.sharding.device_set))
  kind = device.default_memory().kind
  return jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
