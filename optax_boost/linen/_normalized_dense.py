"""``NormalizedDense`` for Flax Linen."""

from flax import linen as nn
import jax

from optax_boost._methods import _normalized_dense


class NormalizedDense(nn.Dense):
  """A dense layer like :class:`optax_boost.nnx.NormalizedDense`, for Linen.

  Attributes:
    multiplier_init, eps: see :class:`optax_boost.nnx.NormalizedDense`; all other attributes are
      as in ``nn.Dense``.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> head = optax_boost.linen.NormalizedDense(3)
    >>> x = jnp.array([[1.0, 2.0]])
    >>> variables = head.init(jax.random.key(0), x)
    >>> bool(jnp.allclose(head.apply(variables, x), head.apply(variables, 100 * x)))
    True
  """

  multiplier_init: nn.initializers.Initializer = nn.initializers.ones_init()
  eps: float = _normalized_dense.EPS

  def __post_init__(self) -> None:
    _normalized_dense.check_settings(self.multiplier_init, self.eps)
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps inputs (..., n) to outputs (..., features)."""
    kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
    bias = None
    if self.use_bias:
      bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
    multiplier = self.param("multiplier", self.multiplier_init, (1,), self.param_dtype)
    promoted = nn.dtypes.promote_dtype(x, kernel, multiplier, bias, dtype=self.dtype)
    return _normalized_dense.normalized_dense(*promoted, eps=self.eps)
