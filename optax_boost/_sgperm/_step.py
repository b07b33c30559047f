"""One step of SGPerm for all leaves: random bits, and a kernel on the device or on the host."""

import functools
import itertools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._sgperm import _device
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _fast
from optax_boost._sgperm import _host
from optax_boost._sgperm import _layout
from optax_boost._sgperm import _schedules
from optax_boost._sgperm import _sorting


class Settings(NamedTuple):
  """The checked arguments of :func:`sgperm` that a step needs."""

  schedules: _schedules.Schedules
  momentum: Any
  momentum_lr: Any
  partition_size_min: int
  include_partition_remainder: bool
  method: str
  backend: str
  rounds: int
  key_impl: Any

  def random_words(self, length: int) -> int:
    """How many 32-bit words a step draws for a leaf of weight vectors of this length."""
    if self.method == "exact":
      smallest, _ = self.schedules.sizes(length, self.partition_size_min)
      return length if smallest < length else 0
    return self.rounds if self.method == "pairs" else 0


class Leaf(NamedTuple):
  """A leaf's layout and, of the leaf's shape but for the ranges, its arrays."""

  layout: _layout.Layout
  momentum: jax.Array
  params: jax.Array
  initial: jax.Array
  permutation: jax.Array
  ranks: Any
  ranges: jax.Array


class Work(NamedTuple):
  """The arrays of one leaf's step.

  Attributes:
    weights: (n, vectors), the weights before the step.
    momentum: (n, vectors), the recommendations.
    ranks: (n, vectors) int32, the weights' ranks in their vectors; ties in any order.
    ranges: (vectors,), in the dtype of the weights.
    subsets: the partition.
  """

  weights: Any
  momentum: Any
  ranks: Any
  ranges: Any
  subsets: _host.Subsets


def new_positions(
  settings: Settings, count: jax.Array, key: jax.Array, leaves: list[Leaf], orders: list[Any]
) -> list[jax.Array]:
  """Per leaf (n, vectors) int32: for each position the initial one of its new weight."""
  bits = _random_bits(settings, count, key, [leaf.layout for leaf in leaves])
  if settings.method == "exact":
    return _exact_step(settings, count, leaves, bits, orders)
  return [_fast_step(settings, count, *pair) for pair in zip(leaves, bits, strict=True)]


def _random_bits(
  settings: Settings, count: jax.Array, key: jax.Array, layouts: list[_layout.Layout]
) -> list[jax.Array]:
  """The random words of each leaf, from one draw for all: each draw is much to compile."""
  words = (settings.random_words(lay.length) for lay in layouts)
  ends = list(itertools.accumulate(words, initial=0))
  drawn = jnp.zeros(0, jnp.uint32)
  if ends[-1]:
    step_key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=settings.key_impl), count)
    drawn = jax.random.bits(step_key, (ends[-1],), jnp.uint32)
  return [drawn[start:end] for start, end in itertools.pairwise(ends)]


def _exact_step(
  settings: Settings,
  count: jax.Array,
  leaves: list[Leaf],
  bits: list[jax.Array],
  orders: list[Any],
) -> list[jax.Array]:
  schedules, least = settings.schedules, settings.partition_size_min
  positions, works, sizes = [], [], []
  for leaf, random, order in zip(leaves, bits, orders, strict=True):
    lay = leaf.layout
    if order is None:
      order = _sorting.argsort(random) if random.size else jnp.arange(lay.length)
    subsets = _host.Subsets(
      order=order.astype(jnp.int32),
      size=schedules.size(count, lay.length, least),
      brackets=schedules.brackets(count, lay.length).astype(leaf.initial.dtype),
    )
    position = lay.position(lay.columns(leaf.permutation))
    weights, ranks = (_sorting.gather(lay.columns(x), position) for x in (leaf.initial, leaf.ranks))
    positions.append(position)
    works.append(Work(weights, lay.columns(leaf.momentum), ranks, leaf.ranges[0], subsets))
    sizes.append(schedules.sizes(lay.length, least))
  backend = _resolve(settings.backend)
  sources = _permute(works, sizes, backend, settings.include_partition_remainder)
  return list(map(_sorting.gather, positions, sources))


