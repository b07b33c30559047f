r"""The normalized head: a dense layer on the directions of its inputs and its kernel.

  x        (..., n)  inputs
  W        (n, m)    kernel, one column per output
  s        (1,)      multiplier, learned
  b        (m,)      bias
  N(v)     v / sqrt(max(v . v, eps)), of a row of x or a column of W

  y = s (N(x) N(W) + b)

so that, b aside, y_j = s cos(x, W_j) wherever the norms exceed sqrt(eps).

Source: MindSpore Boost's ``CommonHeadLastFN``. Its backward pass clamps small norms at another
place than its forward pass; this gradient is that of the forward pass.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_boost import _arrays
from optax_boost import _base

# MindSpore's, on the squared norm.
EPS = 1e-4


def check_settings(settings: Mapping[str, Any]) -> None:
  """Checks the settings of the layer by their names, which NNX and Linen share."""
  for name, value in settings.items():
    if name.endswith("features"):
      _base.check_whole_number(name, value, static=True)
    elif name.endswith("_init"):
      _base.check_callable(name, value, f"{name}(key, shape, dtype)")
  _base.check_floating_dtype("dtype", settings["dtype"], optional=True)
  _base.check_floating_dtype("param_dtype", settings["param_dtype"])
  _base.check_bool("use_bias", settings["use_bias"])
  _base.check_number("eps", settings["eps"], positive=True)


def check_inputs(x: Any, features: int | None = None) -> None:
  """Checks that the inputs are an array whose last axis has `features` entries, if given."""
  if not (hasattr(x, "shape") and hasattr(x, "dtype")):
    raise TypeError(f"`NormalizedDense` needs an array; got {_base.shorten(x)}.")
  if len(x.shape) == 0 or x.shape[-1] != (features or x.shape[-1]):
    raise ValueError(
      f"`NormalizedDense` needs inputs of shape (..., {features or 'features'}); got shape"
      f" {x.shape}."
    )


def l2_normalize(x: jax.Array, axis: int, eps: float = EPS) -> jax.Array:
  """Scales vectors to length one, those shorter than sqrt(eps) by 1 / sqrt(eps)."""
  wide = _arrays.widen(x)
  square = jnp.sum(wide * wide, axis, keepdims=True)
  return (wide * jax.lax.rsqrt(jnp.maximum(square, eps))).astype(x.dtype)


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
