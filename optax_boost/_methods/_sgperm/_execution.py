"""Runs kernels, functions that permute weight vectors, on all leaves of the params.

Leaves with weight vectors of the same length share a run; large leaves are processed in blocks of
weight vectors. For any sharding, a weight vector is whole on one device while a kernel runs.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _placement, _types
from optax_boost._methods._sgperm import _sorting, _weight_vectors

# The number of weights in a block, on a CPU and on accelerators. The number for accelerators was
# not tuned; it bounds the memory that a kernel takes.
_WEIGHTS, _MANY_WEIGHTS = 2**18, 2**22
# The most weights of several leaves that are concatenated for a run on an accelerator. On a CPU the
# bound is the size of a block, since copying large leaves takes longer than another compilation.
_JOINED_WEIGHTS = 2**25

# A kernel permutes the entries of each weight vector. Its arguments are arrays (n, *vectors): first
# the arrays to permute (weights, their indices in the raveled initial leaf, and perhaps their
# ranks), then arrays that the kernel only reads. It returns the permuted arrays. If arrays have
# several axes of vectors, leaves are stacked along the first of these axes.
Kernel: TypeAlias = Callable[..., Sequence[jax.Array]]


def permute(
  run: Callable[..., Sequence[Sequence[jax.Array]]],
  args: tuple[jax.Array, ...],
  layouts: Sequence[_weight_vectors.Layout],
  params: Sequence[jax.Array],
  moving: Sequence[optax.Params],
  fixed: Sequence[_types.Tree],
) -> list[optax.Params]:
  """Permutes the movable leaves of the trees `moving`; returns the new trees.

  Args:
    run: permutes the movable leaves. It is called as ``run(layouts, args, moving, fixed)``, with
      the layouts of the movable leaves. `moving` and `fixed` have for each of these leaves the list
      of its arrays. `run` returns for each leaf the list of its permuted arrays, in the shapes that
      :meth:`_weight_vectors.Layout.fan_in_first` or :meth:`_weight_vectors.Layout.columns` returns.
      `run` must not close over arrays.
    args: further arrays for `run`.
    layouts: the layout of each leaf, also of leaves that are not movable.
    params: the leaves of the params. The results are sharded as these leaves are, since arrays of a
      restored state may have no sharding.
    moving: trees of arrays of the leaves' shapes, which `run` permutes.
    fixed: trees or lists of arrays of the leaves' shapes, which `run` only reads.
  """
  movable = [i for i, lay in enumerate(layouts) if lay.movable]
  if not movable:
    return list(moving)
  movable_layouts = [layouts[i] for i in movable]

  def step(
    args: tuple[jax.Array, ...],
    moving: list[list[jax.Array]],
    fixed: list[list[jax.Array]],
  ) -> list[list[jax.Array]]:
    moved = run(movable_layouts, args, moving, fixed)
    return [
      [sharded_like(old, lay.leaf(x), olds[0]) for old, x in zip(olds, news, strict=True)]
      for lay, olds, news in zip(movable_layouts, moving, moved, strict=True)
    ]

  moving_leaves = [jax.tree.leaves(tree) for tree in moving]
  fixed_leaves = [jax.tree.leaves(tree) for tree in fixed]
  moving_by_leaf = [[leaves[i] for leaves in moving_leaves] for i in movable]
  fixed_by_leaf = [[leaves[i] for leaves in fixed_leaves] for i in movable]
  like = [[params[i]] * len(moving) for i in movable]
  moved = auto_sharded(step, like)(args, moving_by_leaf, fixed_by_leaf)
  for i, arrays in zip(movable, moved, strict=True):
    for leaves, array in zip(moving_leaves, arrays, strict=True):
      leaves[i] = array
  return [
    jax.tree.unflatten(jax.tree.structure(tree), leaves)
    for tree, leaves in zip(moving, moving_leaves, strict=True)
  ]


def together(
  kernel: Kernel,
  layouts: Sequence[_weight_vectors.Layout],
  moving: Sequence[Sequence[jax.Array]],
  fixed: Sequence[Sequence[jax.Array]],
) -> list[Sequence[jax.Array]]:
  """Runs a kernel on all leaves; returns for each leaf the permuted arrays.

  For each leaf, `moving` has the arrays that the kernel permutes, and `fixed` has the arrays that
  it only reads. Leaves share a call of the kernel if their arrays have the same dtypes, and their
  weight vectors the same length. On a mesh of several devices, they must also have the same shapes
  and fan-in axes.
  """
  columns = [
    [lay.fan_in_first(x) for x in (*moving_arrays, *fixed_arrays)]
    for lay, moving_arrays, fixed_arrays in zip(layouts, moving, fixed, strict=True)
  ]
  number = len(moving[0])
  mesh = _mesh_of([x for arrays in columns for x in arrays])
  kinds: dict[Any, list[int]] = {}
  for i, (layout, arrays) in enumerate(zip(layouts, columns, strict=True)):
    shape = layout.length if mesh is None else layout
    kinds.setdefault((shape, *(x.dtype for x in arrays)), []).append(i)
  results: list[Any] = [None] * len(layouts)
  for members in kinds.values():
    first, length = columns[members[0]][0], layouts[members[0]].length
    most = _WEIGHTS if _on_cpu(first) else _JOINED_WEIGHTS
    for batch in _batches(members, [layouts[i].vectors * length for i in members], most):
      # One list per argument of the kernel: the arrays of the leaves in the batch.
      arguments = list(zip(*(columns[i] for i in batch), strict=True))
      moved: Sequence[Sequence[jax.Array]]
      if mesh is None:
        joined = [jnp.concatenate([x.reshape(length, -1) for x in xs], 1) for xs in arguments]
        ends = np.cumsum([layouts[i].vectors for i in batch])[:-1]
        moved = [jnp.split(x, ends, 1) for x in _in_blocks(kernel, joined, number)]
      else:
        moved = _across_devices(kernel, arguments, len(layouts[batch[0]].fan_in), mesh)
      for i, new in zip(batch, zip(*moved, strict=True), strict=True):
        results[i] = new
  return results


def _batches(leaves: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
  """Divides leaves into batches of at most `most` weights; returns each batch's leaf numbers.

  `leaves` are the numbers of the leaves, and `sizes` their numbers of weights. A leaf with more
  than `most` weights is a batch by itself.
  """
  batches: list[list[int]] = []
  total = 0
  for leaf, size in zip(leaves, sizes, strict=True):
    total += size
    if not batches or total > most:
      batches.append([])
      total = size
    batches[-1].append(leaf)
  return batches


def gather(arrays: Sequence[jax.Array], source: jax.Array) -> list[jax.Array]:
  """Returns arrays (n, *vectors) in which position i has the entry of position ``source[i]``."""
  return [_sorting.gather(x, source) for x in arrays]


def _on_cpu(x: jax.Array) -> bool:
  """Returns whether a CPU will run the program.

  If `x` is on a mesh, the mesh says which kind of device runs the program. Otherwise JAX's default
  device is assumed.
  """
  device = getattr(jax.typeof(x).sharding.mesh, "abstract_device", None)
  return (getattr(device, "platform", None) or jax.default_backend()) == "cpu"


def _in_blocks(kernel: Kernel, arrays: Sequence[jax.Array], moving: int) -> Sequence[jax.Array]:
  """Runs a kernel on a few columns at a time, to limit scratch memory; returns the new arrays.

  `arrays` (n, vectors) are the kernel's arguments. The kernel permutes the first `moving` of them
  and only reads the others.
  """
  # A kernel needs scratch memory of ten to twenty times the size of its weights, so a block has
  # only as many vectors as keep a device busy, or as fit into the cache of a CPU. On several
  # devices there are no blocks, since vectors may be sharded over the devices.
  n, vectors = arrays[0].shape
  width = max(1, (_WEIGHTS if _on_cpu(arrays[0]) else _MANY_WEIGHTS) // n)
  blocks = -(-vectors // width) if jax.device_count() == 1 else 1
  if blocks == 1:
    return kernel(*arrays)
  width = -(-vectors // blocks)

  def run_block(k: jax.Array, done: Sequence[jax.Array]) -> list[jax.Array]:
    # The last block may overlap the block before it, and computes the same results there.
    start = jnp.minimum(k * width, vectors - width)
    results = kernel(*(jax.lax.dynamic_slice_in_dim(x, start, width, 1) for x in arrays))
    return [
      jax.lax.dynamic_update_slice_in_dim(x, block, start, 1)
      for x, block in zip(done, results, strict=True)
    ]

  return jax.lax.fori_loop(0, blocks, run_block, list(map(jnp.zeros_like, arrays[:moving])))


def _across_devices(
  kernel: Kernel,
  leaves: Sequence[Sequence[jax.Array]],
  axes: int,
  mesh: jax.sharding.AbstractMesh,
) -> list[Sequence[jax.Array]]:
  """Stacks leaves that may be sharded over `mesh`, and applies a kernel to the stacks.

  Devices exchange data before the kernel runs, so that each weight vector is whole on one device,
  and again after the kernel has run. `leaves` has for each argument of the kernel the list of all
  leaves' arrays. An array has `axes` fan-in axes before its output axes. Returns for each permuted
  array the list over all leaves.
  """
  first = leaves[0][0]
  joined = _exchanged(leaves, axes, mesh, _hint(first, axes, mesh.size))
  moved = kernel(*(x.reshape(-1, *x.shape[axes:]) for x in joined))
  stacked = [x.reshape(*first.shape[:axes], *x.shape[1:]) for x in moved]
  unstacked = [
    [jax.lax.index_in_dim(x, i, axes, False) for i in range(x.shape[axes])] for x in stacked
  ]
  return [list(jnp.moveaxis(x, axes, 0)) for x in _exchanged(unstacked, axes, mesh)]


def _mesh_of(arrays: list[jax.Array]) -> jax.sharding.AbstractMesh | None:
  """Returns the arrays' mesh if it has several devices and only Auto axes, else None."""
  meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.core.Tracer)]
  return next((m for m in meshes if m.size > 1 and _placement.has_auto_axes_only(m)), None)


