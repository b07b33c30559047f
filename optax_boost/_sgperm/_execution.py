"""How SGPerm's kernels run: once for all leaves of one kind, some weight vectors at a time.

However leaves are sharded, each weight vector lies whole on a device.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _arrays
from optax_boost._sgperm import _sorting

# Weights in a block, on a CPU and on accelerators (for these a guess, to bound memory).
_WEIGHTS, _MANY_WEIGHTS = 2**18, 2**22
# Weights of a stack of leaves on an accelerator. It is a copy of them, which on a CPU takes longer
# than compiling is worth: there a stack is no larger than a block.
_STACKED_WEIGHTS = 2**25


class Weights(NamedTuple):
  """The weights of a leaf, and arrays of its shape that move with them."""

  values: Any
  permutation: Any  # int32, each weight's entry in the raveled initial leaf
  ranks: Any = None  # int32, each weight's rank in its vector


# Gets weights and more arrays, (n, vectors) or (1, vectors), each vector by itself; `vectors` may
# be several axes, the first then that of leaves. Returns (n, vectors) int32: for each position the
# one whose weight it receives.
Kernel: TypeAlias = Callable[..., jax.Array]


def over_leaves(
  kernel: Callable[[Any], Kernel], leaves: Sequence[tuple[Any, Weights, Sequence[jax.Array]]]
) -> list[Weights]:
  """Runs the kernel for a layout once for leaves of the same shapes, fan-in axes and dtypes.

  `leaves`: of each leaf the layout, its weights (*fan_in, *outputs), and the kernel's other arrays,
  of the same shape or (1, ..., *outputs). Returns the moved weights.
  """
  columns = [[*jax.tree.leaves(weights), *others] for _, weights, others in leaves]
  mesh = _mesh_of([x for arrays in columns for x in arrays])
  kinds: dict[Any, list[int]] = {}
  for i, ((layout, *_), arrays) in enumerate(zip(leaves, columns, strict=True)):
    kinds.setdefault((layout, *(x.dtype for x in arrays)), []).append(i)
  results: list[Any] = [None] * len(leaves)
  for members in kinds.values():
    layout, weights, others = leaves[members[0]]
    size, moving = weights.values.size, len(columns[members[0]]) - len(others)
    run = _Run(kernel(layout), len(layout.fan_in), moving, mesh)
    chunk = max(1, (_WEIGHTS if _on_cpu(weights.values) else _STACKED_WEIGHTS) // max(1, size))
    for start in range(0, len(members), chunk):
      some = members[start : start + chunk]
      moved = run(list(zip(*(columns[i] for i in some), strict=True)))
      for i, arrays in zip(some, moved, strict=True):
        results[i] = Weights(*arrays)
  return results


class _Run(NamedTuple):
  """Runs a kernel on the vectors of several leaves side by side."""

  kernel: Kernel
  axes: int  # of the fan-in
  moving: int  # how many of the arrays move
  mesh: jax.sharding.AbstractMesh | None

  def __call__(self, stacks: list[tuple[jax.Array, ...]]) -> list[list[jax.Array]]:
    """`stacks`: of each array the leaves' ones. Returns of each leaf the moved ones."""
    if self.mesh is not None:
      return self._sharded(stacks, self.mesh)
    shape = stacks[0][0].shape
    columns = [[self._columns(x) for x in xs] for xs in stacks]
    stacked = list(map(jnp.stack, columns))
    sources = in_blocks(self.kernel, stacked)
    if not _on_cpu(stacked[0]):
      # A gather for each leaf would be a kernel for each.
      gather = jax.vmap(_sorting.gather)
      moved = (gather(x, sources).reshape(len(x), *shape) for x in stacked[: self.moving])
      return [list(arrays) for arrays in zip(*moved, strict=True)]
    # Gathers leaf by leaf need no stack of results.
    return [
      [_sorting.gather(x, source).reshape(shape) for x in arrays]
      for source, arrays in zip(sources, zip(*columns[: self.moving], strict=True), strict=True)
    ]

  def _columns(self, x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[: self.axes]), math.prod(x.shape[self.axes :]))

  def _sharded(
    self, stacks: list[tuple[jax.Array, ...]], mesh: jax.sharding.AbstractMesh
  ) -> list[list[jax.Array]]:
    """The same where all cross devices in one exchange, or not at all."""
    axes, shape, count = self.axes, stacks[0][0].shape, len(stacks[0])
    hint = _hint(stacks[0][0], axes, mesh.size)
    stacked = _exchanged(stacks, axes, mesh, hint)
    vectors = [x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:]) for x in stacked]
    source = self.kernel(*vectors)
    moved = [_sorting.gather(x, source) for x in vectors[: self.moving]]
    parts = [jnp.moveaxis(x.reshape(*shape[:axes], count, *shape[axes:]), axes, 0) for x in moved]
    back = _exchanged([tuple(part) for part in parts], axes, mesh)
    return [list(arrays) for arrays in zip(*(jnp.moveaxis(x, axes, 0) for x in back), strict=True)]


