r"""AdaSum: adds up what is orthogonal between replicas, averages what they have in common.

For two gradients a, b of one leaf:

  adasum(a, b) = a (1 - <a, b> / (2 |a|^2)) + b (1 - <a, b> / (2 |b|^2))

and for N of them a binary tree, neighbours first: (0, 1), (2, 3), ..., then the results of those.
A node without a partner passes up a level, so N need not be a power of two.

Every node of the tree is a linear combination of the N gradients, and every inner product in it
follows from their Gram matrix. So the tree is never walked with vectors:

  G  (N, N)   Gram matrix of a leaf, G[r, s] = <g_r, g_s>, in at least float32
  C  (K, N)   the K nodes of a level as combinations of the gradients; C = I at the leaves
  H  (K, K)   Gram matrix of the nodes, H = C G C'
  x  (D, M)   all leaves of a device as one vector, cut into D chunks of M entries, one per device

Between devices: chunks change owners (all-to-all), each device adds the part of G that its chunk
holds to the others' (all-reduce of N x N numbers per leaf), combines its chunk, and the chunks are
gathered. That moves the bytes of an all-reduce, in three collectives for any N and any number of
leaves; and since each entry is computed on one device only, all replicas get the same bits.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import inspect
import itertools
import math
import re
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _protocol
from optax_boost import _tree

AxisName: TypeAlias = str | tuple[str, ...]

# Chunks are worked through in blocks of columns: N rows of a block stay in the cache between
# their inner products, and one loop serves all leaves, so nothing compiles longer for more of
# them. Longer chunks get longer blocks, because a turn of the loop costs an accelerator as much
# as a kernel's launch.
_SHORTEST_BLOCK = 4096
_MOST_BLOCKS = 256
# A node whose squared norm is below this many roundings of what it was added up from is zero.
_ROUNDINGS = 4


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
    An array of that shape, in the dtype to which the two promote. Inner products are taken in at
    least float32.

  Raises:
    ValueError: the shapes differ.
    TypeError: an array is not of real floating-point numbers.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> optax_boost.adasum_pair(jnp.array([1.0, 0.0]), jnp.array([0.0, 2.0])).tolist()
    [1.0, 2.0]
    >>> optax_boost.adasum_pair(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])).tolist()
    [1.0, 2.0]

  References:
    Maleki et al., `Scaling Distributed Training with Adaptive Summation
    <https://arxiv.org/abs/2006.02924>`_, 2020.
  """
  if jnp.shape(a) != jnp.shape(b):
    raise ValueError(
      f"`adasum_pair` needs two arrays of one shape; got {jnp.shape(a)} and {jnp.shape(b)}."
    )
  _tree.check_floating((a, b), "adasum_pair")
  dtype = jnp.result_type(a, b)
  return adasum_reduce(jnp.stack([jnp.asarray(a, dtype), jnp.asarray(b, dtype)]))


