"""Computes the adaptive sums of one level of the tree, from squares that don't overflow.

For K nodes x_1 ... x_K of a level, in each of G groups of leaves:

  e  (G, K)  no entry of a node exceeds 2^e
  h  (G, K)  nodes are scaled by 2^h, so that squares and their sums are in range: h = 48 - e
  squares (G, K), products (G, K / 2)
             of the scaled nodes: |2^h x|^2, and <2^h_a a, 2^h_b b> of each pair a, b
  n  (G, K)  no node's norm exceeds 2^n

The adaptive sum of a pair is (a - 2^r s_a a) + (b - 2^-r s_b b), where r = n_b - n_a and

  s_a = <2^-n_a a, 2^-n_b b> / (2 |2^-n_a a|^2)

and s_b likewise; s_a and s_b are 0 for nodes that are zero. Since 2^r may be out of range, a is
multiplied by 2^(r // 2) first, and then by s_a times the rest of 2^r. Neither product is larger
than the larger of a and b.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types

# Scaled entries are at most 2^48 and their squares at most 2^96, so a sum of up to 2^31 squares is
# finite in float32. An entry larger than 2^-111 times its node's bound 2^e has a scaled square that
# is a normal number of float32.
_LARGEST = 48
# The powers 2^-126 to 2^126 are normal numbers in float32.
_LOWEST = -126


class Sums(NamedTuple):
  """Sums over the entries of the nodes of one level of the Adasum tree, in each group of leaves.

  The nodes are scaled by 2^h. `squares` has each node's squared norm. `products` has the inner
  product of each pair of nodes that is combined into a node of the next level.
  """

  squares: jax.Array  # (G, K)
  products: jax.Array  # (G, K // 2)


class Factors(NamedTuple):
  """The factors in the adaptive sums of a level's pairs (see the module).

  Each field has an array ``(G, K // 2)`` for the pairs' first nodes, a in the formula, and one for
  their second nodes, b.
  """

  ratios: tuple[jax.Array, jax.Array]  # r, -r
  shares: tuple[jax.Array, jax.Array]  # s_a, s_b


def power(exponents: jax.Array, dtype: _types.Dtype) -> jax.Array:
  """Returns 2 to the power of each integer in `exponents`, as an array of `dtype`.

  Powers that are not normal numbers become the nearest power that is. The bits are set directly:
  `jnp.ldexp` takes fifty operations, and Adasum's programs would take twice the time to compile.
  """
  info = jnp.finfo(dtype)
  normal = np.array([info.minexp, info.maxexp - 1], exponents.dtype)
  exponents = jax.lax.clamp(normal[0], exponents, normal[1])
  bits = (exponents + (info.maxexp - 1)).astype(f"int{info.bits}") << info.nmant
  return jax.lax.bitcast_convert_type(bits, dtype)


def exponent(x: jax.Array) -> jax.Array:
  """Returns the least integer e such that ``x < 2^e``, from the bits of a positive normal `x`."""
  info = jnp.finfo(x.dtype)
  bits = jax.lax.bitcast_convert_type(x, f"int{info.bits}")
  return (bits >> info.nmant) - (info.maxexp - 2)


def scale(x: jax.Array, exponents: jax.Array) -> jax.Array:
  """Returns ``x 2^exponents``, exactly where `x` and the result are normal numbers or zero.

  Exponents of float32 are taken from -252 to 254, so that zeros stay zeros.
  """
  half = exponents >> 1  # 2^exponents may not be a normal number
  return x * power(half, x.dtype) * power(exponents - half, x.dtype)


def bounds_of(largest: jax.Array) -> jax.Array:
  """Returns exponents e such that no entry exceeds 2^e, from the largest entry of each node."""
  positive = (largest > 0) & jnp.isfinite(largest)
  return jnp.where(positive, exponent(largest), _LOWEST)


def scales_of(bounds: jax.Array) -> jax.Array:
  """Returns the exponents h of the scales 2^h for nodes whose entries are at most 2^bounds."""
  return jnp.minimum(_LARGEST - bounds, -_LOWEST)


def norms_of(squares: jax.Array, scales: jax.Array) -> jax.Array:
  """Returns exponents n such that no node's norm exceeds 2^n, from the squares of scaled nodes.

  For a node that is zero, n is -126.
  """
  exponents = (exponent(squares) + 1 >> 1) - scales
  return jnp.where(squares > 0, jnp.maximum(exponents, _LOWEST), _LOWEST)


def pair_up(sums: Sums, scales: jax.Array) -> tuple[Factors, jax.Array]:
  """Returns the factors of a level's pairs, and the exponents e of the next level's nodes."""
  pairs = sums.products.shape[1]
  norms = norms_of(sums.squares, scales)
  # Each node is divided by 2^n. Its square is then below 1, and at least 1/4 unless it is zero.
  shifts = scales + norms
  squares = scale(sums.squares, -2 * shifts)
  first, second = (slice(i, 2 * pairs, 2) for i in (0, 1))
  product = scale(sums.products, -shifts[:, first] - shifts[:, second])

  def share(square: jax.Array) -> jax.Array:
    return jnp.where(square > 0, product / jnp.where(square > 0, 2 * square, 1), 0)

  ratio = norms[:, second] - norms[:, first]
  factors = Factors((ratio, -ratio), (share(squares[:, first]), share(squares[:, second])))
  # The norm of an adaptive sum is at most 3/2 times the sum of the two norms, so below 4 times the
  # larger bound.
  pair_bounds = jnp.maximum(norms[:, first], norms[:, second]) + 2
  return factors, jnp.concatenate([pair_bounds, norms[:, 2 * pairs :]], axis=1)


def combine(nodes: jax.Array, factors: Factors, group: jax.Array) -> jax.Array:
  """Returns the next level's nodes ``(K - K // 2, B)`` from `nodes` ``(K, B)`` of one `group`."""
  pairs = factors.shares[0].shape[1]
  first, second = nodes[0 : 2 * pairs : 2], nodes[1 : 2 * pairs : 2]

  def reduced(node: jax.Array, ratio: jax.Array, share: jax.Array) -> jax.Array:
    root = ratio[group] >> 1
    subtrahend = share[group].astype(node.dtype) * power(ratio[group] - root, node.dtype)
    return node - node * power(root, node.dtype)[:, None] * subtrahend[:, None]

  sides = zip((first, second), factors.ratios, factors.shares, strict=True)
  a, b = (reduced(*side) for side in sides)
  return jnp.concatenate([a + b, nodes[2 * pairs :]])


def orthogonality(
  first: Sums, first_scales: jax.Array, last: Sums, last_scales: jax.Array
) -> _types.FloatScalar:
  """Returns the squared norm of the adaptive sum, divided by the sum of squared gradient norms.

  Norms are over all groups. `first` are the sums of the gradients, which are the nodes of the
  tree's lowest level. `last` are the sums of the level below the root, which has two nodes, or one
  if there is only one gradient. The two arrays of scales are the exponents h of these levels (see
  the module). Returns 1 if all gradients are zero.
  """
  unit = jnp.max(norms_of(first.squares, first_scales))
  before = jnp.sum(scale(first.squares, -2 * (first_scales + unit)))
  squares = scale(last.squares, -2 * (last_scales + unit))
  after = jnp.sum(squares, axis=1)
  if last.products.shape[1]:
    # The squared norms of the two nodes are multiplied below. Each is first divided by its bound
    # 2^2n, so that the product is in range.
    shifts = last_scales + norms_of(last.squares, last_scales)
    sizes = jnp.prod(scale(last.squares, -2 * shifts), axis=1)
    product = scale(last.products[:, 0], -jnp.sum(shifts, axis=1))
    cosine = jnp.where(sizes > 0, jnp.square(product) / jnp.where(sizes > 0, sizes, 1), 0)
    product = scale(last.products[:, 0], -jnp.sum(last_scales + unit, axis=1))
    after = after * (1 - 0.75 * cosine) + 0.5 * cosine * product
  ratio = jnp.sum(after) / jnp.where(before == 0, 1, before)
  return jnp.where(before == 0, 1, ratio).astype(jnp.float32)
