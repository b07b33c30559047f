"""The steps of SGPerm, of checked arguments: momentum, random bits, and a kernel."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _tree
from optax_boost._sgperm import _device
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _fast
from optax_boost._sgperm import _host
from optax_boost._sgperm import _layout
from optax_boost._sgperm import _permutation
from optax_boost._sgperm import _schedules
from optax_boost._sgperm import _sorting
from optax_boost._sgperm._permutation import SgpermState


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Leaf:
  """A leaf's partition if it is given, and arrays, of the leaf's shape but for the ranges."""

  layout: _layout.Layout = dataclasses.field(metadata={"static": True})
  order: Any
  momentum: jax.Array
  params: jax.Array
  initial: jax.Array
  permutation: jax.Array
  ranks: Any
  ranges: jax.Array


@dataclasses.dataclass(frozen=True)
class Transform:
  """The transformation; its fields are as the arguments of :func:`sgperm`."""

  cutter: _layout.Cutter
  schedules: _schedules.Schedules
  momentum: Any
  momentum_lr: Any
  partition_size_min: int
  remainder: bool
  method: str
  backend: str
  rounds: int
  key: jax.Array
  accumulator_dtype: Any
  check: bool

  def init(self, params: optax.Params) -> SgpermState:
    layouts = self.cutter.for_init(params)
    leaves, structure = jax.tree.flatten(params)

    def zero_momentum(leaf: jax.Array) -> jax.Array:
      default = _arrays.accumulator_dtype(leaf.dtype)
      dtype = default if self.accumulator_dtype is None else self.accumulator_dtype
      return jnp.zeros_like(leaf, dtype=dtype)

    def of_each(function: Callable[[_layout.Layout, Any], Any]) -> Any:
      return jax.tree.unflatten(structure, list(map(function, layouts, leaves)))

    count = jnp.zeros([], jnp.int32)
    return SgpermState(
      count=count,
      alpha=self.schedules.alpha(count),
      lamda=self.schedules.lamda(count),
      key=jnp.array(jax.random.key_data(self.key)),
      momentum=jax.tree.map(zero_momentum, params),
      initial=_arrays.copy_arrays(params),
      permutation=_layout.identity(params),
      ranks=() if self.method == "pairs" else of_each(_layout.ranks),
      ranges=_tree.unboxed(of_each(_layout.ranges)),
      notfinite_count=jnp.zeros([], jnp.int32),
      mismatch_count=jnp.zeros([], jnp.int32),
    )

  def update(
    self,
    updates: optax.Updates,
    state: SgpermState,
    params: optax.Params | None = None,
    *,
    partitions: Any = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SgpermState]:
    layouts = self.cutter.for_update(updates, state, SgpermState, params)
    if self.check:
      mismatch = _permutation.mismatch(params, state.initial, state.permutation, layouts)
      state = state._replace(mismatch_count=_arrays.increment_if(mismatch, state.mismatch_count))
    orders = _given_orders(partitions, updates, layouts)
    momentum, notfinite = self._new_momentum(updates, state.momentum)
    trees = (momentum, params, state.initial, state.permutation, state.ranks, state.ranges)
    # With "pairs" the state has no ranks.
    parts = [jax.tree.leaves(tree) or [None] * len(layouts) for tree in trees]
    leaves = list(map(Leaf, layouts, orders, *parts))
    moving = [i for i, lay in enumerate(layouts) if lay.movable]
    moved = self._moved(state, [leaves[i] for i in moving])
    gradients, structure = jax.tree.flatten(updates)
    steps = list(map(jnp.zeros_like, gradients))
    permutation = [leaf.permutation for leaf in leaves]
    for i, (target, index) in zip(moving, moved, strict=True):
      steps[i] = _layout.difference(leaves[i].params, target, gradients[i].dtype)
      permutation[i] = index
    return jax.tree.unflatten(structure, steps), state._replace(
      count=optax.safe_increment(state.count),
      alpha=self.schedules.alpha(state.count),
      lamda=self.schedules.lamda(state.count),
      momentum=momentum,
      permutation=jax.tree.unflatten(structure, permutation),
      notfinite_count=_arrays.increment_if(notfinite, state.notfinite_count),
    )

  def _new_momentum(self, updates: Any, momentum: Any) -> tuple[Any, jax.Array]:
    """The new momentum, which keeps an old entry for one that is not finite; and whether one is."""

    def one(g: jax.Array, m: jax.Array) -> jax.Array:
      return jnp.asarray(self.momentum_lr * g.astype(m.dtype) + self.momentum * m, m.dtype)

    new = jax.tree.map(one, updates, momentum)
    kept = jax.tree.map(lambda x, m: jnp.where(jnp.isfinite(x), x, m), new, momentum)
    return kept, jnp.logical_not(_arrays.all_finite(new))

  def _moved(self, state: SgpermState, leaves: list[Leaf]) -> list[tuple[jax.Array, jax.Array]]:
    """The weights of each leaf after the step, and their permutation."""

    def move(count: jax.Array, key: jax.Array, leaves: list[Leaf]) -> Any:
      bits = self._random_bits(count, key, leaves)
      on_host = self.method == "exact" and self._on_host()
      step = self._host_step if on_host else self._device_step
      return [
        _layout.moved(leaf.layout, leaf.permutation, leaf.initial, *result)
        for leaf, result in zip(leaves, step(count, bits, leaves), strict=True)
      ]

    move = _execution.auto_sharded(move, [(leaf.params, leaf.params) for leaf in leaves])
    return move(state.count, state.key, leaves)

  def _sizes(self, length: int) -> tuple[int, int]:
    """The smallest and the largest size that a subset of vectors of this length may ever have."""
    return self.schedules.sizes(length, self.partition_size_min)

  def _random_bits(self, count: jax.Array, key: jax.Array, leaves: list[Leaf]) -> jax.Array:
    """Random words, from one draw for all leaves: their vectors do not mix."""

    def words(n: int) -> int:
      if self.method == "exact":
        return n if self._sizes(n)[0] < n else 0
      return self.rounds if self.method == "pairs" else 0

    most = max((words(leaf.layout.length) for leaf in leaves), default=0)
    if not most:
      return jnp.zeros(0, jnp.uint32)
    step_key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(self.key))
    return jax.random.bits(jax.random.fold_in(step_key, count), (most,), jnp.uint32)

  def _order(self, bits: jax.Array, n: int) -> jax.Array:
    """The drawn order of the vectors' ranks."""
    drawn = self._sizes(n)[0] < n
    return _sorting.argsort(bits[:n]) if drawn else jnp.arange(n, dtype=jnp.int32)

  def _device_step(
    self, count: jax.Array, bits: jax.Array, leaves: list[Leaf]
  ) -> list[tuple[jax.Array, jax.Array]]:
    """Per leaf (*fan_in, *outputs), the places of initial weights, and these."""

    def arrays(leaf: Leaf) -> tuple[_layout.Layout, list[jax.Array]]:
      lay = leaf.layout
      held = {
        "exact": [leaf.permutation, leaf.ranks],
        "pairs": [leaf.params, leaf.permutation],
        "rank": [leaf.params, leaf.ranks],
      }[self.method]
      given = [] if leaf.order is None else [lay.leaf(leaf.order.astype(jnp.int32))]
      outputs = [lay.shape[axis] for axis in lay.outputs]
      ranges = leaf.ranges.reshape([1] * len(lay.fan_in) + outputs)
      whole = [leaf.initial, leaf.momentum, *held, *given]
      return lay, [*map(lay.fan_in_first, whole), ranges]

    kernel = self._exact_kernel if self.method == "exact" else self._fast_kernel
    kernel = functools.partial(kernel, count, bits)
    return _execution.over_leaves(kernel, list(map(arrays, leaves)))

  def _fast_kernel(
    self, count: jax.Array, bits: jax.Array, layout: _layout.Layout
  ) -> _execution.Kernel:
    """That of "pairs", which gets the permutation, or of "rank", which gets the ranks."""
    bracket = self.schedules.brackets(count, layout.length)[-1]

    def kernel(initial: Any, momentum: Any, params: Any, held: Any, ranges: Any) -> jax.Array:
      target = _fast.targets(params, momentum, ranges, bracket)
      if self.method == "pairs":
        return _fast.pairs(params, layout.position(held), target, bits)
      return _fast.by_rank(target, _sorting.inverse(held))

    return kernel

  def _exact_kernel(
    self, count: jax.Array, bits: jax.Array, layout: _layout.Layout
  ) -> _execution.Kernel:
    n = layout.length
    drawn = self._order(bits, n)
    size = self.schedules.size(count, n, self.partition_size_min)
    brackets = self.schedules.brackets(count, n)

    def kernel(*arrays: jax.Array) -> jax.Array:
      # Outputs that are sharded stay so if they come before the leaves in the axis of vectors.
      shape = jnp.moveaxis(arrays[0], 1, -1).shape
      columns = (jnp.moveaxis(x, 1, -1).reshape(len(x), -1) for x in arrays)
      initial, momentum, held, ranks, *given, ranges = columns
      position = layout.position(held)
      work = _host.Work(
        weights=_sorting.gather(initial, position),
        momentum=momentum,
        ranks=_sorting.gather(ranks, position),
        ranges=ranges[0],
        order=given[0] if given else drawn,
        size=size,
        brackets=brackets.astype(initial.dtype),
      )
      source = _device.permute(work, sizes=self._sizes(n), remainder=self.remainder)
      return jnp.moveaxis(_sorting.gather(position, source).reshape(shape), -1, 1)

    return kernel

  def _host_step(
    self, count: jax.Array, bits: jax.Array, leaves: list[Leaf]
  ) -> list[tuple[jax.Array, jax.Array]]:
    """The same by the published algorithm on the host, whose ranks are its own."""
    positions, works = [], []
    for leaf in leaves:
      lay = leaf.layout
      order = self._order(bits, lay.length) if leaf.order is None else leaf.order
      position = lay.position(lay.columns(leaf.permutation))
      work = _host.Work(
        weights=_sorting.gather(lay.columns(leaf.initial), position),
        momentum=lay.columns(leaf.momentum),
        ranks=None,
        ranges=leaf.ranges[0],
        order=order.astype(jnp.int32),
        size=self.schedules.size(count, lay.length, self.partition_size_min),
        brackets=self.schedules.brackets(count, lay.length).astype(leaf.initial.dtype),
      )
      positions.append(position)
      works.append(work)
    sources = _called_back(works, self.remainder) if works else []
    results = []
    for leaf, position, source in zip(leaves, positions, sources, strict=True):
      place = _sorting.gather(position, source)
      values = _sorting.gather(leaf.layout.columns(leaf.initial), place)
      shape = leaf.layout.fan_in_first(leaf.initial).shape
      results.append((place.reshape(shape), values.reshape(shape)))
    return results

  def _on_host(self) -> bool:
    """Whether the exact step runs on the host."""
    if self.backend != "auto":
      return self.backend == "host"
    # The host kernel is faster on a CPU, but gathers sharded leaves.
    alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    return alone and _host.have_numba()


