"""The normalized head for Flax Linen."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from optax_boost import _normalized_dense


class NormalizedDense(nn.Module):
  r"""A dense layer whose inputs and kernel are L2-normalized, times a learned multiplier.

  .. math::
    y = s \, (N(x) \, N(W) + b), \qquad N(v) = v / \sqrt{\max(v \cdot v, \epsilon)}

  with :math:`N` on each row of :math:`x` and each output's column of :math:`W`. Logits lie within
  plus or minus the multiplier, whatever the length of the features. Norms are taken in float32.

  Attributes:
    features: the number of outputs.
    use_bias: whether there is a bias; the multiplier scales it too.
    dtype: the dtype of the computation; None: that of inputs and params.
    param_dtype: the dtype of the params.
    kernel_init: initializer of the kernel; its scale does not matter.
    bias_init: initializer of the bias.
    multiplier_init: initializer of the multiplier. Raising it sharpens a classifier from the start,
      where 1 makes it learn to.
    eps: smallest squared norm to divide by.

  Raises:
    TypeError: an attribute is of the wrong kind; when called: the input is no array.
    ValueError: `features` is below 1, or `eps` is not positive; when called: the input is a scalar.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> head = optax_boost.linen.NormalizedDense(3)
    >>> x = jnp.array([[1.0, 2.0]])
    >>> variables = head.init(jax.random.key(0), x)
    >>> bool(jnp.allclose(head.apply(variables, x), head.apply(variables, 100 * x)))
    True

  References:
    MindSpore Boost's ``CommonHeadLastFN``.
  """

  features: int
  use_bias: bool = True
  dtype: Any = None
  param_dtype: Any = jnp.float32
  kernel_init: Any = nn.initializers.lecun_normal()
  bias_init: Any = nn.initializers.zeros_init()
  multiplier_init: Any = nn.initializers.ones_init()
  eps: float = _normalized_dense.EPS

  def __post_init__(self) -> None:
    _normalized_dense.check_settings(
      {"features": self.features},
      use_bias=self.use_bias,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      initializers={
        "kernel_init": self.kernel_init,
        "bias_init": self.bias_init,
        "multiplier_init": self.multiplier_init,
      },
      eps=self.eps,
    )
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies the layer.

    Args:
      x: inputs, (..., n).

    Returns:
      Outputs, (..., features).
    """
    _normalized_dense.check_inputs(x)
    kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
    bias = None
    if self.use_bias:
      bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
    multiplier = self.param("multiplier", self.multiplier_init, (1,), self.param_dtype)
    given = (x, kernel, multiplier, bias)
    x, kernel, multiplier, bias = nn.dtypes.promote_dtype(*given, dtype=self.dtype)
    return _normalized_dense.normalized_dense(x, kernel, multiplier, bias, eps=self.eps)
