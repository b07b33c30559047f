"""Races of transformations on an NNX model."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any

from flax import nnx
import jax
import optax

from optax_boost import _base
from optax_boost.nnx import _adapter
from optax_boost.race import RaceResult
from optax_boost.race import _api


@_base.with_keywords_of(_api.race, "has_model_state")
def race(
  loss_fn: Callable[..., Any],
  make_model: Callable[[int], Any],
  data: Any,
  transformations: Mapping[str, optax.GradientTransformation],
  *,
  evaluate: Callable[..., Any] | None = None,
  wrt: Any = nnx.Param,
  full_grad_fn: Callable[..., Any] | None = None,
  **options: Any,
) -> RaceResult:
  """Trains a model with each of several transformations: :func:`optax_boost.race` for NNX.

  Args:
    loss_fn: ``loss_fn(model, batch)``.
    make_model: from the seed to a new model, which draws from that seed only.
    data: as for :func:`optax_boost.race`.
    transformations: by name.
    evaluate: ``evaluate(model)``, of a model in evaluation mode (``model.eval()``): a scalar, or a
      dictionary of scalars.
    wrt: the filter of the trained variables, as in ``nnx.Optimizer``.
    full_grad_fn: as for :func:`make_train_step`.
    **options: the other arguments of :func:`optax_boost.race`.

  Raises:
    ValueError: as :func:`optax_boost.race`; or the model's structure depends on the seed, or its
      forward pass creates or removes variables.

  Examples:
    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp, optax, optax_boost.nnx
    >>> x = jax.random.normal(jax.random.key(0), (32, 3))
    >>> result = optax_boost.nnx.race(
    ...   lambda model, batch: jnp.mean((model(batch)[:, 0] - batch[:, 0]) ** 2),
    ...   lambda seed: nnx.Linear(3, 1, rngs=nnx.Rngs(seed)),
    ...   x,
    ...   {"slow": optax.sgd(0.01), "fast": optax.sgd(0.1)},
    ...   steps=10,
    ...   progress=False,
    ... )
    >>> result.difference("fast", "training loss")[0] < 0
    True
  """
  _base.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  # A model is callable, too.
  if isinstance(make_model, nnx.Module):
    raise TypeError(
      "`make_model` must be a function from the seed to a new model, as `lambda seed:"
      f" Model(rngs=nnx.Rngs(seed))`; got a model, {_base.shorten(make_model)}."
    )
  _base.check_callable("make_model", make_model, "make_model(seed)")
  _adapter.check_filter("wrt", wrt)
  _base.check_callable("evaluate", evaluate, "evaluate(model)", optional=True)
  structures: list[Any] = []

  def init(seed: int) -> tuple[Any, Any]:
    model = make_model(seed)
    if not isinstance(model, nnx.Module):
      raise TypeError(
        f"`make_model` must return an NNX module; make_model({seed}) returned"
        f" {_base.shorten(model)}."
      )
    graphdef, params, model_state = _adapter.split(wrt, model)
    structures.append(graphdef)
    if graphdef != structures[0]:
      raise ValueError(
        f"`make_model` must return models of one structure; that of seed {seed} differs. Let it"
        " read nothing but the seed's random numbers."
      )
    return params, model_state

  # Dropout draws from the model's own streams; only a full pass over the data has a key.
  def pure_loss(params: Any, model_state: Any, batch: Any, *rng: jax.Array) -> Any:
    loss = _adapter.pure_loss(loss_fn, structures[0], wrt, may_change=False)
    return loss(params, model_state, batch, *rng)

  def metrics(params: Any, model_state: Any) -> Any:
    assert evaluate is not None
    (model,) = _adapter.merge(structures[0], params, model_state)
    model.eval()
    return evaluate(model)

  if callable(full_grad_fn):
    full_grad_fn = functools.partial(full_grad_fn, rng=jax.random.key(_adapter.PASS_SEED))
  return _api.race(
    pure_loss,
    _api.FromSeed(init),
    data,
    transformations,
    evaluate=None if evaluate is None else metrics,
    has_model_state=True,
    full_grad_fn=full_grad_fn,
    **options,
  )