def _on_cpu(x: jax.Array) -> bool:
  """Whether a CPU will run the program, or where an array lies on no known mesh, most likely."""
  device = getattr(jax.typeof(x).sharding.mesh, "abstract_device", None)
  return (getattr(device, "platform", None) or jax.default_backend()) == "cpu"


def in_blocks(kernel: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
  """Applies a kernel on (n, vectors) to arrays (leaves, n or 1, vectors), each vector by itself."""
  leaves, n, vectors = arrays[0].shape
  # A kernel takes scratch memory of ten to twenty times its weights, and nothing is gained by more
  # vectors at once than keep a device busy: on a CPU, those that fit into its cache.
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


def _mesh_of(arrays: list[jax.Array]) -> jax.sharding.AbstractMesh | None:
  """The mesh of several devices that arrays lie on, where its shardings are the compiler's."""
  meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.core.Tracer)]
  return next((m for m in meshes if m.size > 1 and _arrays.is_auto(m)), None)


def _exchanged(
  stacks: list[tuple[jax.Array, ...]],
  axes: int,
  mesh: jax.sharding.AbstractMesh,
  hint: jax.Array | None = None,
) -> list[jax.Array]:
  """Stacks arrays on an axis after the fan-in ones, which are whole on each device."""
  found: list[Any] = [None] * len(stacks)
  kinds = [(stack[0].shape, stack[0].dtype.itemsize) for stack in stacks]
  spec = jax.sharding.PartitionSpec(
    *[None] * axes, *[jax.sharding.PartitionSpec.UNCONSTRAINED] * (stacks[0][0].ndim + 1 - axes)
  )
  for kind in dict.fromkeys(kinds):
    same = [k for k, other in enumerate(kinds) if other == kind]
    packed = jnp.stack([_cast(x, f"uint{8 * kind[1]}") for k in same for x in stacks[k]], axes)
    packed = jax.lax.with_sharding_constraint(packed, jax.sharding.NamedSharding(mesh, spec))
    if hint is not None:
      packed = jnp.where(hint, 0, packed)
    for k, part in zip(same, jnp.split(packed, len(same), axes), strict=True):
      found[k] = _cast(part, stacks[k][0].dtype)
  return found


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, dtype)


def _hint(floats: jax.Array, axes: int, devices: int) -> jax.Array | None:
  """False for each of the first outputs, in an array that is sharded as the longest fan-in axis.

  Shardings are not known under ``jit``. So the compiler carries this one, from the fan-in axis to
  an array with an entry for each of its shards, and from that to the outputs.
  """
  fan_in = int(np.argmax(floats.shape[:axes]))
  length, outputs = floats.shape[fan_in], math.prod(floats.shape[axes : axes + 1])
  shards = math.gcd(length, outputs, devices)
  if shards == 1:
    return None
  split = floats.reshape(*floats.shape[:fan_in], shards, -1, *floats.shape[fan_in + 1 :])
  # Nothing is above infinity, NaN neither, which the compiler does not know.
  never = jnp.any(split > jnp.inf, axis=[axis for axis in range(split.ndim) if axis != fan_in])
  spread = jnp.broadcast_to(never[:, None], (shards, outputs // shards))
  return spread.reshape(-1, *[1] * (floats.ndim - axes - 1))


def auto_sharded(function: Callable[..., Any], like: Any) -> Callable[..., Any]:
  """Leaves the shardings inside a function without closures over arrays to the compiler.

  Meshes with explicit axes ask how each result of a sort or gather is sharded. Results are sharded
  as the arrays of `like`, a tree like the results; None: not sharded.
  """

  def call(*args: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and (mesh_of_arrays := _explicit_mesh((like, args))) is not None:
      with jax.sharding.use_abstract_mesh(mesh_of_arrays):
        return call(*args)
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return function(*args)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = jax.tree.map(
      lambda x: replicated if x is None else jax.typeof(x).sharding,
      like,
      is_leaf=lambda x: x is None,
    )
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*args)

  return call


def _explicit_mesh(arrays: Any) -> jax.sharding.AbstractMesh | None:
  """The mesh with explicit axes that arrays lie on, also outside of ``jax.set_mesh``."""
  # JAX before 0.8 has no way to enter it.
  if not hasattr(jax.sharding, "use_abstract_mesh"):
    return None
  meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
  explicit = jax.sharding.AxisType.Explicit
  return next((m for m in meshes if not m.empty and explicit in m.axis_types), None)


def sharded_like(old: jax.Array, new: jax.Array, floats: jax.Array) -> jax.Array:
  """Returns `new`, with a hint to shard it like `old`; `floats` is any array of their shape.

  The result of a sort or a gather has no sharding of its own. Under ``jit`` that of `old` is not
  known, but a choice between the two passes it on.
  """
  # Nothing is above infinity, NaN neither, which the compiler does not know.
  return jnp.where(floats > jnp.inf, old, new)
