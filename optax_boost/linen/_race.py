"""Races of transformations on a Linen module."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import jax
import optax

from optax_boost import _base
from optax_boost.linen import _adapter
from optax_boost.race import RaceResult
from optax_boost.race import _api


@_base.with_keywords_of(_api.race, "has_model_state")
def race(
  module: nn.Module,
  loss_fn: Callable[..., Any],
  init_fn: Callable[[jax.Array], Any],
  data: Any,
  transformations: Mapping[str, optax.GradientTransformation],
  *,
  evaluate: Callable[..., Any] | None = None,
  rngs: Sequence[str] = ("dropout",),
  **options: Any,
) -> RaceResult:
  """Trains a module with each of several transformations: :func:`optax_boost.race` for Linen.

  Args:
    module: the Linen module.
    loss_fn: ``loss_fn(model, batch)``, as for :func:`make_train_step`.
    init_fn: from a key to the variables that ``module.init`` returns.
    data: as for :func:`optax_boost.race`.
    transformations: by name.
    evaluate: ``evaluate(model)``, where ``model(x, ...)`` applies the module without rngs: a
      scalar, or a dictionary of scalars. Pass the module's argument for evaluation, as ``train``.
    rngs: the names of the module's rng streams.
    **options: the other arguments of :func:`optax_boost.race`.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax, optax_boost.linen
    >>> x = jax.random.normal(jax.random.key(0), (32, 3))
    >>> module = nn.Dense(1)
    >>> result = optax_boost.linen.race(
    ...   module,
    ...   lambda model, batch: jnp.mean((model(batch)[:, 0] - batch[:, 0]) ** 2),
    ...   lambda key: module.init(key, x),
    ...   x,
    ...   {"slow": optax.sgd(0.01), "fast": optax.sgd(0.1)},
    ...   steps=10,
    ...   progress=False,
    ... )
    >>> result.difference("fast", "training loss")[0] < 0
    True
  """
  pure_loss = _adapter.pure_loss(module, loss_fn, rngs)
  _base.check_callable("init_fn", init_fn, "init_fn(key)")
  _base.check_callable("evaluate", evaluate, "evaluate(model)", optional=True)

  def init(key: jax.Array) -> tuple[Any, Any]:
    return _adapter.split_variables(init_fn(key), "init_fn(key)")

  def metrics(params: Any, collections: Any) -> Any:
    assert evaluate is not None
    return evaluate(_adapter.BoundModel(module, params, collections, {}))

  return _api.race(
    pure_loss,
    init,
    data,
    transformations,
    evaluate=None if evaluate is None else metrics,
    has_model_state=True,
    **options,
  )
