r"""AdaSum: sums orthogonal gradients of replicas, averages their common part.

For two gradients a, b of one leaf:

  adasum(a, b) = a (1 - <a, b> / (2 |a|^2)) + b (1 - <a, b> / (2 |b|^2))

and for N of them a binary tree, neighbours first: (0, 1), (2, 3), ..., then the results of those.
A node without a partner passes up a level, so N need not be a power of two.

Every node of the tree is a linear combination of the N gradients, and every inner product in it
follows from their Gram matrix. So the tree is never walked with vectors:

  a  (N,)     powers of two, a[r] bounds the entries of the r-th gradient, g_r = a[r] y_r
  G  (N, N)   Gram matrix of a group of leaves, <y_r, y_s> in two float32 words (one float64)
  C  (K, N)   the K nodes of a level as combinations of y_1 ... y_N; C = I at the leaves
  H  (K, K)   Gram matrix of the nodes, H = C G C'
  m  (K,)     powers of two; node k is m[k] C[k] y
  x  (D, M)   all leaves of a device as one vector, cut into D chunks of M entries, one per device

A pair of nodes A, B becomes one node with m = max(m_A, m_B) and

  C = (m_A / m - m_B / m <A, B> / (2 |A|^2)) C_A + (m_B / m - m_A / m <A, B> / (2 |B|^2)) C_B

Where nodes cancel, |A|^2 is a small difference of entries of G: in single float32 words the error
would grow with the square of the cancellation.

Between devices: chunks change owners (all-to-all, the powers of two travel along), each device adds
the part of G that its chunk holds to the others' (all-reduce of 2 N x N numbers per group),
combines its chunk, and the chunks are gathered. That moves the bytes of an all-reduce, in three
collectives for any N and any number of leaves; and since each entry is computed on one device only,
all replicas get the same bits.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.
"""

from collections.abc import Sequence
import functools
import inspect
import itertools
import math
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree

AxisName: TypeAlias = str | tuple[str, ...]

# Chunks are worked through in blocks of columns: N rows of a block stay in the cache between
# their inner products, and one loop serves all leaves, so nothing compiles longer for more of
# them. Longer chunks get longer blocks, because a turn of the loop costs an accelerator as much
# as a kernel's launch.
_SHORTEST_BLOCK = 2048
_MOST_BLOCKS = 256
# Inner products are exact over this many columns: entries are cut into a head of 8 bits and a tail,
# and 256 products of two heads fit the 24 bits of a float32.
_EXACT_COLUMNS = 256
_HEAD_BITS = 7
# Their sums are exact over 2**12 blocks of columns, cut in the same way.
_SUM_BITS = 11
_SMALLEST_PEAK = 2.0**-100
# Gradients are scaled by powers of 2**12, up to 2**108 and down to 2**-108.
_SCALE_STEP = 12
_LARGEST_STEP = 9
# Beyond 2**84 and 2**-84 terms of a sum may overflow or underflow; this factor prevents it.
_EXTREME_STEP = 7
_SMALL = 2.0**-36
# A node counts as zero where it cancels to less than this part of its summands: below it, norms are
# those of rounding errors.
_CANCELLED = 2.0**-14


@_protocol.declares(metrics=("orthogonality", "adasum/notfinite_count"))
class AdasumState(NamedTuple):
  """State of :func:`adasum`.

  Attributes:
    orthogonality: scalar float32, the last step's squared norm of the result over the summed
      squared norms of the replicas' gradients, over all leaves: 1 where the replicas' gradients
      were orthogonal and were summed, 1/N where they were alike and were averaged.
    notfinite_count: scalar int32, the steps in which a leaf was not finite on some replica.
  """

  orthogonality: jax.Array
  notfinite_count: jax.Array


def adasum_pair(a: jax.Array, b: jax.Array) -> jax.Array:
  r"""The adaptive sum of two gradients of one leaf.

  .. math::
    a \left(1 - \frac{\langle a, b \rangle}{2 |a|^2}\right) +
    b \left(1 - \frac{\langle a, b \rangle}{2 |b|^2}\right)

  Orthogonal gradients are summed, identical ones averaged, and zero is neutral.

  Args:
    a: an array of any shape and floating dtype.
    b: another of the same shape.

  Returns:
    An array of that shape, in the dtype to which the two promote; see :func:`adasum` for its
    range and error.

  Raises:
    ValueError: the shapes differ.
    TypeError: an array is not of real floating-point numbers.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> optax_boost.adasum_pair(jnp.array([1.0, 0.0]), jnp.array([0.0, 2.0])).tolist()
    [1.0, 2.0]
    >>> optax_boost.adasum_pair(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])).tolist()
    [1.0, 2.0]
  """
  _tree.check_floating({"a": a, "b": b}, "adasum_pair")
  if jnp.shape(a) != jnp.shape(b):
    raise ValueError(
      f"`adasum_pair` needs two arrays of one shape; got {jnp.shape(a)} and {jnp.shape(b)}."
    )
  dtype = jnp.result_type(a, b)
  return adasum_reduce(jnp.stack([jnp.asarray(a, dtype), jnp.asarray(b, dtype)]))


