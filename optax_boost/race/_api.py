"""`race` in plain JAX, and its common part for the forms for Flax."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import inspect
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _tree
from optax_boost.race import _data
from optax_boost.race import _result
from optax_boost.race import _run

# The name of the metric where `evaluate` returns a scalar.
_UNNAMED = "evaluation"
# Integers of metrics are int32 in a jitted `evaluate`.
_LARGEST = 2**31


class Options(NamedTuple):
  """The arguments of :func:`race` that are the same for the forms for Flax."""

  data: Any
  transformations: Mapping[str, optax.GradientTransformation]
  steps: int
  batch_size: int | None
  seeds: int | Sequence[int]
  points: int
  jit_evaluate: bool
  full_grad_fn: Callable[..., Any] | None
  baseline: str | None
  seeds_at_once: int | None
  progress: bool


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
  compared seed by seed. They are compared three ways, each with the budget that the cheapest
  method has spent at its end:

  - at equal steps;
  - at equal gradient evaluations: a gradient of the loss on one batch counts one, a value of the
    loss without its gradient (a trial point of a line search) a third, as a backward pass takes
    about as long as two forward passes. Counted from the train step's program. The backward pass
    that :func:`freeze` leaves out is seen in the time only;
  - at equal wall time: of one seed alone, without compiling, evaluating and making batches. The
    methods take turns on the clock, in random order, and the median over several passes counts, so
    that other work of the machine slows all of them alike.

  The first seed is trained with all methods side by side, so one state of each must fit into
  memory. The other seeds are trained at once (``jax.vmap``) where that is faster. One at a time are
  trained: methods that freeze layers, methods with the loss inside a loop or conditional, all of
  them where there is a `full_grad_fn`, and on a CPU networks with convolutions.

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
    jit_evaluate: whether `evaluate` is jitted, which makes arrays that it closes over a part of the
      program. False for one that goes through held-out data batch by batch.
    has_model_state: whether the loss carries mutable statistics.
    full_grad_fn: as for :func:`make_train_step`, for :func:`svrg`.
    baseline: the method that the others are compared with; None: the first.
    seeds_at_once: the most seeds to train at once, faster or not (methods that freeze layers
      aside). More take more memory: 1 where several do not fit. None: as said above.
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
  check_optional_callable("evaluate", evaluate, "evaluate(params)")
  _base.check_bool("has_model_state", has_model_state)

  def start(seed: int) -> tuple[Any, Any]:
    initial = init_fn(jax.random.key(seed))
    if not has_model_state:
      return initial, None
    if not (isinstance(initial, tuple) and len(initial) == 2):
      raise TypeError(
        "`init_fn` must return (params, model_state) with has_model_state=True; got a"
        f" {type(initial).__name__}."
      )
    return initial

  def metrics(params: Any, model_state: Any) -> Any:
    assert evaluate is not None
    return evaluate(params, model_state) if has_model_state else evaluate(params)

  options = Options(
    data, transformations, steps, batch_size, seeds, points, jit_evaluate, full_grad_fn, baseline,
    seeds_at_once, progress
  )  # fmt: skip
  return race_from(
    loss_fn,
    start,
    None if evaluate is None else metrics,
    options,
    has_model_state=has_model_state,
    takes_rng=_takes_rng(loss_fn, 3 if has_model_state else 2),
  )


def race_from(
  loss_fn: Callable[..., Any],
  start: Callable[[int], tuple[Any, Any]],
  evaluate: Callable[[Any, Any], Any] | None,
  options: Options,
  *,
  has_model_state: bool,
  takes_rng: bool,
) -> _result.RaceResult:
  """:func:`race` with `start` from the seed, and `evaluate`, to and from params and statistics."""
  steps, points, seeds_at_once = options.steps, options.points, options.seeds_at_once
  baseline = _check_transformations(options.transformations, options.baseline)
  check_optional_callable("full_grad_fn", options.full_grad_fn)
  _base.check_bool("jit_evaluate", options.jit_evaluate)
  _base.check_bool("progress", options.progress)
  for name, value in (("steps", steps), ("points", points), ("seeds_at_once", seeds_at_once)):
    if value is not None or name != "seeds_at_once":
      _base.check_whole_number(name, value, static=True)
  chosen = _seeds(options.seeds)

  # Methods share a seed's initial params; the train step copies them.
  @functools.lru_cache(maxsize=1)
  def latest(seed: int) -> tuple[Any, Any]:
    params, model_state = start(seed)
    if not jax.tree.leaves(params):
      raise ValueError(f"`race` needs params to train; there are none for seed {seed}.")
    arrays = jax.tree.map(lambda p: np.asarray(p) if isinstance(p, float) else p, params)
    _tree.check_inexact(arrays, "race")
    return params, model_state

  def named(params: Any, model_state: Any) -> dict[str, Any]:
    assert evaluate is not None
    return _named(evaluate(params, model_state))

  measure = None if evaluate is None else (jax.jit(named) if options.jit_evaluate else named)
  problem = _run.Problem(
    loss_fn,
    latest,
    _data.batches_of(options.data, options.batch_size),
    measure,
    has_model_state,
    takes_rng,
    options.full_grad_fn,
  )
  every = -(-steps // points)
  eval_steps = [*range(every, steps, every), steps]
  methods = {
    name: _run.Method(problem, tx, eval_steps) for name, tx in options.transformations.items()
  }
  complete = True
  with _run.Bar(steps * len(chosen) * len(methods), options.progress) as bar:
    try:
      _run.run(methods, chosen, seeds_at_once, bar)
    except KeyboardInterrupt:
      complete = False
      if not _common(methods, eval_steps, chosen):
        raise
  recordings = {name: method.recording for name, method in methods.items()}
  finished, reached = _common(methods, eval_steps, chosen) or ([], 0)
  return _result.RaceResult(
    curves={
      name: _curves(recording, finished, eval_steps[:reached])
      for name, recording in recordings.items()
    },
    seeds=tuple(finished),
    baseline=baseline,
    complete=complete,
    device=jax.devices()[0].device_kind,
  )


def _common(
  methods: Mapping[str, _run.Method], eval_steps: Sequence[int], seeds: Sequence[int]
) -> tuple[list[int], int] | None:
  """The seeds that every method has finished, or the first one; and the points in common."""

  def reached(seed: int) -> int:
    # The loss is the last that is noted of a point.
    return min(len(method.recording.loss.get(seed, ())) for method in methods.values())

  finished = [seed for seed in seeds if reached(seed) == len(eval_steps)]
  if finished:
    return finished, len(eval_steps)
  return ([seeds[0]], reached(seeds[0])) if reached(seeds[0]) else None


def _curves(
  recording: _run.Recording, seeds: Sequence[int], eval_steps: Sequence[int]
) -> _result.RaceCurves:
  count = len(eval_steps)
  rows = [recording.metrics[seed][:count] for seed in seeds]
  return _result.RaceCurves(
    steps=np.array(eval_steps),
    loss=np.array([recording.loss[seed][:count] for seed in seeds]),
    metrics={name: np.array([[at[name] for at in row] for row in rows]) for name in rows[0][0]},
    gradient_evaluations=np.cumsum(recording.evaluations[:count]),
    seconds=np.cumsum(recording.seconds(np.diff(eval_steps, prepend=0).tolist())),
    compile_seconds=recording.compile_seconds,
    seeds_at_once=recording.seeds_at_once,
  )


def check_optional_callable(name: str, value: Any, form: str = "") -> None:
  """Checks an argument that is a function or None."""
  if value is not None:
    _base.check_callable(name, value, form)


def _check_transformations(transformations: Any, baseline: str | None) -> str:
  if not isinstance(transformations, Mapping):
    raise TypeError(
      "`transformations` must be a dictionary from names to transformations; got a"
      f" {type(transformations).__name__}."
    )
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
  if isinstance(seeds, Sequence | np.ndarray) and not isinstance(seeds, str):
    chosen = list(seeds)
    if not chosen:
      raise ValueError("`seeds` must be a number of seeds or a sequence of them; got none.")
    for seed in chosen:
      _base.check_whole_number("seeds", seed, minimum=0, static=True)
    if len(set(chosen)) < len(chosen):
      raise ValueError(f"`seeds` must differ; got {_base.shorten(chosen)}.")
    return [int(seed) for seed in chosen]
  _base.check_whole_number("seeds", seeds, static=True)
  return list(range(seeds))


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
    if isinstance(value, int) and not -_LARGEST < value < _LARGEST:
      raise ValueError(
        "`evaluate` must return integers that int32 holds; got"
        f" {_base.shorten(value)} for {name!r}."
      )
    if jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
      raise TypeError(f"`evaluate` must return real numbers; got a complex one for {name!r}.")
    if name == _result.LOSS:
      raise ValueError(
        f"`evaluate` must not call a metric {name!r}: the race measures that itself."
      )
  return dict(metrics)
