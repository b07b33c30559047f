r"""The normalized head: a dense layer on the directions of its inputs and its kernel.

  x        (..., n)  inputs
  W        (n, m)    kernel, one column per output
  s        (1,)      multiplier, learned
  b        (m,)      bias
  N(v)     v / sqrt(max(v . v, eps)), of a row of x or a column of W

  y = s (N(x) N(W) + b)

so that, b aside, y_j = s cos(x, W_j) wherever the norms exceed sqrt(eps).

Source: MindSpore Boost's ``CommonHeadLastFN``. Its backward pass clamps small norms at another
place than its forward pass; here the gradient is that of the forward pass.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_boost import _base
from optax_boost import _tree

# MindSpore's, on the squared norm.
EPS = 1e-4


def check_settings(
  sizes: dict[str, Any],
  *,
  use_bias: Any,
  dtype: Any,
  param_dtype: Any,
  initializers: dict[str, Any],
  eps: Any,
) -> None:
  """Checks the settings of the layer, in NNX and Linen alike.

  Raises:
    TypeError: one of them is of the wrong kind.
    ValueError: a size is below 1, or `eps` not positive.
  """
  for name, size in sizes.items():
    _base.check_whole_number(name, size, static=True)
  _base.check_bool("use_bias", use_bias)
  if dtype is not None:
    _base.check_floating_dtype("dtype", dtype)
  _base.check_floating_dtype("param_dtype", param_dtype)
  for name, initializer in initializers.items():
    _base.check_callable(name, initializer, f"{name}(key, shape, dtype)")
  _base.check_number("eps", eps, positive=True)


def check_inputs(x: Any, features: int | None = None) -> None:
  """Checks the inputs of the layer: an array whose last axis has `features` entries, if given.

  Raises:
    TypeError: `x` is no array.
    ValueError: it has another shape.
  """
  if not (hasattr(x, "shape") and hasattr(x, "dtype")):
    raise TypeError(f"`NormalizedDense` needs an array; got {_base.shorten(x)}.")
  if len(x.shape) == 0 or x.shape[-1] != (features or x.shape[-1]):
    raise ValueError(
      f"`NormalizedDense` needs inputs of shape (..., {features or 'features'}); got shape"
      f" {x.shape}."
    )


def l2_normalize(x: jax.Array, axis: int, eps: float = EPS) -> jax.Array:
  """Scales vectors to length one, those shorter than sqrt(eps) by 1 / sqrt(eps).

  Args:
    x: an array of any floating dtype; norms are taken in at least float32.
    axis: the axis along which the vectors run.
    eps: smallest squared norm to divide by.

  Returns:
    An array of the shape and dtype of `x`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_boost._normalized_dense import l2_normalize
    >>> l2_normalize(jnp.array([[3.0, 4.0], [0.0, 0.0]]), axis=1).round(3).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
  """
  wide = x.astype(_tree.accumulator_dtype(x.dtype))
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
  """The fully normalized dense layer, ``multiplier * (N(x) @ N(kernel) + bias)``.

  Args:
    x: inputs, (..., n).
    kernel: (n, m); each output's column is normalized.
    multiplier: a scalar or of shape (1,); it scales the bias too.
    bias: (m,), or None.
    eps: smallest squared norm to divide by.

  Returns:
    Outputs, (..., m), in the dtype of `x` and `kernel`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_boost._normalized_dense import normalized_dense
    >>> x = jnp.array([[180.0, 0.0], [0.0, 5.0]])
    >>> normalized_dense(x, jnp.eye(2) * 7, jnp.array([10.0])).round(3).tolist()
    [[10.0, 0.0], [0.0, 10.0]]
  """
  y = l2_normalize(x, -1, eps) @ l2_normalize(kernel, 0, eps)
  if bias is not None:
    y = y + bias
  return multiplier * y