def _exchanged(
  stacks: Sequence[Sequence[jax.Array]],
  axes: int,
  mesh: jax.sharding.AbstractMesh,
  hint: jax.Array | None = None,
) -> list[jax.Array]:
  """Stacks the arrays of each list in `stacks`; returns the stacks, with fan-in axes not sharded.

  The new axis comes after the first `axes` axes, the fan-in axes. Lists of the same item size are
  packed into one array, so that one exchange between the devices moves them all. `hint`, a result
  of :func:`_hint`, makes the compiler shard the output axes instead.
  """
  cast = jax.lax.bitcast_convert_type
  exchanged: list[Any] = [None] * len(stacks)
  sizes = [stack[0].dtype.itemsize for stack in stacks]
  spec = jax.sharding.PartitionSpec(
    *[None] * axes, *[jax.sharding.PartitionSpec.UNCONSTRAINED] * (stacks[0][0].ndim + 1 - axes)
  )
  for size in dict.fromkeys(sizes):
    same_size = [k for k, item_size in enumerate(sizes) if item_size == size]
    packed = jnp.stack([cast(x, f"uint{8 * size}") for k in same_size for x in stacks[k]], axes)
    packed = jax.lax.with_sharding_constraint(packed, jax.sharding.NamedSharding(mesh, spec))
    if hint is not None:
      packed = jnp.where(hint, 0, packed)
    for k, stack in zip(same_size, jnp.split(packed, len(same_size), axes), strict=True):
      exchanged[k] = cast(stack, stacks[k][0].dtype)
  return exchanged


