"""``NormalizedDense`` for Flax NNX."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from optax_boost._methods import _normalized_dense


class NormalizedDense(nnx.Linear):
  r"""A dense layer whose inputs and kernel are L2-normalized, times a learned multiplier.

  .. math::
    y = s \, (N(x) \, N(W) + b), \qquad N(v) = v / \sqrt{\max(v \cdot v, \epsilon)}

  where :math:`N` normalizes each row of :math:`x` and each column of :math:`W`. Without a bias,
  logits lie between minus and plus the multiplier, however long the features are. Norms are
  computed in float32.

  Args:
    in_features: the size of the inputs' last axis.
    out_features: the number of outputs.
    multiplier_init: initializer of the multiplier. Raising it sharpens a classifier from the start.
      If it is 1, training must find the multiplier.
    eps: the smallest squared norm to divide by.
    rngs: the rngs.
    **options: as for ``nnx.Linear``: `use_bias` (the multiplier scales the bias, too), `dtype`,
      `param_dtype`, `kernel_init`, `bias_init`. `precision` and `dot_general` have no effect.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax_boost.nnx
    >>> head = optax_boost.nnx.NormalizedDense(2, 3, rngs=nnx.Rngs(0))
    >>> x = jnp.array([[1.0, 2.0]])
    >>> bool(jnp.allclose(head(x), head(100 * x))), head.multiplier.shape
    (True, (1,))

  References:
    MindSpore Boost's ``CommonHeadLastFN``.
  """

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    multiplier_init: nnx.initializers.Initializer = nnx.initializers.ones_init(),  # noqa: B008
    eps: float = _normalized_dense.EPS,
    rngs: nnx.Rngs,
    **options: Any,
  ):
    _normalized_dense.check_settings(multiplier_init, eps)
    super().__init__(in_features, out_features, rngs=rngs, **options)
    self.multiplier = nnx.Param(multiplier_init(rngs.params(), (1,), self.param_dtype))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
    """Maps inputs (..., in_features) to outputs (..., out_features)."""
    bias = None if self.bias is None else self.bias[...]
    arrays = (x, self.kernel[...], self.multiplier[...], bias)
    promoted = nnx.nn.dtypes.promote_dtype(arrays, dtype=self.dtype)
    return _normalized_dense.normalized_dense(*promoted, eps=self.eps)


def normalize(dense: Any) -> None:
  """Turns an ``nnx.Linear`` into a :class:`NormalizedDense` in place; keeps kernel and bias."""
  dense.__class__ = NormalizedDense
  dense.multiplier = nnx.Param(jnp.ones(1, dense.param_dtype))
  dense.eps = _normalized_dense.EPS
