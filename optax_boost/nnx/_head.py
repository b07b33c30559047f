"""The normalized head for Flax NNX."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from optax_boost import _base
from optax_boost import _normalized_dense


class NormalizedDense(nnx.Module):
  r"""A dense layer whose inputs and kernel are L2-normalized, times a learned multiplier.

  .. math::
    y = s \, (N(x) \, N(W) + b), \qquad N(v) = v / \sqrt{\max(v \cdot v, \epsilon)}

  with :math:`N` on each row of :math:`x` and each output's column of :math:`W`. Logits lie within
  plus or minus the multiplier, whatever the length of the features. Norms are taken in float32.

  Args:
    in_features: the size of the inputs' last axis.
    out_features: the number of outputs.
    use_bias: whether there is a bias; the multiplier scales it too.
    dtype: the dtype of the computation; None: that of inputs and params.
    param_dtype: the dtype of the params.
    kernel_init: initializer of the kernel; its scale does not matter.
    bias_init: initializer of the bias.
    multiplier_init: initializer of the multiplier. Raising it sharpens a classifier from the start,
      where 1 makes it learn to.
    eps: smallest squared norm to divide by.
    rngs: the rngs.

  Raises:
    TypeError: an argument is of the wrong kind; when called: the input is no array.
    ValueError: a size is below 1, or `eps` is not positive; when called: the input's last axis has
      another size.

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
    use_bias: bool = True,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    kernel_init: Any = nnx.initializers.lecun_normal(),  # noqa: B008
    bias_init: Any = nnx.initializers.zeros_init(),  # noqa: B008
    multiplier_init: Any = nnx.initializers.ones_init(),  # noqa: B008
    eps: float = _normalized_dense.EPS,
    rngs: nnx.Rngs,
  ):
    _normalized_dense.check_settings(locals())
    _base.check_type("rngs", rngs, nnx.Rngs, "nnx.Rngs")
    self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype))
    bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
    self.bias = None if bias is None else nnx.Param(bias)
    self.multiplier = nnx.Param(multiplier_init(rngs.params(), (1,), param_dtype))
    self.in_features = in_features
    self.out_features = out_features
    self.use_bias = use_bias
    self.dtype = dtype
    self.param_dtype = param_dtype
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    """From inputs (..., in_features) to outputs (..., out_features)."""
    _normalized_dense.check_inputs(x, self.in_features)
    bias = None if self.bias is None else self.bias[...]
    arrays = (x, self.kernel[...], self.multiplier[...], bias)
    promoted = nnx.nn.dtypes.promote_dtype(arrays, dtype=self.dtype)
    return _normalized_dense.normalized_dense(*promoted, eps=self.eps)
