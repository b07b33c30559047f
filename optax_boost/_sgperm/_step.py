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
  """The checked arguments of :func:`sgperm` by which weights are permuted."""

  schedules: _schedules.Schedules
  partition_size_min: int
  remainder: bool
  method: str
  backend: str
  rounds: int
  key_impl: Any

  def sizes(self, length: int) -> tuple[int, int]:
    """The smallest and the largest size that a subset of vectors of this length may ever have."""
    return self.schedules.sizes(length, self.partition_size_min)

  def random_words(self, length: int) -> int:
    """How many 32-bit words a step draws for a leaf of weight vectors of this length."""
    if self.method == "exact":
      return length if self.sizes(length)[0] < length else 0
    return self.rounds if self.method == "pairs" else 0


class Leaf(NamedTuple):
  """A leaf's arrays, of the leaf's shape but for the ranges."""

  momentum: jax.Array
  params: jax.Array
  initial: jax.Array
  permutation: jax.Array
  ranks: Any
  ranges: jax.Array


def new_positions(
  settings: Settings,
  count: jax.Array,
  key: jax.Array,
  layouts: list[_layout.Layout],
  leaves: list[Leaf],
  orders: list[Any],
) -> list[jax.Array]:
  """Per leaf (n, vectors) int32: for each position the initial one of its new weight."""
  bits = _random_bits(settings, count, key, layouts)
  parts = zip(layouts, leaves, bits, strict=True)
  if settings.method != "exact":
    return [_fast_step(settings, count, *part) for part in parts]
  positions, works = [], []
  for (lay, leaf, random), order in zip(parts, orders, strict=True):
    if order is None:
      order = _sorting.argsort(random) if random.size else jnp.arange(lay.length)
    positions.append(lay.position(lay.columns(leaf.permutation)))
    weights, ranks = (
      _sorting.gather(lay.columns(x), positions[-1]) for x in (leaf.initial, leaf.ranks)
    )
    work = _host.Work(
      weights=weights,
      momentum=lay.columns(leaf.momentum),
      ranks=ranks,
      ranges=leaf.ranges[0],
      order=order.astype(jnp.int32),
      size=settings.schedules.size(count, lay.length, settings.partition_size_min),
      brackets=settings.schedules.brackets(count, lay.length).astype(leaf.initial.dtype),
    )
    works.append(work)
  return list(map(_sorting.gather, positions, _exact_step(settings, works)))


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


def _fast_step(
  settings: Settings, count: jax.Array, lay: _layout.Layout, leaf: Leaf, random: jax.Array
) -> jax.Array:
  """The new positions of one leaf by ``"pairs"`` or ``"rank"``."""
  params, momentum = lay.columns(leaf.params), lay.columns(leaf.momentum)
  bracket = settings.schedules.brackets(count, lay.length)[-1]
  target = _fast.targets(params, momentum, leaf.ranges, bracket)
  if settings.method == "pairs":
    return _fast.pairs(params, lay.position(lay.columns(leaf.permutation)), target, random)
  return _fast.by_rank(target, _sorting.inverse(lay.columns(leaf.ranks)))


def _exact_step(settings: Settings, works: list[_host.Work]) -> list[jax.Array]:
  """Per leaf (n, vectors) int32: for each position the one whose weight it receives."""
  on_host = settings.backend == "host"
  if settings.backend == "auto":
    # The host kernel is faster on a CPU, but gathers sharded leaves.
    alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    on_host = alone and _host.have_numba()
  if not on_host:
    sizes = [settings.sizes(work.weights.shape[0]) for work in works]
    return [_on_device(*pair, settings.remainder) for pair in zip(works, sizes, strict=True)]
  if not works:
    return []
  return _called_back([work._replace(ranks=None) for work in works], settings.remainder)


def _on_device(work: _host.Work, sizes: tuple[int, int], remainder: bool) -> jax.Array:
  names = ["weights", "momentum", "ranks", "ranges"] + ["order"] * (work.order.ndim == 2)

  def kernel(*columns: jax.Array) -> jax.Array:
    part = work._replace(**dict(zip(names, columns, strict=True)))
    return _device.permute(part, sizes=sizes, remainder=remainder)

  return _execution.in_blocks(kernel, [getattr(work, name) for name in names], jnp.int32)


# Jitted, and with a hint: outside of a jit the results of a callback would lie on no mesh.
@functools.partial(jax.jit, static_argnums=1)
def _called_back(works: list[_host.Work], remainder: bool) -> list[jax.Array]:
  shapes = [jax.ShapeDtypeStruct(work.weights.shape, jnp.int32) for work in works]
  callback = functools.partial(_on_host, remainder=remainder)
  sources = jax.pure_callback(callback, shapes, works, vmap_method="broadcast_all")
  return [
    _execution.sharded_like(jnp.zeros_like(source), source, work.weights)
    for source, work in zip(sources, works, strict=True)
  ]


def _on_host(works: list[_host.Work], *, remainder: bool) -> list[np.ndarray]:
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
