"""The steps of SGPerm, of checked arguments: momentum, random bits, and a kernel."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

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
from optax_boost._sgperm import _permuted_params
from optax_boost._sgperm import _schedules
from optax_boost._sgperm import _sorting
from optax_boost._sgperm._execution import Weights
from optax_boost._sgperm._states import SgpermState


class Leaf(NamedTuple):
  """The arrays of a leaf's step; all but the ranges are of the leaf's shape."""

  weights: Weights
  momentum: jax.Array
  ranges: jax.Array
  order: Any  # the partition to replay, (n, vectors), or None


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
  key: jax.Array

  def init(self, params: optax.Params) -> SgpermState:
    layouts = self.cutter.for_init(params)
    leaves, structure = jax.tree.flatten(params)

    def of_each(function: Callable[[_layout.Layout, Any], Any]) -> Any:
      return jax.tree.unflatten(structure, list(map(function, layouts, leaves)))

    count = jnp.zeros([], jnp.int32)
    return SgpermState(
      count=count,
      alpha=self.schedules.alpha(count),
      lamda=self.schedules.lamda(count),
      key=jnp.array(jax.random.key_data(self.key)),
      momentum=_arrays.zeros_like_wide(params),
      permuted_params=_arrays.copy_arrays(params),
      permutation=jax.tree.map(_layout.identity, params),
      ranks=() if self.method == "pairs" else of_each(_layout.ranks),
      ranges=_tree.unboxed(of_each(_layout.ranges)),
      notfinite_count=jnp.zeros([], jnp.int32),
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
    momentum, notfinite = self._new_momentum(updates, state.momentum)
    grads, structure = jax.tree.flatten(updates)
    currents = jax.tree.leaves(params)
    # With "pairs" the state has no ranks.
    trees = (state.permuted_params, state.permutation, state.ranks, momentum, state.ranges)
    columns = [jax.tree.leaves(tree) or [None] * len(layouts) for tree in trees]
    orders = _given_orders(partitions, updates, layouts)
    weights = list(map(Weights, *columns[:3]))
    leaves = list(map(Leaf, weights, *columns[3:], orders))
    moving = [i for i, lay in enumerate(layouts) if lay.movable]

    def move(count: jax.Array, key: jax.Array, leaves: list[Leaf]) -> list[Weights]:
      own = [layouts[i] for i in moving]
      bits = self._random_bits(count, key, own)
      on_host = self.method == "exact" and self._on_host()
      step = self._host_step if on_host else self._device_step
      moved = step(count, bits, own, leaves)
      return list(map(_layout.whole, own, [leaf.weights for leaf in leaves], moved))

    if moving:
      # Sharded as the params: a state restored without shardings has none.
      like = [jax.tree.map(lambda _, i=i: currents[i], weights[i]) for i in moving]
      move = _execution.auto_sharded(move, like)
      moved = move(state.count, state.key, [leaves[i] for i in moving])
      for i, of_leaf in zip(moving, moved, strict=True):
        weights[i] = of_leaf
    steps = [
      _layout.difference(p, new.values, g.dtype)
      for p, new, g in zip(currents, weights, grads, strict=True)
    ]
    exact, permutation, ranks = (
      jax.tree.unflatten(structure, [new[field] for new in weights]) for field in range(3)
    )
    return jax.tree.unflatten(structure, steps), state._replace(
      count=optax.safe_increment(state.count),
      alpha=self.schedules.alpha(state.count),
      lamda=self.schedules.lamda(state.count),
      momentum=momentum,
      permuted_params=exact,
      permutation=permutation,
      ranks=() if self.method == "pairs" else ranks,
      notfinite_count=_arrays.increment_if(notfinite, state.notfinite_count),
    )

  def _new_momentum(self, updates: Any, momentum: Any) -> tuple[Any, jax.Array]:
    """The new momentum, which keeps an old entry for one that is not finite; and whether one is."""

    def one(g: jax.Array, m: jax.Array) -> jax.Array:
      return jnp.asarray(self.momentum_lr * g.astype(m.dtype) + self.momentum * m, m.dtype)

    new = jax.tree.map(one, updates, momentum)
    kept = jax.tree.map(lambda x, m: jnp.where(jnp.isfinite(x), x, m), new, momentum)
    return kept, jnp.logical_not(_arrays.all_finite(new))

  def _sizes(self, length: int) -> tuple[int, int]:
    """The smallest and the largest size that a subset of vectors of this length may ever have."""
    return self.schedules.sizes(length, self.partition_size_min)

  def _random_bits(
    self, count: jax.Array, key: jax.Array, layouts: list[_layout.Layout]
  ) -> jax.Array:
    """Random words, from one draw for all leaves: their vectors do not mix."""
    most = _fast.ROUNDS if self.method == "pairs" else 0
    if self.method == "exact":
      most = max(lay.length if self._draws(lay.length) else 0 for lay in layouts)
    if not most:
      return jnp.zeros(0, jnp.uint32)
    step_key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(self.key))
    return jax.random.bits(jax.random.fold_in(step_key, count), (most,), jnp.uint32)

  def _draws(self, n: int) -> bool:
    """Whether vectors of n weights are cut into subsets in some step."""
    return self._sizes(n)[0] < n

  def _device_step(
    self, count: jax.Array, bits: jax.Array, layouts: list[_layout.Layout], leaves: list[Leaf]
  ) -> list[Weights]:
    """The weights of each leaf after the step, (*fan_in, *outputs)."""

    def arrays(lay: _layout.Layout, leaf: Leaf) -> tuple[_layout.Layout, Weights, list[jax.Array]]:
      given = [] if leaf.order is None else [lay.leaf(leaf.order.astype(jnp.int32))]
      outputs = [lay.shape[axis] for axis in lay.outputs]
      ranges = leaf.ranges.reshape([1] * len(lay.fan_in) + outputs)
      weights = jax.tree.map(lay.fan_in_first, leaf.weights)
      return lay, weights, [*map(lay.fan_in_first, [leaf.momentum, *given]), ranges]

    kernel = self._exact_kernel if self.method == "exact" else self._fast_kernel
    kernel = functools.partial(kernel, count, bits)
    return _execution.over_leaves(kernel, list(map(arrays, layouts, leaves)))

  def _fast_kernel(
    self, count: jax.Array, bits: jax.Array, layout: _layout.Layout
  ) -> _execution.Kernel:
    """The kernel of "pairs", whose weights have no ranks, or of "rank"."""
    bracket = self.schedules.brackets(count, layout.length)[-1]

    def kernel(values: jax.Array, permutation: jax.Array, *arrays: jax.Array) -> jax.Array:
      *ranks, momentum, ranges = arrays
      target = _fast.targets(values, momentum, ranges, bracket)
      return _fast.by_rank(target, *ranks) if ranks else _fast.pairs(values, target, bits)

    return kernel

  def _exact_kernel(
    self, count: jax.Array, bits: jax.Array, layout: _layout.Layout
  ) -> _execution.Kernel:
    """The exact search on the device."""
    work = self._work(count, bits, layout)

    def kernel(*arrays: jax.Array) -> jax.Array:
      # Outputs that are sharded stay so if they come before the leaves in the axis of vectors.
      shape = jnp.moveaxis(arrays[0], 1, -1).shape
      columns = (jnp.moveaxis(x, 1, -1).reshape(len(x), -1) for x in arrays)
      values, _, ranks, momentum, *given, ranges = columns
      of_vectors = work(values, momentum, ranges[0], *given)._replace(ranks=ranks)
      sizes = self._sizes(layout.length)
      source = _device.permute(of_vectors, sizes=sizes, remainder=self.remainder)
      return jnp.moveaxis(source.reshape(shape), -1, 1)

    return kernel

  def _work(
    self, count: jax.Array, bits: jax.Array, layout: _layout.Layout
  ) -> Callable[..., _host.Work]:
    """Makes the inputs of an exact step of columns, and of a given order if there is one."""
    n = layout.length
    drawn = _sorting.argsort(bits[:n]) if self._draws(n) else jnp.arange(n, dtype=jnp.int32)
    size = self.schedules.size(count, n, self.partition_size_min)
    brackets = self.schedules.brackets(count, n)

    def work(values: jax.Array, momentum: Any, ranges: Any, order: Any = drawn) -> _host.Work:
      return _host.Work(values, momentum, None, ranges, order, size, brackets.astype(values.dtype))

    return work

  def _host_step(
    self, count: jax.Array, bits: jax.Array, layouts: list[_layout.Layout], leaves: list[Leaf]
  ) -> list[Weights]:
    """The same by the published algorithm on the host, whose ranks are its own."""

    def work(lay: _layout.Layout, leaf: Leaf) -> _host.Work:
      given = [] if leaf.order is None else [leaf.order.astype(jnp.int32)]
      values, momentum = lay.columns(leaf.weights.values), lay.columns(leaf.momentum)
      return self._work(count, bits, lay)(values, momentum, leaf.ranges[0], *given)

    def moved(lay: _layout.Layout, leaf: Leaf, source: jax.Array) -> Weights:
      return jax.tree.map(lambda x: _sorting.gather(lay.columns(x), source), leaf.weights)

    sources = _called_back(list(map(work, layouts, leaves)), self.remainder)
    return list(map(moved, layouts, leaves, sources))

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
  """Each leaf's step; ``vmap`` may have put axes first."""
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
  """The partitions to replay, per leaf; None if they are drawn."""
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
    _permuted_params.check_indices(order, lay.length, "partitions", lay.name)
  return [jnp.asarray(order) for order in jax.tree.leaves(partitions)]