def _hint(floats: jax.Array, axes: int, devices: int) -> jax.Array | None:
  """Returns an array of False, one for each output, sharded as the longest fan-in axis of `floats`.

  An operation on this array and the outputs makes the compiler shard the outputs as this array is.
  The array is computed from `floats`, since under ``jit`` no code can read the sharding of
  `floats`. Returns None if the fan-in axis and the first output axis can't be cut into the same
  number of shards.
  """
  fan_in = int(np.argmax(floats.shape[:axes]))
  length, outputs = floats.shape[fan_in], math.prod(floats.shape[axes : axes + 1])
  shards = math.gcd(length, outputs, devices)
  if shards == 1:
    return None
  split = floats.reshape(*floats.shape[:fan_in], shards, -1, *floats.shape[fan_in + 1 :])
  # XLA 19: `split > inf` is always False, but XLA can't know that. So XLA computes `never` from
  # `split`, and shards `never` as it shards the fan-in axis.
  never = jnp.any(split > jnp.inf, axis=[axis for axis in range(split.ndim) if axis != fan_in])
  spread = jnp.broadcast_to(never[:, None], (shards, outputs // shards))
  return spread.reshape(-1, *[1] * (floats.ndim - axes - 1))


def auto_sharded(function: Callable[..., Any], like: _types.Tree) -> Callable[..., Any]:
  """Wraps `function` so that the compiler chooses the shardings inside, even on Explicit axes.

  Without this, code on Explicit axes would have to name a sharding for each sort and gather. The
  results are sharded as the arrays in `like`, a tree with the structure of the results. `function`
  must not close over arrays.
  """

  def call(*args: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and (mesh_of_arrays := _explicit_mesh((like, args))) is not None:
      with jax.sharding.use_abstract_mesh(mesh_of_arrays):
        return call(*args)
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return function(*args)
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*args)

  return call


def _explicit_mesh(arrays: _types.Tree) -> jax.sharding.AbstractMesh | None:
  """Returns the mesh of the first array that is on a mesh with Explicit axes, or None."""
  # XLA 28: JAX before 0.8 has no way to enter an abstract mesh.
  if not hasattr(jax.sharding, "use_abstract_mesh"):
    return None
  meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
  explicit = jax.sharding.AxisType.Explicit
  return next((m for m in meshes if not m.empty and explicit in m.axis_types), None)


def sharded_like(old: jax.Array, new: jax.Array, floats: jax.Array) -> jax.Array:
  """Returns `new`, which the compiler then shards as `old`; `floats` are floats of the same shape.

  Under ``jit`` no code can read the sharding of `old`, and the result of a sort or a gather has
  none. But the compiler gives both operands of ``jnp.where`` the same sharding.
  """
  # XLA 19: `floats > inf` is always False, so the result is `new`. But XLA can't know that, and
  # shards the result as `old`.
  return jnp.where(floats > jnp.inf, old, new)