def _fast_step(settings: Settings, count: jax.Array, leaf: Leaf, random: jax.Array) -> jax.Array:
  """The same for one leaf by ``"pairs"`` or ``"rank"``."""
  lay = leaf.layout
  params, momentum = lay.columns(leaf.params), lay.columns(leaf.momentum)
  bracket = settings.schedules.brackets(count, lay.length)[-1]
  target = _fast.targets(params, momentum, leaf.ranges, bracket)
  if settings.method == "pairs":
    return _fast.pairs(params, lay.position(lay.columns(leaf.permutation)), target, random)
  return _fast.by_rank(target, _sorting.inverse(lay.columns(leaf.ranks)))


def _resolve(backend: str) -> str:
  """Replaces ``"auto"`` by "device" or "host".

  The host kernel is faster on a CPU, but gathers sharded leaves: chosen on a single CPU device.
  """
  if backend != "auto":
    return backend
  alone = jax.default_backend() == "cpu" and jax.device_count() == 1
  return "host" if alone and _host.have_numba() else "device"


def _permute(
  works: list[Work], sizes: list[tuple[int, int]], backend: str, remainder: bool
) -> list[jax.Array]:
  """Per leaf (n, vectors) int32: for each position the one whose weight it receives.

  `sizes`: per leaf, the smallest and the largest size that a subset may ever have; `remainder`:
  whether the subset that reaches the end of a vector takes part.
  """
  if backend == "device":
    return [_on_device(*pair, remainder) for pair in zip(works, sizes, strict=True)]
  if not works:
    return []
  # The ranks are the device kernel's; the host sorts faster than they would travel.
  return _called_back([work._replace(ranks=None) for work in works], remainder)


# Jitted, and with a hint: outside of a jit the results of a callback would lie on no mesh.
@functools.partial(jax.jit, static_argnums=1)
def _called_back(works: list[Work], remainder: bool) -> list[jax.Array]:
  shapes = [jax.ShapeDtypeStruct(work.weights.shape, jnp.int32) for work in works]
  callback = functools.partial(_on_host, remainder=remainder)
  sources = jax.pure_callback(callback, shapes, works, vmap_method="broadcast_all")
  return [
    _execution.sharded_like(jnp.zeros_like(source), source, work.weights)
    for source, work in zip(sources, works, strict=True)
  ]


def _on_device(work: Work, sizes: tuple[int, int], remainder: bool) -> jax.Array:
  *columns, subsets = work
  shared = subsets.order.ndim == 1

  def kernel(weights: Any, momentum: Any, ranks: Any, ranges: Any, order: Any = None) -> Any:
    own = subsets if order is None else subsets._replace(order=order)
    return _device.permute(weights, momentum, ranks, ranges, own, sizes=sizes, remainder=remainder)

  return _execution.in_blocks(kernel, columns if shared else [*columns, subsets.order], jnp.int32)


def _on_host(works: list[Work], *, remainder: bool) -> list[np.ndarray]:
  """Each leaf's step; ``vmap`` may have put axes in front."""
  results = []
  for work in works:
    arrays = jax.tree.map(np.asarray, work)
    sources = np.empty(arrays.weights.shape, np.int32)
    for index in np.ndindex(sources.shape[:-2]):
      one = jax.tree.map(lambda x, index=index: x[index], arrays)
      order = one.subsets.order
      subsets = one.subsets._replace(order=order.T if order.ndim == 2 else order)
      weights, momentum = np.ascontiguousarray(one.weights.T), np.ascontiguousarray(one.momentum.T)
      source = _host.permute(weights, momentum, subsets, one.ranges, remainder=remainder)
      sources[index] = source.T
    results.append(sources)
  return results
