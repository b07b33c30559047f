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


def race(
  module: nn.Module,
  loss_fn: Callable[..., Any],
  init_fn: Callable[[jax.Array], Any],
  data: Any,
  transformations: Mapping[str, optax.GradientTransformation],
  *,
  steps: int,
  rngs: Sequence[str] = ("dropout",),
  batch_size: int | None = None,
  seeds: int | Sequence[int] = 3,
  evaluate: Callable[..., Any] | None = None,
  points: int = 40,
  jit_evaluate: bool = True,
  full_grad_fn: Callable[..., Any] | None = None,
  baseline: str | None = None,
  seeds_at_once: int | None = None,
  progress: bool = True,
) -> RaceResult:
  """Trains a module with each of several transformations: :func:`optax_boost.race` for Linen.

  Args:
    module: the Linen module.
    loss_fn: ``loss_fn(model, batch)``, as for :func:`make_train_step`.
    init_fn: from a key to the variables that ``module.init`` returns.
    rngs: the names of the module's rng streams.
    evaluate: ``evaluate(model)``, where ``model(x, ...)`` applies the module without rngs: a
      scalar, or a dictionary of scalars. Pass the module's argument for evaluation, as ``train``.
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
    ValueError: an argument is out of range.

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
  loss = _adapter.pure_loss(module, loss_fn, rngs)
  _base.check_callable("init_fn", init_fn, "init_fn(key)")
  _api.check_optional_callable("evaluate", evaluate, "evaluate(model)")

  def start(seed: int) -> tuple[Any, Any]:
    return _adapter.split_variables(init_fn(jax.random.key(seed)), "init_fn(key)")

  def metrics(params: Any, collections: Any) -> Any:
    assert evaluate is not None
    return evaluate(_adapter.BoundModel(module, params, collections, {}))

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
    takes_rng=True,
  )
