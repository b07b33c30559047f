"""How SGPerm's kernels run: once for all leaves that are alike, some weight vectors at a time."""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
import math
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp

from optax_boost._sgperm import _sharding
from optax_boost._sgperm import _sorting

# Weights in a block, on a CPU and on accelerators (for these a guess, to bound memory).
_WEIGHTS, _MANY_WEIGHTS = 2**18, 2**22
# Weights of a stack of leaves on an accelerator. It is a copy of them, which on a CPU takes longer
# than compiling is worth: there a stack is no larger than a block.
_STACKED_WEIGHTS = 2**25

# Gets the initial weights and more arrays, (n, vectors) or (1, vectors), each vector by itself;
# `vectors` may be several axes, the first then that of leaves. Returns (n, vectors) int32: for each
# position the initial one of its new weight.
Kernel: TypeAlias = Callable[..., jax.Array]


def over_leaves(
  kernel: Callable[[Any], Kernel], leaves: Sequence[tuple[Any, Sequence[jax.Array]]]
) -> list[tuple[jax.Array, jax.Array]]:
  """Runs the kernel for a layout once for leaves of the same shapes, fan-in axes and dtypes.

  `leaves`: of each leaf the layout, and the kernel's arrays, (*fan_in, *outputs) or
  (1, ..., *outputs). Returns in the former shape the kernel's results, and the weights there.
  """
  mesh = _sharding.mesh_of([x for _, arrays in leaves for x in arrays])

  def kind(index: int) -> Any:
    layout, arrays = leaves[index]
    return layout.shape, layout.fan_in, [str(x.dtype) for x in arrays]

  results: list[Any] = [None] * len(leaves)
  for _, alike in itertools.groupby(sorted(range(len(leaves)), key=kind), kind):
    members = list(alike)
    layout, (initial, *_) = leaves[members[0]]
    axes, one = len(layout.fan_in), kernel(layout)
    most = _WEIGHTS if _on_cpu(initial) else _STACKED_WEIGHTS
    chunk = max(1, most // max(1, initial.size))
    for start in range(0, len(members), chunk):
      some = members[start : start + chunk]
      stacks = list(zip(*(leaves[i][1] for i in some), strict=True))
      moved = (
        _sharding.on_stacks(one, stacks, axes, mesh) if mesh else _on_stacks(one, stacks, axes)
      )
      for i, result in zip(some, moved, strict=True):
        results[i] = result
  return results


def _on_stacks(
  kernel: Kernel, stacks: list[tuple[jax.Array, ...]], axes: int
) -> list[tuple[jax.Array, jax.Array]]:
  """Runs a kernel on the vectors of several leaves side by side."""
  initial, shape = stacks[0], stacks[0][0].shape
  places = in_blocks(kernel, [jnp.stack([_columns(x, axes) for x in xs]) for xs in stacks])
  # Gathers leaf by leaf need no stack of results.
  values = [_sorting.gather(_columns(x, axes), p) for x, p in zip(initial, places, strict=True)]
  return [(p.reshape(shape), x.reshape(shape)) for p, x in zip(places, values, strict=True)]


def _on_cpu(x: jax.Array) -> bool:
  """Whether a CPU will run the program, or where an array lies on no known mesh, most likely."""
  device = getattr(jax.typeof(x).sharding.mesh, "abstract_device", None)
  return (getattr(device, "platform", None) or jax.default_backend()) == "cpu"


def _columns(x: jax.Array, axes: int) -> jax.Array:
  return x.reshape(math.prod(x.shape[:axes]), math.prod(x.shape[axes:]))


def in_blocks(kernel: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
  """Applies a kernel on (n, vectors) to arrays (leaves, n or 1, vectors), each vector by itself."""
  leaves, n, vectors = arrays[0].shape
  # A kernel takes scratch memory of ten to twenty times its weights, and nothing is gained by more
  # vectors side by side than keep a device busy: on a CPU, as many as fit into its cache.
  most = _WEIGHTS if _on_cpu(arrays[0]) else _MANY_WEIGHTS
  width = max(1, most // max(1, n))
  # The vectors may lie on all of several devices.
  if jax.device_count() > 1:
    width = leaves * vectors
  # A block is some whole leaves, or a part of one.
  some = min(leaves, max(1, width // max(1, vectors)))
  pieces = -(-vectors // width) if vectors else 1
  width = -(-vectors // pieces)

  def block(*parts: jax.Array) -> jax.Array:
    found = kernel(*(jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1) for x in parts))
    return jnp.moveaxis(found.reshape(n, some, width), 1, 0)

  if some == leaves and pieces == 1:
    return block(*arrays)

  def one(k: jax.Array, done: jax.Array) -> jax.Array:
    # The last block overlaps the one before it, and repeats its results.
    leaf = jnp.minimum(k // pieces * some, leaves - some)
    start = (leaf, 0, jnp.minimum(k % pieces * width, vectors - width))
    parts = [jax.lax.dynamic_slice(x, start, (some, x.shape[1], width)) for x in arrays]
    return jax.lax.dynamic_update_slice(done, block(*parts), start)

  blocks = -(-leaves // some) * pieces
  return jax.lax.fori_loop(0, blocks, one, jnp.zeros((leaves, n, vectors), jnp.int32))
