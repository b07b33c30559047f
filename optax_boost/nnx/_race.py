"""Races of transformations on an NNX model."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

from flax import nnx
import jax
import optax

from optax_boost import _base
from optax_boost.nnx import _adapter
from optax_boost.race import RaceResult
from optax_boost.race import _api


def race(
  loss_fn: Callable[..., Any],
  make_model: Callable[[int], Any],
  data: Any,
  transformations: Mapping[str, optax.GradientTransformation],
  *,
  steps: int,
  batch_size: int | None = None,
  seeds: int | Sequence[int] = 3,
  evaluate: Callable[..., Any] | None = None,
  points: int = 40,
  jit_evaluate: bool = True,
  wrt: Any = nnx.Param,
  full_grad_fn: Callable[..., Any] | None = None,
  baseline: str | None = None,
  seeds_at_once: int | None = None,
  progress: bool = True,
) -> RaceResult:
  """Trains a model with each of several transformations: :func:`optax_boost.race` for NNX.

  Args:
    loss_fn: ``loss_fn(model, batch)``.
    make_model: from the seed to a new model, which draws from that seed only.
    evaluate: ``evaluate(model)``, of a model in evaluation mode (``model.eval()``): a scalar, or a
      dictionary of scalars.
    wrt: the filter of the trained variables, as in ``nnx.Optimizer``.
    data: see :func:`optax_boost.race`, as for the rest.
    transformations: by name.
    steps: the length of each training.
    batch_size: examples in a batch.
    seeds: the number of seeds, or the seeds.
    points: the most points of a curve.
    jit_evaluate: whether `evaluate` is jitted.
    full_grad_fn: as for :func:`make_train_step`.
    baseline: the method that the others are compared with; None: the first.
    seeds_at_once: the most seeds to train at once; None: all others where that is faster.
    progress: whether to show a progress bar.

  Returns:
    A :class:`optax_boost.race.RaceResult`.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: an argument is out of range, or the model's structure depends on the seed.

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
  _base.check_callable("make_model", make_model, "make_model(seed)")
  _api.check_optional_callable("evaluate", evaluate, "evaluate(model)")
  _api.check_optional_callable("full_grad_fn", full_grad_fn)
  _adapter.check_filter("wrt", wrt)
  structures: list[Any] = []

  def start(seed: int) -> tuple[Any, Any]:
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

  def loss(*args: Any) -> Any:
    return _adapter.pure_loss(loss_fn, structures[0], wrt)(*args)

  def metrics(params: Any, model_state: Any) -> Any:
    assert evaluate is not None
    (model,) = _adapter.merge(structures[0], params, model_state)
    model.eval()
    return evaluate(model)

  if full_grad_fn is not None:
    full_grad_fn = functools.partial(full_grad_fn, rng=jax.random.key(_adapter.PASS_SEED))
  options = _api.Options(
    data, transformations, steps, batch_size, seeds, points, jit_evaluate, full_grad_fn, baseline,
    seeds_at_once, progress
  )  # fmt: skip
  return _api.race_from(
    loss,
    start,
    None if evaluate is None else metrics,
    options,
    has_model_state=True,
    takes_rng=False,
  )
