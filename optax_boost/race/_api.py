"""`race` in plain JAX, and its common part for the forms for Flax."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import importlib.util
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _tree
from optax_boost.race import _curves
from optax_boost.race import _data
from optax_boost.race import _result
from optax_boost.race import _run

# The name of the metric where `evaluate` returns a scalar.
_UNNAMED = "evaluation"


class FromSeed(functools.partial[Any]):
  """An `init_fn` that takes the seed itself, as one that makes NNX models does."""


def race(
  loss_fn: Callable[..., Any],
  init_fn: Callable[[jax.Array], Any],
  data: Any,
  transformations: Mapping[str, optax.GradientTransformation],
  *,
  steps: int,
  batch_size: int | None = None,
  seeds: int | Sequence[int] = 3,
  evaluate: Callable[..., Any] | None = None,
  points: int = 40,
  jit_evaluate: bool = True,
  has_model_state: bool = False,
  full_grad_fn: Callable[..., Any] | None = None,
  baseline: str | None = None,
  seeds_at_once: int | None = None,
  progress: bool = True,
) -> _result.RaceResult:
  """Trains with each of several transformations, and compares them.

  A seed gives all methods the same initial params, batches and dropout masks, so that methods are
  compared seed by seed, each time with the budget that the cheapest method spends:

  - at equal steps;
  - at equal gradient evaluations, counted from the train step's program: a gradient of the loss on
    one batch counts one, a value of the loss alone (a trial point of a line search) a third. The
    backward pass that :func:`freeze_layers` leaves out shows in the time only;
  - at equal wall time of one seed alone, without compiling, evaluating and making batches. The
    methods take turns on the clock, in random order; the median over several passes counts.

  The first seed is trained with all methods side by side, so one state of each must fit into
  memory. The other seeds are trained at once (``jax.vmap``) where that is faster; one at a time
  with methods that freeze layers or have the loss inside a loop or conditional, with a
  `full_grad_fn`, and on a CPU with convolutions.

  Args:
    loss_fn: as for :func:`make_train_step`: ``loss_fn(params, batch)``, with `has_model_state`
      ``loss_fn(params, model_state, batch)``. A further argument that has no default, or is called
      ``rng`` or ``key``, gets a key.
    init_fn: from a key to the initial params; with `has_model_state`, to ``(params,
      model_state)``.
    data: a tree of arrays with a leading axis of examples, which are shuffled for each seed and
      epoch and cut into whole batches; or a function from the seed to an iterable of batches, which
      is called again when it ends.
    transformations: by name. Make learning-rate schedules for `steps` steps.
    steps: the length of each training.
    batch_size: examples in a batch; None: all of them. Not with a function as `data`.
    seeds: the number of seeds, from 0, or the seeds. More make the intervals narrower; 3 is few.
    evaluate: ``evaluate(params)``, with `has_model_state` ``evaluate(params, model_state)``, on
      held-out data: a scalar, or a dictionary of scalars.
    points: the most points of a curve. More cost more evaluations.
    jit_evaluate: whether `evaluate` is jitted, with the arrays that it closes over as constants.
      False for one that goes through held-out data batch by batch.
    has_model_state: whether the loss carries mutable statistics.
    full_grad_fn: as for :func:`make_train_step`, for :func:`svrg`.
    baseline: the method that the others are compared with; None: the first.
    seeds_at_once: the most seeds to train at once, faster or not (methods that freeze layers
      aside). More take more memory: 1 where several do not fit. None: see above.
    progress: whether to show a progress bar; needs ``tqdm``.

  Returns:
    A :class:`RaceResult`. A seed whose loss is not finite at the end is reported as diverged and
    left out of means. After Ctrl-C it holds the seeds that every method has finished, or else the
    points of the first seed that every method has reached, and its `complete` is False.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: an argument is out of range, or does not fit the others.
    KeyboardInterrupt: interrupted before the first point.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> x = jax.random.normal(jax.random.key(0), (64, 3))
    >>> def loss_fn(w, batch):
    ...   return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> result = optax_boost.race(
    ...   loss_fn,
    ...   lambda key: jax.random.normal(key, (3,)),
    ...   {"x": x, "y": x @ jnp.array([1.0, -2.0, 0.5])},
    ...   {"sgd": optax.sgd(0.05), "lbfgs": optax.lbfgs()},
    ...   steps=20,
    ...   evaluate=lambda w: jnp.mean((x @ (w - jnp.array([1.0, -2.0, 0.5]))) ** 2),
    ...   progress=False,
    ... )
    >>> [result.curves[name].gradient_evaluations_per_step > 1 for name in ("sgd", "lbfgs")]
    [False, True]
    >>> mean, half_of_the_interval = result.difference(
    ...   "lbfgs", "evaluation", of="gradient_evaluations"
    ... )
    >>> mean < 0
    True
  """
  _base.check_callable("loss_fn", loss_fn, "loss_fn(params, batch)")
  _base.check_callable("init_fn", init_fn, "init_fn(key)")
  _base.check_callable("evaluate", evaluate, "evaluate(params)", optional=True)
  _base.check_callable("full_grad_fn", full_grad_fn, optional=True)
  _base.check_bool("has_model_state", has_model_state)
  _base.check_bool("jit_evaluate", jit_evaluate)
  _base.check_bool("progress", progress)
  _base.check_whole_number("steps", steps, static=True)
  _base.check_whole_number("points", points, static=True)
  if seeds_at_once is not None:
    _base.check_whole_number("seeds_at_once", seeds_at_once, static=True)
  baseline = _check_transformations(transformations, baseline)
  chosen = _seeds(seeds)

  # Methods share a seed's initial params; the train step copies them.
  @functools.lru_cache(maxsize=1)
  def start(seed: int) -> tuple[Any, Any]:
    source: Any = seed if isinstance(init_fn, FromSeed) else jax.random.key(seed)
    initial = init_fn(source)
    if has_model_state and not (isinstance(initial, tuple) and len(initial) == 2):
      raise TypeError(
        "`init_fn` must return (params, model_state) with has_model_state=True; got a"
        f" {type(initial).__name__}."
      )
    params, model_state = initial if has_model_state else (initial, None)
    if not jax.tree.leaves(params):
      raise ValueError(f"`race` needs params to train; there are none for seed {seed}.")
    arrays = jax.tree.map(lambda p: np.asarray(p) if isinstance(p, float) else p, params)
    _tree.check_inexact(arrays, "race", _tree.KEEP_OUT)
    return params, model_state

  def measure(params: Any, model_state: Any) -> dict[str, Any]:
    if evaluate is None:
      return {}
    return _named(evaluate(params, model_state) if has_model_state else evaluate(params))

  problem = _run.Problem(
    loss_fn,
    start,
    _data.batches_of(data, batch_size),
    jax.jit(measure) if evaluate is not None and jit_evaluate else measure,
    has_model_state,
    _takes_rng(loss_fn, 3 if has_model_state else 2),
    full_grad_fn,
  )
  every = -(-steps // points)
  eval_steps = [*range(every, steps, every), steps]
  methods = {name: _run.Method(problem, tx, eval_steps) for name, tx in transformations.items()}
  complete = True
  try:
    with _bar(steps * len(chosen) * len(methods), progress) as bar:
      for activity, made in _run.train(methods, chosen, seeds_at_once):
        if bar is not None:
          bar.set_description(activity)
          bar.update(made)
  except KeyboardInterrupt:
    complete = False
    if not _common(methods, eval_steps, chosen)[1]:
      raise
  finished, reached = _common(methods, eval_steps, chosen)
  return _result.RaceResult(
    {name: _curves_of(method, finished, eval_steps[:reached]) for name, method in methods.items()},
    tuple(finished),
    baseline,
    complete,
    jax.devices()[0].device_kind,
  )


def _bar(total: int, progress: bool) -> Any:
  """A progress bar that counts steps, or None where there is no tqdm."""
  if not progress or importlib.util.find_spec("tqdm") is None:
    return contextlib.nullcontext()
  from tqdm import tqdm

  return tqdm(total=total, unit="step")


def _common(
  methods: Mapping[str, _run.Method], eval_steps: Sequence[int], seeds: list[int]
) -> tuple[list[int], int]:
  """The seeds that every method has finished, or else the first; and the points in common."""

  def reached(seed: int) -> int:
    return min(len(method.curves.get(seed, ())) for method in methods.values())

  finished = [seed for seed in seeds if reached(seed) == len(eval_steps)] or seeds[:1]
  return finished, reached(finished[0])


def _curves_of(
  method: _run.Method, seeds: Sequence[int], eval_steps: Sequence[int]
) -> _curves.RaceCurves:
  count = len(eval_steps)
  rows = [method.curves[seed][:count] for seed in seeds]
  metrics = {name: np.array([[at[name] for at in row] for row in rows]) for name in rows[0][0]}
  return _curves.RaceCurves(
    steps=np.array(eval_steps),
    loss=metrics.pop(_curves.LOSS),
    metrics=metrics,
    gradient_evaluations=np.cumsum(method.evaluations[:count]),
    seconds=np.cumsum(method.seconds(count)),
    compile_seconds=method.compile_seconds,
    seeds_at_once=method.seeds_at_once,
  )


def _check_transformations(transformations: Any, baseline: str | None) -> str:
  words = "a dictionary from names to transformations"
  _base.check_type("transformations", transformations, Mapping, words)
  if not transformations:
    raise ValueError("`transformations` must hold at least one transformation; got an empty one.")
  for name, tx in transformations.items():
    if not isinstance(name, str):
      raise TypeError(f"`transformations` must have strings as names; got {_base.shorten(name)}.")
    _base.check_transformation(f"transformations[{name!r}]", tx)
  if baseline is None:
    return next(iter(transformations))
  _base.check_name("baseline", baseline, list(transformations))
  return baseline


def _seeds(seeds: int | Sequence[int]) -> list[int]:
  if _base.is_any_array(seeds) and np.ndim(seeds):
    seeds = np.asarray(seeds).tolist()
  if not isinstance(seeds, Sequence) or isinstance(seeds, str):
    _base.check_whole_number("seeds", seeds, static=True)
    return list(range(seeds))  # type: ignore[arg-type]
  chosen = list(seeds)
  if not chosen:
    raise ValueError("`seeds` must be a number of seeds or a sequence of them; got none.")
  _result.check_seeds(chosen)
  return [int(seed) for seed in chosen]


def _takes_rng(loss_fn: Callable[..., Any], position: int) -> bool:
  """Whether the loss takes a key as the argument at `position`."""
  try:
    parameters = inspect.signature(loss_fn).parameters.values()
  except (TypeError, ValueError):
    return False
  kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  further = [p for p in parameters if p.kind in kinds][position:]
  return bool(further) and (
    further[0].default is inspect.Parameter.empty or further[0].name in ("rng", "key")
  )


def _named(output: Any) -> dict[str, Any]:
  """Metrics by name, each a scalar."""
  metrics = output if isinstance(output, Mapping) else {_UNNAMED: output}
  for name, value in metrics.items():
    if not isinstance(name, str):
      raise TypeError(
        f"`evaluate` must return metrics under names that are strings; got {_base.shorten(name)}."
      )
    if np.shape(value) != () or not isinstance(
      value, jax.Array | np.ndarray | np.generic | float | int
    ):
      raise TypeError(
        "`evaluate` must return a scalar or a dictionary of scalars; got"
        f" {type(value).__name__} of shape {np.shape(value)} for {name!r}. Take the mean."
      )
    # A jitted `evaluate` makes int32 of integers.
    if isinstance(value, int) and abs(value) > _base.LARGEST_COUNT:
      raise ValueError(
        "`evaluate` must return integers that int32 holds; got"
        f" {_base.shorten(value)} for {name!r}."
      )
    if jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
      raise TypeError(f"`evaluate` must return real numbers; got a complex one for {name!r}.")
    if name == _curves.LOSS:
      raise ValueError(
        f"`evaluate` must not call a metric {name!r}: the race measures that itself."
      )
  return dict(metrics)
