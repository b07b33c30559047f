"""The Gram matrices of chunks of columns, and the combinations of them; also over devices."""

from collections.abc import Sequence
import functools
import inspect

import jax
import jax.numpy as jnp

from optax_boost import _arrays
from optax_boost import _base
from optax_boost._adasum import _coefficients
from optax_boost._adasum import _double
from optax_boost._adasum import _layout
from optax_boost._adasum import _scales

# Inner products are exact over this many columns: entries are cut into a head of 8 bits and a tail,
# and 256 products of two heads fit the 24 bits of a float32.
_EXACT_COLUMNS = 256
_HEAD_BITS = 7
# Their sums are exact over 2**12 blocks of columns, cut in the same way.
_SUM_BITS = 11
_SMALLEST_PEAK = 2.0**-100
# Beyond 2**84 and 2**-84 terms of a sum may overflow or underflow; this factor prevents it.
_EXTREME_STEP = 7
_SMALL = 2.0**-36


@functools.partial(jax.jit, static_argnums=1)
def reduce_stacked(leaves: list[jax.Array], groups: tuple[int, ...]) -> list[jax.Array]:
  """:func:`adasum_reduce` on leaves and the numbers of their groups."""
  replicas = leaves[0].shape[0]
  layouts = _layout.layouts(
    [jax.eval_shape(lambda x: x[0], leaf) for leaf in leaves], groups, chunks=1
  )
  largest = [_scales.largest(leaf, axes=tuple(range(1, leaf.ndim))) for leaf in leaves]
  steps = _scales.scale_steps(jnp.stack(largest, axis=1), groups)
  chunks = []
  for layout in layouts:
    rows = [leaves[i].reshape(replicas, -1 if leaves[i].size else 0) for i in layout.leaves]
    padding = jnp.zeros((replicas, layout.chunk - sum(row.shape[1] for row in rows)), layout.dtype)
    joined = jnp.concatenate([*rows, padding], axis=1)
    chunks.append(_layout.Chunk(layout, list(joined), jnp.asarray(layout.blocks[0])))
  vectors, _ = _reduce_chunks(chunks, steps)
  return _layout.unpack(layouts, vectors)


# Compiled as a whole also where `update` is called eagerly.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def reduce_over_devices(
  leaves: list[jax.Array],
  groups: tuple[int, ...],
  axes: tuple[str, ...],
  local_axes: tuple[str, ...],
  shard_axes: tuple[str, ...],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """The sums of all devices' leaves, the orthogonality, and whether a leaf was not finite."""
  replicas, nearby = jax.lax.axis_size(axes), jax.lax.axis_size(local_axes)
  layouts = _layout.layouts(leaves, groups, chunks=replicas * nearby)
  largest = jnp.stack([_scales.largest(leaf) for leaf in leaves])
  if shard_axes:
    largest = jax.lax.pmax(largest, shard_axes)
  owner = jax.lax.axis_index(local_axes + axes)
  # The scales travel behind the entries as their powers of two, in a dtype that holds them.
  carrier = next((layout for layout in layouts if _scales.is_wide(layout.dtype)), None)
  bounds = _scales.power(_scales.scale_steps(largest, groups), jnp.float32)
  # Under `vmap`, gradients that are the same everywhere are not mapped, but must be exchanged.
  bounds = jnp.where(owner < 0, 0, bounds)

  chunks, steps = [], jnp.zeros((replicas, bounds.size), int)
  for layout in layouts:
    tail = bounds if layout is carrier else bounds[:0]
    x = _layout.pack(leaves, layout, replicas * nearby, tail.astype(layout.dtype))
    if nearby > 1:
      x = _mean_nearby(x.reshape(nearby, replicas, x.shape[1]), local_axes, nearby)
    if replicas > 1:
      x = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
    if layout is carrier:
      steps = _scales.steps_of_bounds(x[:, layout.chunk :])
    chunks.append(_layout.Chunk(layout, list(x), jnp.asarray(layout.blocks)[owner]))
  vectors, weights = _reduce_chunks(chunks, steps, axes + local_axes + shard_axes)
  outputs = _layout.unpack(layouts, [_gather(vector, local_axes + axes) for vector in vectors])
  return outputs, weights.orthogonality.astype(jnp.float32), weights.notfinite