# Jitted, and with a hint: outside of a jit the results of a callback would lie on no mesh.
@functools.partial(jax.jit, static_argnums=1)
def _called_back(works: list[_host.Work], remainder: bool) -> list[jax.Array]:
  shapes = [jax.ShapeDtypeStruct(work.weights.shape, jnp.int32) for work in works]
  callback = functools.partial(_permute_on_host, remainder=remainder)
  sources = jax.pure_callback(callback, shapes, works, vmap_method="broadcast_all")
  return [
    _execution.sharded_like(jnp.zeros_like(source), source, work.weights)
    for source, work in zip(sources, works, strict=True)
  ]


def _permute_on_host(works: list[_host.Work], *, remainder: bool) -> list[np.ndarray]:
  """Each leaf's step; ``vmap`` may have put axes in front."""
  results = []
  for work in works:
    arrays = jax.tree.map(np.asarray, work)
    sources = np.empty(arrays.weights.shape, np.int32)
    for index in np.ndindex(sources.shape[:-2]):
      one = jax.tree.map(lambda x, index=index: x[index], arrays)
      sources[index] = _host.permute(one, remainder=remainder)
    results.append(sources)
  return results


def _given_orders(
  partitions: Any, updates: Any, layouts: list[_layout.Layout]
) -> list[jax.Array | None]:
  """The partitions to replay, per leaf; None where they are drawn."""
  if partitions is None:
    return [None] * len(layouts)
  structure: Any = jax.tree.structure(updates)
  if jax.tree.structure(partitions) != structure:
    raise ValueError(
      f"`partitions` must have the tree structure of the params; got"
      f" {jax.tree.structure(partitions)} for {structure}."
    )
  for lay, order in zip(layouts, jax.tree.leaves(partitions), strict=True):
    dtype = jnp.result_type(order)
    if jnp.shape(order) != (lay.length, lay.vectors) or not jnp.issubdtype(dtype, jnp.integer):
      raise ValueError(
        f"`partitions` must hold integers of shape (n, vectors), for the leaf '{lay.name}'"
        f" {(lay.length, lay.vectors)}; got {dtype} of shape {jnp.shape(order)}."
      )
    _permutation.check_indices(order, lay.length, "partitions", lay.name)
  return [jnp.asarray(order) for order in jax.tree.leaves(partitions)]
