r"""``NormalizedDense``: a dense layer whose inputs and kernel columns are scaled to length one.

  x        (..., n)  inputs
  W        (n, m)    kernel, one column per output
  s        (1,)      multiplier, learned
  b        (m,)      bias
  N(v)     v / sqrt(max(v . v, eps)), of a row of x or a column of W

  y = s (N(x) N(W) + b)

Source: MindSpore Boost's ``CommonHeadLastFN``. MindSpore's backward pass clamps small norms in
another way than its forward pass; here, the gradient is the derivative of the forward pass.
"""

import jax
import jax.numpy as jnp

from optax_boost._foundation import _arrays, _checks, _types

# The lower bound on squared norms, as in MindSpore.
EPS = 1e-4


def check_settings(multiplier_init: _types.Unchecked, eps: _types.Unchecked) -> None:
  _checks.check_callable("multiplier_init", multiplier_init, "multiplier_init(key, shape, dtype)")
  _checks.check_number("eps", eps, above=0.0)


def l2_normalize(x: jax.Array, axis: int, eps: float = EPS) -> jax.Array:
  """Returns `x` with each vector v along `axis` divided by sqrt(max(|v|^2, eps))."""
  vectors = _arrays.widen(x)
  square = jnp.sum(vectors * vectors, axis, keepdims=True)
  return (vectors * jax.lax.rsqrt(jnp.maximum(square, eps))).astype(x.dtype)


def normalized_dense(
  x: jax.Array,
  kernel: jax.Array,
  multiplier: jax.Array,
  bias: jax.Array | None = None,
  *,
  eps: float = EPS,
) -> jax.Array:
  """Returns `multiplier` (N(x) N(kernel) + `bias`).

  N divides each row v of `x`, and each column v of `kernel`, by sqrt(max(|v|^2, eps)).
  """
  y = l2_normalize(x, -1, eps) @ l2_normalize(kernel, 0, eps)
  if bias is not None:
    y = y + bias
  return multiplier * y