def adasum_reduce(stacked: Any, *, groups: str | Sequence[str] | None = None) -> Any:
  r"""The adaptive sum of N gradients that lie stacked on one device.

  A binary tree of :func:`adasum_pair`, neighbours first; an odd one out passes up a level. The
  same mathematics as :func:`adasum`, without communication: for replicas that are simulated on
  one device (``vmap``), and to check against.

  Args:
    stacked: a tree whose leaves have the N gradients along their first axis.
    groups: which leaves share their coefficients. None: each leaf has its own, as in the
      reference. Regular expressions, searched in the leaves' paths, make one group each of the
      leaves that they match (the first that matches counts; the others stay on their own);
      ``".*"`` makes the whole model one vector.

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

  References:
    Maleki et al., `Scaling Distributed Training with Adaptive Summation
    <https://arxiv.org/abs/2006.02924>`_, 2020.

  .. note::
    Swapping the two members of a pair changes nothing beyond rounding; any other order of the
    gradients changes the tree, and with it the result.
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
        f" got shape {jnp.shape(leaf)} for the leaf '{path}' and {jnp.shape(leaves[0])} for"
        f" '{paths[0]}'."
      )
  found = _reduce(leaves, tuple(_group_of_leaf(paths, patterns).tolist()))
  return jax.tree.unflatten(structure, found)


@functools.partial(jax.jit, static_argnums=1)
def _reduce(leaves: list[jax.Array], groups: tuple[int, ...]) -> list[jax.Array]:
  """:func:`adasum_reduce` on leaves and the numbers of their groups."""
  replicas = leaves[0].shape[0]
  layouts = _layouts([jax.eval_shape(lambda x: x[0], leaf) for leaf in leaves], chunks=1)
  chunks = []
  for layout in layouts:
    rows = [leaves[i].reshape(replicas, math.prod(leaves[i].shape[1:])) for i in layout.leaves]
    padding = jnp.zeros((replicas, layout.chunk - sum(row.shape[1] for row in rows)), layout.dtype)
    joined = jnp.concatenate([*rows, padding], axis=1)
    chunks.append(_Chunk(layout, list(joined), jnp.asarray(layout.blocks[0])))
  weights = _weigh(_gram(chunks), np.array(groups))
  return _unpack([(chunk.layout, _combine(chunk, weights)) for chunk in chunks])


def adasum(
  axis_name: AxisName,
  *,
  local_axis_name: AxisName | None = None,
  groups: str | Sequence[str] | None = None,
  shard_axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces the mean over replicas by an adaptive sum.

  .. math::
    \mathrm{adasum}(a, b) = a \left(1 - \frac{\langle a, b \rangle}{2 |a|^2}\right) +
    b \left(1 - \frac{\langle a, b \rangle}{2 |b|^2}\right)

  over a binary tree of the N replicas, neighbours first: where their gradients agree it averages,
  where they are orthogonal it sums. So the step grows by itself as gradients decorrelate, and a
  learning rate tuned for one replica stays usable with many. All replicas get the same bits.

  It runs inside ``jax.shard_map`` (or ``vmap`` with an axis name) and takes the place of
  ``jax.lax.pmean``. First in a chain it acts on gradients. Last, after an inner optimizer, it
  acts on the optimizer's updates, as the reference does; the inner state then differs from
  replica to replica and must be kept so (see the second example).

  Any number of replicas will do; a node without a partner passes up a level. With an axis of
  size 1 it is the identity. The leaves of one dtype travel together: an all-to-all and an
  all-gather per dtype and one all-reduce of N x N numbers per leaf, about the bytes of an
  all-reduce. Inner products cost N multiplications per entry and device; above some 64 replicas,
  use `local_axis_name`.

  A leaf that is not finite on one replica, or whose squared norm overflows float32, becomes NaN
  as a whole on all of them, so that any check behind it sees it; other leaves are untouched,
  nothing is kept but `notfinite_count`, and the next step is good.

  Args:
    axis_name: the mesh axis, or axes, along which the replicas lie.
    local_axis_name: a further axis, or axes, along which gradients are averaged first, as over
      the devices of one node; the adaptive sum then runs over nodes. None: no such axis.
    groups: which leaves share their coefficients. None: each leaf has its own, as in the
      reference. Regular expressions, searched in the leaves' paths, make one group each of the
      leaves that they match (the first that matches counts; the others stay on their own);
      ``".*"`` makes the whole model one vector.
    shard_axis_name: axes along which the leaves themselves are sharded (tensor parallelism):
      inner products are summed over them. A replicated leaf counts as often as it occurs, which
      matters only in a group with sharded ones. None: every device has whole leaves.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that does not need `params`. Updates have
    the gradients' dtype, inner products are taken in float32 (float64 for float64).

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

    On the updates of an inner optimizer. Its state has the replicas along a first axis, which is
    sharded, so each device keeps its own momentum:

    >>> inner, tx = optax.adam(0.1), optax_boost.adasum("replicas")
    >>> params = {"w": jnp.zeros(3)}
    >>> own = jax.vmap(inner.init, in_axes=None, out_axes=0, axis_size=jax.device_count())(params)
    >>> own = jax.device_put(own, jax.NamedSharding(mesh, P("replicas")))
    >>> @jax.jit
    ... @functools.partial(
    ...   jax.shard_map,
    ...   mesh=mesh,
    ...   in_specs=(P(), P("replicas"), P(), P("replicas")),
    ...   out_specs=(P(), P("replicas"), P()),
    ... )
    ... def step(params, own, state, x):
    ...   mine = jax.lax.pcast(params, "replicas", to="varying")
    ...   own = jax.tree.map(lambda s: s[0], own)
    ...   updates, own = inner.update(jax.grad(loss_fn)(mine, x), own, mine)
    ...   updates, state = tx.update(updates, state, params)
    ...   own = jax.tree.map(lambda s: s[None], own)
    ...   return optax.apply_updates(params, updates), own, state
    >>> params, own, state = step(params, own, tx.init(params), x)
    >>> own[0].mu["w"].shape == (jax.device_count(), 3)
    True

  References:
    Maleki et al., `Scaling Distributed Training with Adaptive Summation
    <https://arxiv.org/abs/2006.02924>`_, 2020.

  .. note::
    Swapping the two members of a pair changes nothing beyond rounding; any other order of the
    replicas changes the tree, and with it the result. Horovod takes powers of two only and rounds
    each level to the gradients' dtype; here the result is rounded once. A node that cancels to
    less than a thousandth of what it was added up from counts as zero: its direction would be
    that of rounding errors.

  .. note::
    No sure gain: on scikit-learn's digits at eight times the batch, gradients reduced by it reached
    a lower training loss than their mean at an unchanged learning rate, but no better test
    accuracy, and on the updates of momentum SGD it did worse than the mean
    (``benchmarks/results/adasum_digits.md``). ``examples/adasum_processes.py`` runs it over several
    processes or machines, with checkpoints.
  """
  method = "adasum"
  axes = _axes("axis_name", axis_name)
  local_axes = () if local_axis_name is None else _axes("local_axis_name", local_axis_name)
  shard_axes = () if shard_axis_name is None else _axes("shard_axis_name", shard_axis_name)
  every_axis = axes + local_axes + shard_axes
  if len(set(every_axis)) < len(every_axis):
    raise ValueError(
      f"`{method}` needs an axis of its own for each purpose; got axis_name={axis_name!r},"
      f" local_axis_name={local_axis_name!r}, shard_axis_name={shard_axis_name!r}."
    )
  patterns = _check_groups(groups)

  def init_fn(params: optax.Params) -> AdasumState:
    _tree.check_floating(params, method)
    _group_of_leaf(_tree.leaf_paths(params), patterns)
    return AdasumState(jnp.ones([], jnp.float32), jnp.zeros([], jnp.int32))

  def update_fn(
    updates: optax.Updates,
    state: AdasumState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AdasumState]:
    del extra_args
    if params is not None:
      _tree.check_same_tree(updates, params, method)
    _tree.check_floating(updates, method)
    replicas, nearby = (math.prod(map(_axis_size, names)) for names in (axes, local_axes))
    for name in shard_axes:
      _axis_size(name)
    leaves, structure = jax.tree.flatten(updates)
    if not leaves:
      return updates, state
    _check_not_summed(leaves, axes + local_axes)

    layouts = _layouts(leaves, chunks=replicas * nearby)
    chunks = []
    for layout in layouts:
      x = _pack(leaves, layout, replicas * nearby)
      if nearby > 1:
        x = x.reshape(nearby, replicas, layout.chunk)
        x = jax.lax.psum_scatter(x, local_axes, scatter_dimension=0) / nearby
      if replicas > 1:
        x = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
      owner = jax.lax.axis_index(local_axes + axes)
      chunks.append(_Chunk(layout, list(x), jnp.asarray(layout.blocks)[owner]))
    gram = jax.lax.psum(_gram(chunks), every_axis)
    weights = _weigh(gram, _group_of_leaf(_tree.leaf_paths(updates), patterns))
    outputs = _unpack(
      [(c.layout, _gather(_combine(c, weights), local_axes + axes)) for c in chunks]
    )
    return jax.tree.unflatten(structure, outputs), AdasumState(
      orthogonality=weights.orthogonality.astype(jnp.float32),
      notfinite_count=state.notfinite_count + weights.notfinite.astype(jnp.int32),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Layout(NamedTuple):
  """How the leaves of one dtype lie behind each other in one vector, and who owns what of it.

  Attributes:
    leaves: their positions among all leaves.
    shapes: their shapes.
    starts: where each begins.
    dtype: theirs.
    chunk: M, the entries that one device owns.
    block: B, the columns that are worked on at once.
    blocks: ``(D, T, 4)`` int32, for each chunk its blocks: where the block starts in the chunk,
      which of its columns count (from, to), and to which leaf they belong.
  """

  leaves: tuple[int, ...]
  shapes: tuple[tuple[int, ...], ...]
  starts: tuple[int, ...]
  dtype: Any
  chunk: int
  block: int
  blocks: np.ndarray


class _Chunk(NamedTuple):
  """The chunk that a device owns.

  Attributes:
    layout: of the vector that it is cut from.
    rows: N vectors of M entries, one per replica; apart, since they arrive apart and joining
      them would be a pass over memory.
    blocks: ``(T, 4)``, this chunk's part of ``layout.blocks``.
  """

  layout: _Layout
  rows: list[jax.Array]
  blocks: jax.Array


class _Weights(NamedTuple):
  """What the Gram matrices say.

  Attributes:
    by_leaf: ``(L, N)``, the coefficients of the replicas' gradients.
    orthogonality: scalar, see :class:`AdasumState`.
    notfinite: scalar bool, whether a Gram matrix has entries that are not finite.
  """

  by_leaf: jax.Array
  orthogonality: jax.Array
  notfinite: jax.Array


def _layouts(leaves: Sequence[Any], chunks: int) -> list[_Layout]:
  """Lays out the leaves of each dtype.

  Args:
    leaves: arrays or abstract values.
    chunks: D, into how many chunks each vector is cut.
  """
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
    lists = [_blocks(starts, ends, d * chunk, chunk, block) for d in range(chunks)]
    table = np.zeros((chunks, max(1, *map(len, lists)), 4), np.int32)
    for row, entries in zip(table, lists, strict=True):
      row[: len(entries)] = np.reshape(entries, (-1, 4))
    layouts.append(_Layout(tuple(members), shapes, starts, dtype, chunk, block, table))
  return layouts


def _blocks(
  starts: Sequence[int], ends: Sequence[int], origin: int, chunk: int, block: int
) -> list[tuple[int, int, int, int]]:
  """The blocks of one chunk, as :class:`_Layout` lists them.

  Args:
    starts: where the leaves begin.
    ends: where they end.
    origin: where the chunk begins.
    chunk: its length.
    block: the length of a block, at most `chunk`.
  """
  found = []
  for leaf, (leaf_start, leaf_end) in enumerate(zip(starts, ends, strict=True)):
    low, high = max(leaf_start - origin, 0), min(leaf_end - origin, chunk)
    for first in range(low, high, block):
      # The last block starts early enough to lie in the chunk.
      start = min(first, chunk - block)
      found.append((start, first - start, min(first + block, high) - start, leaf))
  return found


def _fit(vector: jax.Array, size: int) -> jax.Array:
  return jnp.pad(vector, (0, size - vector.size)) if vector.size < size else vector


def _pack(leaves: Sequence[jax.Array], layout: _Layout, chunks: int) -> jax.Array:
  """The leaves of a layout as ``(D, M)``, padded with zeros."""
  flat = [jnp.ravel(leaves[i]) for i in layout.leaves]
  if len(flat) == 1:
    return _fit(flat[0], chunks * layout.chunk).reshape(chunks, layout.chunk)
  rows = []
  # Row by row: on CPUs a concatenation of all leaves would be copied once more to be cut.
  for origin in range(0, chunks * layout.chunk, layout.chunk):
    parts = []
    for leaf, start in zip(flat, layout.starts, strict=True):
      low, high = max(origin - start, 0), min(origin + layout.chunk - start, leaf.size)
      if low < high:
        parts.append(leaf[low:high])
    rows.append(_fit(jnp.concatenate([jnp.zeros(0, layout.dtype), *parts]), layout.chunk))
  return jnp.stack(rows)


def _unpack(vectors: Sequence[tuple[_Layout, jax.Array]]) -> list[jax.Array]:
  """Cuts joined vectors into leaves again, in the order of all leaves."""
  leaves = {}
  for layout, vector in vectors:
    for i, shape, start in zip(layout.leaves, layout.shapes, layout.starts, strict=True):
      leaves[i] = vector[start : start + math.prod(shape)].reshape(shape)
  return [leaves[i] for i in range(len(leaves))]


def _over_blocks(
  chunk: _Chunk, result: jax.Array, body: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
  """Runs ``result = body(result, block)`` over the rows of ``chunk.blocks``."""
  turns = chunk.layout.blocks.shape[1]
  return jax.lax.fori_loop(0, turns, lambda t, y: body(y, chunk.blocks[t]), result)


def _counts(block: jax.Array, width: int) -> jax.Array:
  """Which columns of a block belong to its leaf: a mask ``(B,)``."""
  columns = jnp.arange(width)
  return (columns >= block[1]) & (columns < block[2])


def _gram(chunks: Sequence[_Chunk]) -> jax.Array:
  """What these chunks hold of the Gram matrices ``(L, N, N)``, in the order of all leaves."""

  def partial_gram(chunk: _Chunk) -> jax.Array:
    width, wide = chunk.layout.block, _tree.accumulator_dtype(chunk.layout.dtype)
    replicas = len(chunk.rows)

    def multiply(parts: list[jax.Array], counts: jax.Array | None = None) -> jax.Array:
      parts = [part.astype(wide) for part in parts]
      if counts is not None:
        # Selected, not multiplied: what belongs to another leaf may be NaN.
        parts = [jnp.where(counts, part, 0) for part in parts]
      # Row by row and not fused: XLA's CPU code for stacking slices is slower than a copy.
      columns = jnp.stack(jax.lax.optimization_barrier(parts))
      return jnp.matmul(columns, columns.T, precision=jax.lax.Precision.HIGHEST)

    def add(grams: jax.Array, block: jax.Array) -> jax.Array:
      parts = [jax.lax.dynamic_slice(row, (block[0],), (width,)) for row in chunk.rows]
      # Most blocks lie in one leaf as a whole; selecting takes as long as multiplying.
      cut = functools.partial(multiply, counts=_counts(block, width))
      products = jax.lax.cond(block[2] - block[1] == width, multiply, cut, parts)
      return grams.at[block[3]].add(products)

    shape = (len(chunk.layout.leaves), replicas, replicas)
    # Under `shard_map` the loop must know from the start that they vary as the gradients do.
    varying = chunk.rows[0][0].astype(wide)
    return _over_blocks(chunk, jnp.where(jnp.zeros(shape, bool), varying, 0), add)

  found = [partial_gram(chunk) for chunk in chunks]
  if len(found) == 1:
    return found[0]
  widest = jnp.result_type(*found)
  order = np.argsort([i for chunk in chunks for i in chunk.layout.leaves])
  return jnp.concatenate([grams.astype(widest) for grams in found])[order]


def _combine(chunk: _Chunk, weights: _Weights) -> jax.Array:
  """The chunk ``(M,)`` of the result."""
  layout = chunk.layout
  wide = _tree.accumulator_dtype(layout.dtype)
  coefficients = weights.by_leaf[np.asarray(layout.leaves)].astype(wide)

  # The result takes the place of the first row: each column is read for the last time in the turn
  # that writes it.
  first, *others = chunk.rows

  def mix(y: jax.Array, block: jax.Array) -> jax.Array:
    parts = [jax.lax.dynamic_slice(row, (block[0],), (layout.block,)) for row in (y, *others)]
    terms = [c * part.astype(wide) for c, part in zip(coefficients[block[3]], parts, strict=True)]
    mixed = functools.reduce(jnp.add, terms).astype(layout.dtype)
    new = jnp.where(_counts(block, layout.block), mixed, parts[0])
    return jax.lax.dynamic_update_slice(y, new, (block[0],))

  return _over_blocks(chunk, first, mix)


def _weigh(gram: jax.Array, group_of_leaf: np.ndarray) -> _Weights:
  """Runs the tree on Gram matrices alone.

  Args:
    gram: ``(L, N, N)``, per leaf.
    group_of_leaf: ``(L,)``, the number of each leaf's group.

  Returns:
    The coefficients; NaN for groups whose Gram matrix is not finite.
  """
  groups = int(group_of_leaf.max()) + 1
  if groups < len(group_of_leaf):
    gram = jax.ops.segment_sum(gram, group_of_leaf, groups)
  roundings = _ROUNDINGS * jnp.finfo(gram.dtype).eps
  norms = jnp.sqrt(jnp.diagonal(gram, axis1=1, axis2=2))
  nodes = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
  products = gram
  while nodes.shape[1] > 1:
    squares = jnp.diagonal(products, axis1=1, axis2=2)
    summed = jnp.sum(jnp.abs(nodes) * norms[:, None, :], axis=2)
    zero = squares <= jnp.maximum(jnp.finfo(gram.dtype).tiny, roundings * summed * summed)
    factors = _pair_factors(products, squares, zero)
    nodes = _add_pairs(nodes, factors)
    products = _add_pairs(jnp.swapaxes(_add_pairs(products, factors), 1, 2), factors)
  finite = jnp.all(jnp.isfinite(gram), axis=(1, 2))
  by_group = jnp.where(finite[:, None], nodes[:, 0], jnp.nan)
  before = jnp.sum(norms * norms)
  after = jnp.sum(products)
  return _Weights(
    by_leaf=by_group[group_of_leaf],
    orthogonality=jnp.where(before == 0, 1, after / before),
    notfinite=~jnp.all(finite),
  )


def _pair_factors(products: jax.Array, squares: jax.Array, zero: jax.Array) -> jax.Array:
  """What each node of a level is multiplied by before it is added to its partner.

  Args:
    products: ``(L, K, K)``, inner products of the nodes.
    squares: ``(L, K)``, their squared norms.
    zero: ``(L, K)``, which of them count as zero.

  Returns:
    ``(L, K)``; 1 for both members of a pair of which one is zero, and for the odd one out.
  """
  factors = []
  for node in range(squares.shape[1]):
    partner = node ^ 1
    if partner == squares.shape[1]:
      factors.append(jnp.ones_like(squares[:, node]))
      continue
    usable = ~(zero[:, node] | zero[:, partner])
    square = jnp.where(usable, squares[:, node], 1)
    factors.append(jnp.where(usable, 1 - products[:, node, partner] / (2 * square), 1))
  return jnp.stack(factors, axis=1)


def _add_pairs(x: jax.Array, factors: jax.Array) -> jax.Array:
  """Multiplies ``(L, K, ...)`` by factors ``(L, K)`` and adds up pairs; an odd one passes."""
  scaled = factors[:, :, None] * x
  pairs = scaled.shape[1] // 2 * 2
  summed = scaled[:, 0:pairs:2] + scaled[:, 1:pairs:2]
  return jnp.concatenate([summed, scaled[:, pairs:]], axis=1)


def _gather(chunk: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """All chunks behind each other, on all devices."""
  if not _varies_along(chunk):
    return jax.lax.all_gather(chunk, axes, tiled=True)
  # `shard_map` keeps book of what varies: it must be told that the result does not.
  if "to" in inspect.signature(jax.lax.all_gather).parameters:
    return jax.lax.all_gather(chunk, axes, tiled=True, to="invarying")
  # Below JAX 0.10 only a sum can say so. It moves twice the bytes.
  devices, owner = math.prod(map(_axis_size, axes)), jax.lax.axis_index(axes)
  alone = jnp.where(jnp.arange(devices)[:, None] == owner, chunk, 0)
  return jax.lax.psum(alone.ravel(), axes)


def _varies_along(x: jax.Array) -> frozenset[str]:
  kind = jax.typeof(x)
  # The second name is that of older versions of JAX.
  if hasattr(kind, "manual_axis_type"):
    return kind.manual_axis_type.varying
  return getattr(kind, "vma", frozenset())


def _axes(argument: str, names: AxisName) -> tuple[str, ...]:
  found = (names,) if isinstance(names, str) else names
  if not (isinstance(found, tuple) and found and all(isinstance(name, str) for name in found)):
    raise TypeError(
      f"`{argument}` must be the name of a mesh axis or a tuple of names; got {names!r}."
    )
  return found


def _axis_size(name: str) -> int:
  try:
    return jax.lax.psum(1, name)
  except NameError as error:
    raise ValueError(
      f"`adasum` needs the axis '{name}'; it is not bound here. Call `update` inside"
      " `jax.shard_map` over a mesh that has this axis, or inside `jax.vmap(...,"
      f" axis_name='{name}')`."
    ) from error


def _check_not_summed(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> None:
  """Refuses gradients that ``shard_map`` knows to be alike on all replicas.

  It sums the gradients with respect to params that do not vary along an axis by itself.
  """
  varying = frozenset[str]().union(*map(_varies_along, leaves))
  for name in axes:
    # Where `shard_map` does not keep book of it, nothing varies.
    if name in _varies_along(jax.lax.axis_index(name)) and name not in varying:
      raise ValueError(
        f"`adasum` needs gradients that differ along the axis '{name}'; these are the same"
        " everywhere. Inside `jax.shard_map`, gradients with respect to replicated params have"
        " been summed already: take them with respect to"
        f" `jax.lax.pcast(params, '{name}', to='varying')`, or `jax.lax.pvary(params, '{name}')`"
        " where JAX is too old to have that."
      )


def _check_groups(groups: Any) -> tuple[str, ...]:
  patterns = () if groups is None else (groups,) if isinstance(groups, str) else groups
  if not (isinstance(patterns, list | tuple) and all(isinstance(p, str) for p in patterns)):
    raise TypeError(f"`groups` must be regular expressions or None; got {groups!r}.")
  for pattern in patterns:
    re.compile(pattern)
  return tuple(patterns)


def _group_of_leaf(paths: Sequence[str], patterns: Sequence[str]) -> np.ndarray:
  """Numbers the groups ``0, 1, ...`` and says of each leaf in which it is."""
  keys: list[Any] = [
    next((p for p in patterns if re.search(p, path)), i) for i, path in enumerate(paths)
  ]
  idle = [p for p in patterns if p not in keys]
  if idle and paths:
    _tree.warn_no_effect(
      f"`groups` has patterns that match no leaf, or none that is not matched before: {idle}.",
      paths,
    )
  numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
  return np.array([numbers[key] for key in keys], int)
