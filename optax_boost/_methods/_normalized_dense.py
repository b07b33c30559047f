r"""The normalized head: a dense layer on the directions of its inputs and its kernel.

  x        (..., n)  inputs
  W        (n, m)    kernel, one column per output
  s        (1,)      multiplier, learned
  b        (m,)      bias
  N(v)     v / sqrt(max(v . v, eps)), of a row of x or a column of W

  y = s (N(x) N(W) + b)

so that, b aside, y_j = s cos(x, W_j) wherever the norms exceed sqrt(eps).

Source: MindSpore Boost's ``CommonHeadLastFN``. In MindSpore small norms are clamped elsewhere in
the backward pass than in the forward pass; here the gradient is the derivative of the forward pass.
"""

import jax
import jax.numpy as jnp

from optax_boost._foundation import _arrays, _checks, _types

# The bound on squared norms in MindSpore.
EPS = 1e-4


def check_settings(multiplier_init: _types.Unchecked, eps: _types.Unchecked) -> None:
  """Checks the settings that a dense layer doesn't have."""
  _checks.check_callable("multiplier_init", multiplier_init, "multiplier_init(key, shape, dtype)")
  _checks.check_number("eps", eps, positive=True)


def l2_normalize(x: jax.Array, axis: int, eps: float = EPS) -> jax.Array:
  """Scales vectors along an axis to length one; those shorter than sqrt(eps) by 1 / sqrt(eps)."""
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
  """The layer of the module's docstring; `eps` bounds squared norms from below."""
  y = l2_normalize(x, -1, eps) @ l2_normalize(kernel, 0, eps)
  if bias is not None:
    y = y + bias
  return multiplier * y