def _reduce_chunks(
  chunks: Sequence[_layout.Chunk], steps: jax.Array, axes: tuple[str, ...] = ()
) -> tuple[list[jax.Array], _coefficients.Weights]:
  """The chunks ``(M,)`` of the result, for gradients with scales ``(N, G)``."""
  grams = [_gram(chunk, steps) for chunk in chunks]
  widest = jnp.result_type(*grams)
  gram = functools.reduce(_double.add, [gram.astype(widest) for gram in grams])
  if axes:
    gram, steps = _sum_over_devices(gram, steps, axes)
  weights = _coefficients.weigh(gram, steps)
  return [_combine(chunk, steps, weights) for chunk in chunks], weights


def _gram(chunk: _layout.Chunk, steps: jax.Array) -> jax.Array:
  """A chunk's part of the groups' Gram matrices, ``(2, G, N, N)``, two words per entry."""
  wide = _arrays.accumulator_dtype(chunk.layout.dtype)
  scales = _scales.power(-steps, wide)
  replicas, groups = steps.shape

  def add(turn: jax.Array, grams: jax.Array) -> jax.Array:
    x, _, counts, group = _layout.cut_block(chunk, turn)
    # Selected, not multiplied: entries of another leaf may be NaN.
    x = jnp.where(counts, x.astype(wide) * scales[:, group, None], 0)
    return grams.at[:, group].set(_double.add(grams[:, group], _products(x)))

  # Under `shard_map` the loop must know from the start that they vary as the gradients do.
  zero = jnp.where(False, chunk.rows[0][0].astype(wide), 0)
  zeros = jnp.broadcast_to(zero, (2, groups, replicas, replicas))
  return jax.lax.fori_loop(0, len(chunk.blocks), add, zeros)


def _products(x: jax.Array) -> jax.Array:
  """The inner products ``(2, N, N)`` of N rows, in two words."""
  if x.dtype == jnp.float64:
    return _double.words(jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST))
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


def _combine(chunk: _layout.Chunk, steps: jax.Array, weights: _coefficients.Weights) -> jax.Array:
  """The chunk ``(M,)`` of the result."""
  layout = chunk.layout
  wide = _arrays.accumulator_dtype(layout.dtype)
  coefficients = weights.coefficients.astype(wide)
  # Gradients are brought to the largest scale, never down: no entry becomes a denormal number.
  lifts = weights.steps[:, None] - steps.T
  first_lifts = jnp.minimum(lifts, _scales.LARGEST_STEP)
  first_factors, second_factors = (
    _scales.power(x, wide) for x in (first_lifts, lifts - first_lifts)
  )

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
    x, start, counts, group = _layout.cut_block(chunk, turn)
    extreme = jnp.abs(weights.steps[group]) >= _EXTREME_STEP
    mixed = jax.lax.cond(extreme, add_extremes, add, x.astype(wide), group).astype(layout.dtype)
    old = jax.lax.dynamic_slice_in_dim(result, start, layout.block)
    return jax.lax.dynamic_update_slice(result, jnp.where(counts, mixed, old), (start,))

  return jax.lax.fori_loop(0, len(chunk.blocks), mix, chunk.rows[0][: layout.chunk])


def _mean_nearby(x: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
  """Scatters ``x`` along its first axis over `axes` and averages it there."""
  # Divided first, or large gradients overflow; by a power of two, which rounds nothing. In float16
  # that would cost small gradients their last bits.
  power = 2 ** (size - 1).bit_length() if _scales.is_wide(x.dtype) else 1
  summed = jax.lax.psum_scatter(x / power, axes, scatter_dimension=0)
  return summed if size == power else summed * (power / size)


def _sum_over_devices(
  gram: jax.Array, steps: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
  """Adds up Gram matrices; the scales go along, since ``shard_map`` must know them to be alike."""
  # Half of the first word's bits, so that their sum needs no rounding.
  head = _double.head(gram[0])
  one_device = jnp.where(jax.lax.axis_index(axes) == 0, steps, 0).astype(gram.dtype)
  words = jnp.stack([head, gram[1] + (gram[0] - head)])
  summed = jax.lax.psum(jnp.concatenate([jnp.ravel(words), jnp.ravel(one_device)]), axes)
  words, one_device = summed[: words.size], summed[words.size :]
  return words.reshape(gram.shape), one_device.reshape(steps.shape).astype(int)


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
