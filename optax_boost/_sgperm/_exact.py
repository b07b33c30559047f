"""The exact step of SGPerm, on the device or on the host."""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._sgperm import _blocks
from optax_boost._sgperm import _device
from optax_boost._sgperm import _host
from optax_boost._sgperm import _sharding


class Work(NamedTuple):
  """What one leaf's step needs.

  Attributes:
    weights: (n, vectors), the weights before the step.
    wishes: (n, vectors), the recommendations.
    ranks: (n, vectors) int32, the weights' ranks in their vectors; ties in any order.
    ranges: (vectors,), in the dtype of the weights.
    subsets: the partition.
  """

  weights: Any
  wishes: Any
  ranks: Any
  ranges: Any
  subsets: _host.Subsets


def resolve(backend: str) -> str:
  """Which kernel ``"auto"`` means here.

  The host kernel is faster on a CPU, but gathers what is sharded; so it is chosen where nothing
  can be.

  Args:
    backend: "auto", "device" or "host".

  Returns:
    "device" or "host".
  """
  if backend != "auto":
    return backend
  alone = jax.default_backend() == "cpu" and jax.device_count() == 1
  return "host" if alone and _host.have_numba() else "device"


def permute(
  works: list[Work], sizes: list[tuple[int, int]], backend: str, remainder: bool
) -> list[jax.Array]:
  """One step for all leaves.

  Args:
    works: one per leaf.
    sizes: per leaf, the smallest and the largest size that a subset may ever have.
    backend: "device" or "host".
    remainder: whether the subset that reaches the end of a vector takes part.

  Returns:
    Per leaf (n, vectors) int32: for each position the one whose weight it receives.
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
    _sharding.same_as(jnp.zeros_like(source), source, work.weights)
    for source, work in zip(sources, works, strict=True)
  ]


def _on_device(work: Work, sizes: tuple[int, int], remainder: bool) -> jax.Array:
  *columns, subsets = work
  shared = subsets.order.ndim == 1

  def kernel(weights: Any, wishes: Any, ranks: Any, ranges: Any, order: Any = subsets.order) -> Any:
    own = subsets._replace(order=order)
    return _device.permute(weights, wishes, ranks, ranges, own, sizes=sizes, remainder=remainder)

  return _blocks.in_blocks(kernel, columns if shared else [*columns, subsets.order], jnp.int32)


def _on_host(works: list[Work], *, remainder: bool) -> list[np.ndarray]:
  return [_stacked(jax.tree.map(np.asarray, work), remainder) for work in works]


def _stacked(work: Work, remainder: bool) -> np.ndarray:
  """Loops over the axes that ``vmap`` put in front, if any."""
  stack = work.weights.shape[:-2]
  if not stack:
    return _one(work, remainder)
  found = np.empty(work.weights.shape, np.int32)
  for index in np.ndindex(*stack):
    found[index] = _one(jax.tree.map(lambda x, index=index: x[index], work), remainder)
  return found


def _one(work: Work, remainder: bool) -> np.ndarray:
  order = work.subsets.order
  subsets = work.subsets._replace(order=order.T if order.ndim == 2 else order)
  weights, wishes = np.ascontiguousarray(work.weights.T), np.ascontiguousarray(work.wishes.T)
  found = _host.permute(weights, wishes, subsets, work.ranges, remainder=remainder)
  return np.ascontiguousarray(found.T)