def adasum_reduce(stacked: Any, *, groups: str | Sequence[str] | None = None) -> Any:
  r"""The adaptive sum of N gradients that lie stacked on one device.

  The mathematics of :func:`adasum` without communication, for replicas simulated on one device.

  Args:
    stacked: a tree whose leaves have the N gradients along their first axis.
    groups: which leaves share their coefficients, as in :func:`adasum`.

  Returns:
    The tree without the first axis, in the leaves' dtypes.

  Raises:
    ValueError: leaves have no first axis, or first axes of different length.
    TypeError: a leaf is not of real floating-point numbers, or `groups` is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> grads = {"w": jnp.array([[1.0, 0.0], [0.0, 1.0], [3.0, 3.0]])}  # three replicas
    >>> optax_boost.adasum_reduce(grads)["w"].tolist()
    [2.0, 2.0]
  """
  method = "adasum_reduce"
  patterns = _check_groups(groups)
  _tree.check_floating(stacked, method)
  leaves, structure = jax.tree.flatten(stacked)
  paths = _tree.leaf_paths(stacked)
  if not leaves:
    return stacked
  for path, leaf in zip(paths, leaves, strict=True):
    if jnp.ndim(leaf) == 0 or leaf.shape[0] != jnp.shape(leaves[0])[0] or leaf.shape[0] == 0:
      raise ValueError(
        f"`{method}` needs leaves with the replicas along their first axis, as many in each;"
        f" got shape {jnp.shape(leaf)} for the leaf '{_tree.leaf_name(path)}' and"
        f" {jnp.shape(leaves[0])} for '{paths[0] or 'params'}'."
      )
  reduced = _reduce_stacked(leaves, _group_numbers(paths, patterns))
  return jax.tree.unflatten(structure, reduced)


@functools.partial(jax.jit, static_argnums=1)
def _reduce_stacked(leaves: list[jax.Array], groups: tuple[int, ...]) -> list[jax.Array]:
  """:func:`adasum_reduce` on leaves and the numbers of their groups."""
  replicas = leaves[0].shape[0]
  layouts = _layouts([jax.eval_shape(lambda x: x[0], leaf) for leaf in leaves], groups, chunks=1)
  largest = [_largest(leaf, axes=tuple(range(1, leaf.ndim))) for leaf in leaves]
  steps = _scale_steps(jnp.stack(largest, axis=1), groups)
  chunks = []
  for layout in layouts:
    rows = [leaves[i].reshape(replicas, -1 if leaves[i].size else 0) for i in layout.leaves]
    padding = jnp.zeros((replicas, layout.chunk - sum(row.shape[1] for row in rows)), layout.dtype)
    joined = jnp.concatenate([*rows, padding], axis=1)
    chunks.append(_Chunk(layout, list(joined), jnp.asarray(layout.blocks[0])))
  vectors, _ = _reduce_chunks(chunks, steps)
  return _unpack(layouts, vectors)


def adasum(
  axis_name: AxisName,
  *,
  local_axis_name: AxisName | None = None,
  groups: str | Sequence[str] | None = None,
  shard_axis_name: AxisName | None = None,
  stacked_axes: _base.AxesByPattern | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces the mean over replicas by an adaptive sum.

  .. math::
    \mathrm{adasum}(a, b) = a \left(1 - \frac{\langle a, b \rangle}{2 |a|^2}\right) +
    b \left(1 - \frac{\langle a, b \rangle}{2 |b|^2}\right)

  over a binary tree of the N replicas, neighbours first: where their gradients agree it averages,
  where they are orthogonal it sums. So the step grows as gradients decorrelate, and a learning rate
  tuned for one replica stays usable with many. All replicas get the same bits.

  It runs inside ``jax.shard_map`` (or ``vmap`` with an axis name) in place of ``jax.lax.pmean``.
  First in a chain it acts on gradients; last, after an inner optimizer, on updates, as in Horovod.
  The inner state then differs from replica to replica and must be kept so, as in
  ``examples/adasum_processes.py``, which runs it over several processes or machines.

  N need not be a power of two; N = 1 is the identity. The order of the replicas matters, beyond the
  two of a pair. Each dtype costs an all-to-all and an all-gather, about the bytes of an all-reduce,
  and each group 2 N x N numbers in one all-reduce. Inner products cost 2 N multiplications per
  entry and device; above some 64 replicas, use `local_axis_name`.

  A group that is not finite on one replica becomes NaN as a whole on all of them; other leaves are
  untouched, and no state but `notfinite_count` remembers it.

  Gradients of float32 and bfloat16 may have any magnitude: each replica's group is scaled by a
  power of two. Denormal numbers, below 1.2e-38, are zero on backends that flush them, as XLA does
  on CPUs; so is a replica's group more than 36 orders of magnitude below another's. Results beyond
  the dtype's range are infinite. The mean over `local_axis_name` is summed in the gradients' dtype,
  float16 included; float64 is good from 1e-180 to 1e180.

  Args:
    axis_name: the mesh axis, or axes, along which the replicas lie.
    local_axis_name: further axes along which gradients are averaged first, as over the devices of
      one node; the adaptive sum then runs over nodes. None: no such axis.
    groups: which leaves share their coefficients. None: each leaf is a group, as in Horovod.
      Regular expressions, searched in the leaves' paths, make a group each (the first that matches
      counts; other leaves stay on their own); ``".*"`` makes the whole model one vector.
    shard_axis_name: axes along which the leaves are sharded (tensor parallelism): inner products
      are summed over them. Replicated leaves count as often as they occur, which matters only in a
      group with sharded ones. None: every device has whole leaves.
    stacked_axes: for leaves that hold many layers, the stacked axes by regular expression, as
      :func:`stacked_axes` returns them. Each layer has coefficients of its own, but where `groups`
      names its leaf. None: such a leaf counts as one layer.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that does not need `params`. Updates have
    the gradients' dtype, inner products are taken in two float32 words (float64 for float64).

  Raises:
    TypeError: an argument is of the wrong kind; a leaf is not of real floating-point numbers.
    ValueError: an axis occurs twice; in ``update``: an axis is not bound, the gradients were
      summed already, or their tree does not fit the params.

  Examples:
    On gradients. The params go in replicated; ``pcast`` makes them vary, or ``shard_map`` would
    sum their gradients itself:

    >>> import functools, jax, jax.numpy as jnp, optax, optax_boost
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("replicas",))
    >>> tx = optax.chain(optax_boost.adasum("replicas"), optax.sgd(0.1))
    >>> def loss_fn(params, x):
    ...   return jnp.mean((x @ params["w"] - 1.0) ** 2)
    >>> @jax.jit
    ... @functools.partial(
    ...   jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("replicas")), out_specs=P()
    ... )
    ... def step(params, state, x):
    ...   own = jax.lax.pcast(params, "replicas", to="varying")
    ...   updates, state = tx.update(jax.grad(loss_fn)(own, x), state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> params = {"w": jnp.zeros(3)}
    >>> x = jnp.ones((2 * jax.device_count(), 3))
    >>> x = jax.device_put(x, jax.NamedSharding(mesh, P("replicas")))
    >>> params, state = step(params, tx.init(params), x)
    >>> [round(float(w), 6) for w in params["w"]]
    [0.2, 0.2, 0.2]

  References:
    Maleki et al., `Scaling Distributed Training with Adaptive Summation
    <https://arxiv.org/abs/2006.02924>`_, 2020.

  .. note::
    Horovod takes powers of two only and rounds each level to the gradients' dtype; this is rounded
    once. The relative error in float32 is a few times 1e-7 times the factor by which gradients
    cancel. A node that cancels to less than 1 part in 16,384 of its summands counts as zero: its
    direction is a rounding error. No sure gain over the mean; see the method's card.
  """
  method = "adasum"
  arguments = {
    "axis_name": axis_name,
    "local_axis_name": local_axis_name,
    "shard_axis_name": shard_axis_name,
  }
  axes, local_axes, shard_axes = itertools.starmap(_axes, arguments.items())
  if not axes:
    raise TypeError(
      f"`axis_name` must be the name of a mesh axis or a tuple of names; got {axis_name!r}."
    )
  every_axis = axes + local_axes + shard_axes
  if len(set(every_axis)) < len(every_axis):
    raise ValueError(
      f"`{method}` needs an axis of its own for each purpose; got axis_name={axis_name!r},"
      f" local_axis_name={local_axis_name!r}, shard_axis_name={shard_axis_name!r}."
    )
  patterns = _check_groups(groups)
  _tree.check_axes_by_pattern("stacked_axes", stacked_axes)

  def init_fn(params: optax.Params) -> AdasumState:
    _tree.check_floating(params, method)
    _group_numbers(_tree.leaf_paths(params), patterns)
    return AdasumState(jnp.ones([], jnp.float32), jnp.zeros([], jnp.int32))

  def update_fn(
    updates: optax.Updates,
    state: AdasumState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AdasumState]:
    del extra_args
    _tree.check_update(method, updates, state, AdasumState, params)
    for argument, names in arguments.items():
      _base.require_axis(argument, names, method, optional=argument != "axis_name")
    paths, layers, join = _tree.split_layers(updates, stacked_axes)
    if not layers:
      return updates, state
    check_not_summed(layers, axes + local_axes)

    numbers = _group_numbers(paths, patterns)
    if stacked_axes is None and not patterns:
      _protocol.announce_layers(method, paths)
    outputs, orthogonality, notfinite = _reduce_over_devices(
      layers, numbers, axes, local_axes, shard_axes
    )
    return join(outputs), AdasumState(
      orthogonality=orthogonality,
      notfinite_count=_tree.increment_if(notfinite, state.notfinite_count),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


# Compiled as a whole also where `update` is called eagerly.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _reduce_over_devices(
  leaves: list[jax.Array],
  groups: tuple[int, ...],
  axes: tuple[str, ...],
  local_axes: tuple[str, ...],
  shard_axes: tuple[str, ...],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """The sums of all devices' leaves, the orthogonality, and whether a leaf was not finite."""
  replicas, nearby = jax.lax.axis_size(axes), jax.lax.axis_size(local_axes)
  layouts = _layouts(leaves, groups, chunks=replicas * nearby)
  largest = jnp.stack([_largest(leaf) for leaf in leaves])
  if shard_axes:
    largest = jax.lax.pmax(largest, shard_axes)
  owner = jax.lax.axis_index(local_axes + axes)
  # The scales travel behind the entries as their powers of two, in a dtype that holds them.
  carrier = next((layout for layout in layouts if _is_wide(layout.dtype)), None)
  bounds = _power(_scale_steps(largest, groups), jnp.float32)
  # Under `vmap`, gradients that are the same everywhere are not mapped, but must be exchanged.
  bounds = jnp.where(owner < 0, 0, bounds)

  chunks, steps = [], jnp.zeros((replicas, bounds.size), int)
  for layout in layouts:
    tail = bounds if layout is carrier else bounds[:0]
    x = _pack(leaves, layout, replicas * nearby, tail.astype(layout.dtype))
    if nearby > 1:
      x = _mean_nearby(x.reshape(nearby, replicas, x.shape[1]), local_axes, nearby)
    if replicas > 1:
      x = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
    if layout is carrier:
      steps = _steps_of_bounds(x[:, layout.chunk :])
    chunks.append(_Chunk(layout, list(x), jnp.asarray(layout.blocks)[owner]))
  vectors, weights = _reduce_chunks(chunks, steps, axes + local_axes + shard_axes)
  outputs = _unpack(layouts, [_gather(vector, local_axes + axes) for vector in vectors])
  return outputs, weights.orthogonality.astype(jnp.float32), weights.notfinite


class _Layout(NamedTuple):
  """How the leaves of one dtype lie behind each other in one vector, and who owns what of it."""

  leaves: tuple[int, ...]  # positions among all leaves
  shapes: tuple[tuple[int, ...], ...]
  starts: tuple[int, ...]
  dtype: Any
  chunk: int  # M, the entries that one device owns
  block: int  # B, the columns that are worked on at once
  # (D, T, 4) int32, the blocks of each chunk: where the block starts in the chunk, which of its
  # columns count (from, to), and the group of their leaf.
  blocks: np.ndarray


class _Chunk(NamedTuple):
  """The chunk that a device owns of a layout's vector."""

  layout: _Layout
  # N vectors of M entries (and more behind them), one per replica; apart, since they arrive apart
  # and joining them would be a pass over memory.
  rows: list[jax.Array]
  blocks: jax.Array  # (T, 4), this chunk's part of `layout.blocks`


class _Weights(NamedTuple):
  """The coefficients that follow from the Gram matrices."""

  coefficients: jax.Array  # (G, N), of the scaled gradients y
  steps: jax.Array  # (G,), the result is 2**(12 steps) times the combination of them
  orthogonality: jax.Array  # as in AdasumState
  notfinite: jax.Array  # scalar bool, whether a Gram matrix has entries that are not finite


def _layouts(leaves: Sequence[Any], groups: Sequence[int], chunks: int) -> list[_Layout]:
  """Lays out the leaves of each dtype, each vector cut into D = `chunks` chunks."""
  by_dtype: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    by_dtype.setdefault(jnp.result_type(leaf), []).append(i)
  layouts = []
  for dtype, members in by_dtype.items():
    shapes = tuple(jnp.shape(leaves[i]) for i in members)
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    starts = (0, *ends[:-1])
    chunk = max(1, -(-ends[-1] // chunks))
    block = min(chunk, max(_SHORTEST_BLOCK, -(-chunk // _MOST_BLOCKS)))
    spans = list(zip(starts, ends, (groups[i] for i in members), strict=True))
    lists = [_blocks(spans, d * chunk, chunk, block) for d in range(chunks)]
    table = np.zeros((chunks, max(1, *map(len, lists)), 4), np.int32)
    for row, entries in zip(table, lists, strict=True):
      row[: len(entries)] = np.reshape(entries, (-1, 4))
    layouts.append(_Layout(tuple(members), shapes, starts, dtype, chunk, block, table))
  return layouts


def _blocks(
  spans: Sequence[tuple[int, int, int]], origin: int, chunk: int, block: int
) -> list[tuple[int, int, int, int]]:
  """The blocks of the chunk that begins at `origin`, as :class:`_Layout` lists them."""
  blocks = []
  for leaf_start, leaf_end, group in spans:
    low, high = max(leaf_start - origin, 0), min(leaf_end - origin, chunk)
    for first in range(low, high, block):
      # The last block starts early enough to lie in the chunk.
      start = min(first, chunk - block)
      blocks.append((start, first - start, min(first + block, high) - start, group))
  return blocks


def _pack(leaves: Sequence[jax.Array], layout: _Layout, chunks: int, tail: jax.Array) -> jax.Array:
  """The leaves of a layout as ``(D, M)``, padded with zeros, each row with `tail` behind it."""
  flat = [jnp.ravel(leaves[i]) for i in layout.leaves]
  rows = []
  # Row by row: on CPUs a concatenation of all leaves would be copied once more to be cut.
  for origin in range(0, chunks * layout.chunk, layout.chunk):
    cuts = [slice(max(origin - s, 0), max(origin + layout.chunk - s, 0)) for s in layout.starts]
    parts = [leaf[cut] for leaf, cut in zip(flat, cuts, strict=True)]
    padding = jnp.zeros(layout.chunk - sum(part.size for part in parts), layout.dtype)
    rows.append(jnp.concatenate([*parts, padding, tail]))
  return jnp.stack(rows)


def _unpack(layouts: Sequence[_Layout], vectors: Sequence[jax.Array]) -> list[jax.Array]:
  """Cuts joined vectors into leaves again, in the order of all leaves."""
  leaves = {}
  for layout, vector in zip(layouts, vectors, strict=True):
    for i, shape, start in zip(layout.leaves, layout.shapes, layout.starts, strict=True):
      leaves[i] = vector[start : start + math.prod(shape)].reshape(shape)
  return [leaves[i] for i in range(len(leaves))]


def _mean_nearby(x: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
  """Scatters ``x`` along its first axis over `axes` and averages it there."""
  # Divided first, or large gradients overflow; by a power of two, which rounds nothing. In float16
  # that would cost small gradients their last bits.
  power = 2 ** (size - 1).bit_length() if _is_wide(x.dtype) else 1
  summed = jax.lax.psum_scatter(x / power, axes, scatter_dimension=0)
  return summed if size == power else summed * (power / size)


def _is_wide(dtype: Any) -> bool:
  """Whether a dtype has at least the exponents of float32."""
  return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp)


def _largest(leaf: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
  """The largest magnitude in a leaf, in float32."""
  return jnp.max(jnp.abs(leaf), axis=axes, initial=0).astype(jnp.float32)


def _scale_steps(largest: jax.Array, groups: Sequence[int]) -> jax.Array:
  """For each group the largest s with 2**(12 s) at most its largest entry, within bounds."""
  members = np.arange(max(groups) + 1)[:, None] == np.array(groups)
  largest = jnp.max(jnp.where(members, largest[..., None, :], 0), axis=-1)
  steps = jnp.floor(jnp.log2(largest) / _SCALE_STEP)
  return jnp.clip(jnp.nan_to_num(steps), -_LARGEST_STEP, _LARGEST_STEP).astype(int)


def _steps_of_bounds(means: jax.Array) -> jax.Array:
  """Reads the steps again from bounds that were averaged over up to 2,000 devices."""
  # A mean of powers of 2**12 lies less than a step below the largest of them, so the order in which
  # they were added up, and its rounding, changes nothing.
  exponents = jnp.log2(means.astype(jnp.float32))
  return jnp.floor((exponents + (_SCALE_STEP - 0.5)) / _SCALE_STEP).astype(int)


def _power(steps: jax.Array, dtype: Any) -> jax.Array:
  """2**(12 steps), exactly; zero where `dtype` does not hold it."""
  exponents = np.arange(-2 * _LARGEST_STEP, _LARGEST_STEP + 1, dtype=np.float64)
  table = jnp.asarray((2.0 ** (_SCALE_STEP * exponents)).astype(dtype))
  return table[steps + 2 * _LARGEST_STEP]


def _reduce_chunks(
  chunks: Sequence[_Chunk], steps: jax.Array, axes: tuple[str, ...] = ()
) -> tuple[list[jax.Array], _Weights]:
  """The chunks ``(M,)`` of the result, for gradients with scales ``(N, G)``."""
  grams = [_gram(chunk, steps) for chunk in chunks]
  widest = jnp.result_type(*grams)
  gram = functools.reduce(_add, [gram.astype(widest) for gram in grams])
  if axes:
    gram, steps = _sum_over_devices(gram, steps, axes)
  weights = _weigh(gram, steps)
  return [_combine(chunk, steps, weights) for chunk in chunks], weights


def _cut_block(chunk: _Chunk, turn: jax.Array) -> tuple[jax.Array, ...]:
  """A block ``(N, B)`` of columns, where it starts, which of them count, and their group."""
  start, low, high, group = chunk.blocks[turn]
  width = chunk.layout.block
  parts = [jax.lax.dynamic_slice_in_dim(row, start, width) for row in chunk.rows]
  # Not fused: XLA's CPU code for stacking slices is slower than a copy.
  block = jnp.stack(jax.lax.optimization_barrier(parts))
  return block, start, (jnp.arange(width) >= low) & (jnp.arange(width) < high), group


def _gram(chunk: _Chunk, steps: jax.Array) -> jax.Array:
  """A chunk's part of the groups' Gram matrices, ``(2, G, N, N)``, two words per entry."""
  wide = _tree.accumulator_dtype(chunk.layout.dtype)
  scales = _power(-steps, wide)
  replicas, groups = steps.shape

  def add(turn: jax.Array, grams: jax.Array) -> jax.Array:
    x, _, counts, group = _cut_block(chunk, turn)
    # Selected, not multiplied: entries of another leaf may be NaN.
    x = jnp.where(counts, x.astype(wide) * scales[:, group, None], 0)
    return grams.at[:, group].set(_add(grams[:, group], _products(x)))

  # Under `shard_map` the loop must know from the start that they vary as the gradients do.
  zero = jnp.where(False, chunk.rows[0][0].astype(wide), 0)
  zeros = jnp.broadcast_to(zero, (2, groups, replicas, replicas))
  return jax.lax.fori_loop(0, len(chunk.blocks), add, zeros)


def _products(x: jax.Array) -> jax.Array:
  """The inner products ``(2, N, N)`` of N rows, in two words."""
  if x.dtype == jnp.float64:
    return _words(jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST))
  replicas, width = x.shape
  columns = min(width, _EXACT_COLUMNS)
  x = jnp.pad(x, [(0, 0), (0, -width % columns)]).reshape(replicas, -1, columns).swapaxes(0, 1)
  multiply = functools.partial(jnp.einsum, "trk,tsk->trs", precision=jax.lax.Precision.HIGHEST)
  # With heads h and tails x - h: x x' = h h' + (s + s') / 2, where s = (x - h) (x + h)'.
  heads = _cut(x, axis=2, bits=_HEAD_BITS)
  exact, rest = multiply(heads, heads), multiply(x - heads, x + heads)
  exact_heads = _cut(exact, axis=0, bits=_SUM_BITS)
  tails = jnp.sum((rest + jnp.swapaxes(rest, 1, 2)) / 2 + (exact - exact_heads), axis=0)
  return jnp.stack([jnp.sum(exact_heads, axis=0), tails])


def _cut(x: jax.Array, axis: int, bits: int) -> jax.Array:
  """Rounds `x` to multiples of one power of two along an axis, the largest to about `bits` bits."""
  peak = jax.lax.reduce_precision(jnp.max(jnp.abs(x), axis=axis, keepdims=True), 8, 0)
  unit = jnp.maximum(peak, _SMALLEST_PEAK) * 2.0**-bits
  return jnp.round(x * (1 / unit)) * unit


def _sum_over_devices(
  gram: jax.Array, steps: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
  """Adds up Gram matrices; the scales go along, since ``shard_map`` must know them to be alike."""
  # Half of the first word's bits, so that their sum needs no rounding.
  head = _head(gram[0])
  one_device = jnp.where(jax.lax.axis_index(axes) == 0, steps, 0).astype(gram.dtype)
  words = jnp.stack([head, gram[1] + (gram[0] - head)])
  summed = jax.lax.psum(jnp.concatenate([jnp.ravel(words), jnp.ravel(one_device)]), axes)
  words, one_device = summed[: words.size], summed[words.size :]
  return words.reshape(gram.shape), one_device.reshape(steps.shape).astype(int)


def _combine(chunk: _Chunk, steps: jax.Array, weights: _Weights) -> jax.Array:
  """The chunk ``(M,)`` of the result."""
  layout = chunk.layout
  wide = _tree.accumulator_dtype(layout.dtype)
  coefficients = weights.coefficients.astype(wide)
  # Gradients are brought to the largest scale, never down: no entry becomes a denormal number.
  lifts = weights.steps[:, None] - steps.T
  first_lifts = jnp.minimum(lifts, _LARGEST_STEP)
  first_factors, second_factors = (_power(x, wide) for x in (first_lifts, lifts - first_lifts))

  def add(x: jax.Array, group: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    lifted = x * (first_factors[group] * scale)[:, None] * second_factors[group][:, None]
    terms = coefficients[group][:, None] * lifted
    # In the order of the tree, so that equal gradients come back without rounding.
    while len(terms) > 1:
      paired = terms[0:-1:2] + terms[1::2]
      terms = jnp.concatenate([paired, terms[-1:]]) if len(terms) % 2 else paired
    return terms[0]

  def add_extremes(x: jax.Array, group: jax.Array) -> jax.Array:
    # A sum may be within range where its terms are not.
    large = weights.steps[group] > 0
    scale = jnp.where(large, _SMALL, 1 / _SMALL)
    direct, scaled = add(x, group), add(x, group, scale) / scale
    return jnp.where(large & jnp.isfinite(direct), direct, scaled)

  def mix(turn: jax.Array, result: jax.Array) -> jax.Array:
    x, start, counts, group = _cut_block(chunk, turn)
    extreme = jnp.abs(weights.steps[group]) >= _EXTREME_STEP
    mixed = jax.lax.cond(extreme, add_extremes, add, x.astype(wide), group).astype(layout.dtype)
    old = jax.lax.dynamic_slice_in_dim(result, start, layout.block)
    return jax.lax.dynamic_update_slice(result, jnp.where(counts, mixed, old), (start,))

  return jax.lax.fori_loop(0, len(chunk.blocks), mix, chunk.rows[0][: layout.chunk])


def _weigh(gram: jax.Array, steps: jax.Array) -> _Weights:
  """Runs the tree on Gram matrices ``(2, G, N, N)`` of gradients with scales ``(N, G)``.

  Coefficients are NaN for groups whose Gram matrix is not finite.
  """
  dtype, replicas = gram.dtype, gram.shape[-1]
  # A zero gradient is neutral: with one more, no node is without a partner.
  size = replicas + replicas % 2
  padding = [(0, 0), (0, size - replicas), (0, size - replicas)]
  products = _fast_two_sum(*(jnp.pad(word, padding) for word in gram))
  nodes = jnp.broadcast_to(_words(jnp.eye(size, dtype=dtype))[:, None], products.shape)
  scales = jnp.pad(steps.T, padding[:2], constant_values=-_LARGEST_STEP)
  top = jnp.max(scales)
  lengths = _diagonal(products)[0]
  norms = jnp.sqrt(lengths)
  before = jnp.sum(lengths * _power(scales - top, dtype) ** 2)

  # A loop over levels of one size, filled up with zeros: unrolled it would compile for seconds.
  def level(_: int, tree: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    rows, scales = tree  # of each node its products and, behind them, its coefficients
    summed = jnp.sum(jnp.abs(rows[0, :, :, size:]) * norms[:, None, :], axis=2)
    factors, largest = _pair_factors(rows[..., :size], _CANCELLED * summed, scales)
    rows = _add_pairs(rows, factors)
    products = _add_pairs(jnp.swapaxes(rows[..., :size], 2, 3), factors)
    unused = jnp.full_like(largest, -_LARGEST_STEP)
    rows = jnp.concatenate([products, rows[..., size:]], axis=3)
    return rows, jnp.concatenate([largest, unused], axis=1)

  tree = jnp.concatenate([products, nodes], axis=3), scales
  rows, scales = jax.lax.fori_loop(0, (replicas - 1).bit_length(), level, tree)
  root, scale = rows[:, :, 0], scales[:, 0]
  after = jnp.sum(root[0, :, 0] * _power(scale - top, dtype) ** 2)
  finite = jnp.all(jnp.isfinite(gram), axis=(0, 2, 3))
  return _Weights(
    coefficients=jnp.where(finite[:, None], root[0, :, size : size + replicas], jnp.nan),
    steps=scale,
    orthogonality=jnp.where(before == 0, 1, after / before),
    notfinite=~jnp.all(finite),
  )


def _pair_factors(
  products: jax.Array, least: jax.Array, steps: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The factors ``(2, G, K)`` of a level's nodes in their pairs' sums, and the pairs' scales.

  Of a pair with a member whose norm is at most its `least` both factors are m_A / m.
  """
  square, steps = (x.reshape(*x.shape[:-1], -1, 2) for x in (_diagonal(products), steps))
  product = _diagonal(products[..., 0::2, 1::2])[..., None]
  largest = jnp.max(steps, axis=-1, keepdims=True)
  own = _power(steps - largest, products.dtype)
  usable = jnp.all(square[0] > least.reshape(own.shape) ** 2, axis=-1, keepdims=True)
  ratio = _divide(jnp.where(usable, product * own[..., ::-1], 0), jnp.where(usable, 2 * square, 1))
  factors = _add(_words(own), -ratio)
  return factors.reshape(*factors.shape[:2], -1), largest[..., 0]


def _add_pairs(x: jax.Array, factors: jax.Array) -> jax.Array:
  """Multiplies ``(2, G, K, ...)`` by factors ``(2, G, K)``, adds up pairs, and appends zeros."""
  scaled = _multiply(factors[..., None], x)
  pairs = _add(scaled[:, :, 0::2], scaled[:, :, 1::2])
  return jnp.concatenate([pairs, jnp.zeros_like(pairs)], axis=2)


def _diagonal(x: jax.Array) -> jax.Array:
  return jnp.diagonal(x, axis1=-2, axis2=-1)


# Numbers in two words, ``(2, ...)``: the unevaluated sum of a float and a much smaller one (Dekker,
# 1971).


def _words(x: jax.Array) -> jax.Array:
  return jnp.stack([x, jnp.zeros_like(x)])


def _fast_two_sum(a: jax.Array, b: jax.Array) -> jax.Array:
  """The sum of two floats without an error, for |a| >= |b|."""
  total = a + b
  return jnp.stack([total, b - (total - a)])


def _head(x: jax.Array) -> jax.Array:
  """`x` rounded to half of its bits."""
  info = jnp.finfo(x.dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant // 2)


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
  total = x[0] + y[0]
  part = total - x[0]
  error = (x[0] - (total - part)) + (y[0] - part)
  return _fast_two_sum(total, error + (x[1] + y[1]))


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
  product = x[0] * y[0]
  x_head, y_head = _head(x[0]), _head(y[0])
  x_tail, y_tail = x[0] - x_head, y[0] - y_head
  error = ((x_head * y_head - product) + x_head * y_tail + x_tail * y_head) + x_tail * y_tail
  return _fast_two_sum(product, error + (x[0] * y[1] + x[1] * y[0]))


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
  quotient = x[0] / y[0]
  rest = _add(x, -_multiply(_words(quotient), y))
  return _fast_two_sum(quotient, (rest[0] + rest[1]) / y[0])


def _gather(chunk: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """All chunks behind each other, on all devices."""
  if not _base.varying_axes(jax.typeof(chunk)):
    return jax.lax.all_gather(chunk, axes, tiled=True)
  # `shard_map` tracks which arrays vary: it must be told that the result does not.
  if "to" in inspect.signature(jax.lax.all_gather).parameters:
    return jax.lax.all_gather(chunk, axes, tiled=True, to="invarying")
  # Below JAX 0.10 only a sum can say so. It moves twice the bytes.
  devices, owner = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
  alone = jnp.where(jnp.arange(devices)[:, None] == owner, chunk, 0)
  return jax.lax.psum(alone.ravel(), axes)


def _axes(argument: str, names: Any) -> tuple[str, ...]:
  _base.check_axis_name(argument, names)
  return () if names is None else (names,) if isinstance(names, str) else names


def check_not_summed(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> None:
  """Refuses gradients that ``shard_map`` has summed already: those of replicated params."""
  varying = frozenset[str]().union(*(_base.varying_axes(jax.typeof(leaf)) for leaf in leaves))
  for name in axes:
    # Where `shard_map` does not keep book of it, nothing varies.
    of_axis = _base.varying_axes(jax.typeof(jax.lax.axis_index(name)))
    if name in of_axis and name not in varying:
      raise ValueError(
        f"`adasum` needs gradients that differ along the axis '{name}'; these are the same"
        " everywhere. Inside `jax.shard_map`, gradients with respect to replicated params have"
        " been summed already: take them with respect to"
        f" `jax.lax.pcast(params, '{name}', to='varying')`, or `jax.lax.pvary(params, '{name}')`"
        " where JAX is too old to have that."
      )


def _check_groups(groups: Any) -> tuple[str, ...]:
  patterns = () if groups is None else (groups,) if isinstance(groups, str) else groups
  if not isinstance(patterns, list | tuple):
    raise TypeError(f"`groups` must be regular expressions or None; got {_base.shorten(groups)}.")
  for pattern in patterns:
    _base.compile_pattern("groups", pattern)
  return tuple(patterns)


def _group_numbers(paths: Sequence[str], patterns: Sequence[str]) -> tuple[int, ...]:
  """The group of each leaf, numbered ``0, 1, ...``."""
  matches = _tree.first_match("groups", patterns, paths, warn_shadowed=True)
  keys = [("leaf", i) if match is None else ("group", match) for i, match in enumerate(matches)]
  numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
  return tuple(numbers[key] for key in keys)
