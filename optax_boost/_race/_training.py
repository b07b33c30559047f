"""Trains the methods of a race: counts gradients, then times steps, then trains other seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import inspect
import math
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _progress, _types
from optax_boost._race import _averaged_params, _result

# Timing is repeated until it has taken `_TIMED_SECONDS`, at most `_MOST_TIMED` times.
_TIMED_SECONDS, _MOST_TIMED = 2.0, 5
# The number of batches that are made before the clock starts.
_AHEAD = 8
# The cost of a loss without a gradient. A gradient, of cost 1, takes about as long as 3 losses.
_COST_OF_VALUE = 1 / 3
# The name of the metric if `evaluate` returns a scalar.
_UNNAMED = "evaluation"


@dataclasses.dataclass(frozen=True)
class Problem:
  """The problem of a race: arguments of `race`, and a function from a seed to endless batches."""

  loss_fn: _types.LossFn
  init_fn: Callable[[jax.Array], Any]
  batches: Callable[[int], Iterator[_types.Batch]]
  evaluate: _types.Closure | None
  steps: int
  points: int
  has_model_state: bool
  full_grad_fn: _types.Closure | None

  def __post_init__(self) -> None:
    _checks.check_callable("loss_fn", self.loss_fn, "loss_fn(params, batch)")
    _checks.check_callable("init_fn", self.init_fn, "init_fn(key)")
    _checks.check_callable("evaluate", self.evaluate, "evaluate(params)", optional=True)
    _checks.check_whole_number("steps", self.steps, static=True)
    _checks.check_whole_number("points", self.points, static=True)
    _checks.check_bool("has_model_state", self.has_model_state)

  @property
  def blocks(self) -> list[int]:
    """The number of steps in each block, from one point of the curves to the next."""
    every = -(-self.steps // self.points)
    return [every] * ((self.steps - 1) // every) + [(self.steps - 1) % every + 1]

  def train_step(
    self, loss_fn: _types.LossFn, tx: optax.GradientTransformation
  ) -> _train_step.TrainStep:
    return _train_step.make_train_step(
      loss_fn, tx, has_model_state=self.has_model_state, full_grad_fn=self.full_grad_fn
    )

  def start(self, seed: int) -> tuple[_types.Params, _types.ModelState | None]:
    """Returns the initial params, and the initial statistics or None if the loss takes none."""
    initial = self.init_fn(jax.random.key(seed))
    if not self.has_model_state:
      return initial, None
    if not (isinstance(initial, tuple) and len(initial) == 2):
      raise TypeError(
        "`init_fn` must return (params, model_state) with has_model_state=True; got a"
        f" {type(initial).__name__}."
      )
    return initial

  def key(self, seed: int) -> jax.Array | None:
    """Returns a seed's key for the training; None if the loss takes no key.

    `init_fn` gets another key.
    """
    takes_key = {"rng", "key"} & set(inspect.signature(self.loss_fn).parameters)
    return jax.random.fold_in(jax.random.key(seed), 1) if takes_key else None

  def measure(
    self, params: _types.Params, model_state: _types.ModelState | None
  ) -> dict[str, float]:
    """Calls `evaluate`; returns the metrics by name, as floats."""
    if self.evaluate is None:
      return {}
    output = self.evaluate(*((params, model_state) if self.has_model_state else (params,)))
    metrics = dict(output) if isinstance(output, Mapping) else {_UNNAMED: output}
    for name, value in metrics.items():
      number = isinstance(value, jax.Array | np.ndarray | np.generic | float | int)
      if not number or np.ndim(value) or not np.isrealobj(value) or name == _result.LOSS:
        raise TypeError(
          "`evaluate` must return a real number or a dictionary of them, without"
          f" '{_result.LOSS}'; got {_checks.shorten(value)} for {name!r}. Take the mean."
        )
    return {name: float(value) for name, value in metrics.items()}


class _Counter:
  """Adds up the costs of the losses and gradients that running programs evaluate."""

  def __init__(self) -> None:
    self._cost = 0.0

  def mark(self, loss_fn: _types.LossFn) -> _types.LossFn:
    """Returns a loss with the same results, whose values and backward passes are counted."""

    def identity(cost: float, x: Any) -> Any:
      jax.debug.callback(functools.partial(self._add, cost), x)
      return x

    marked = jax.custom_vjp(functools.partial(identity, _COST_OF_VALUE))
    marked.defvjp(lambda loss: (loss, None), lambda _, cotangent: (identity(1, cotangent),))

    def counted(*args: Any) -> Any:
      output = loss_fn(*args)
      return (marked(output[0]), *output[1:]) if isinstance(output, tuple) else marked(output)

    return counted

  def _add(self, cost: float, _: Any) -> None:
    self._cost += cost

  def total(self) -> float:
    """Waits for running programs; returns the costs so far, in gradient evaluations."""
    jax.effects_barrier()
    return self._cost


class _Training:
  """A training of one seed, or of several seeds at once."""

  def __init__(
    self,
    step: Callable[..., tuple[_train_step.TrainState, _types.Metrics]],
    state: _train_step.TrainState,
    feed: Iterator[_types.Batch],
    key: jax.Array | None,
  ):
    self._step, self._feed, self._key = step, feed, key
    self.state = state
    self.metrics: _types.Metrics = {}

  def advance(self, count: int) -> tuple[np.ndarray, float]:
    """Makes `count` steps; returns their losses ``(count, ...)`` and the seconds that they took."""
    losses, seconds = [], 0.0
    for start in range(0, count, _AHEAD):
      batches = [jax.device_put(next(self._feed)) for _ in range(min(_AHEAD, count - start))]
      jax.block_until_ready(batches)
      begin = time.perf_counter()
      for batch in batches:
        self.state, self.metrics = self._step(self.state, batch, self._key)
        losses.append(self.metrics["loss"])
      jax.block_until_ready(self.state)
      seconds += time.perf_counter() - begin
    return np.asarray(jax.device_get(losses), np.float64), seconds


class Method:
  """One transformation in the race, and its measurements."""

  def __init__(self, problem: Problem, tx: optax.GradientTransformation) -> None:
    self._problem, self._counter = problem, _Counter()
    self._step = problem.train_step(problem.loss_fn, tx)
    self._counting = problem.train_step(self._counter.mark(problem.loss_fn), tx)
    self._vmapped = jax.jit(jax.vmap(lambda *args: self._step(*args)), donate_argnums=0)
    # Whether the method freezes layers. Then the host chooses the program of each step by the
    # number of frozen groups. So the step can't be vmapped, and the first timed training includes
    # the time for compiling these programs.
    self.freezes = False
    # Whether `evaluate` gets an average of the params.
    self.is_averaged = False
    # The metrics at each point, by seed.
    self.points: dict[int, list[dict[str, float]]] = {}
    self._evaluations = np.full(len(problem.blocks), math.nan)
    # For each timed training, the seconds of each block of steps.
    self.block_seconds: list[np.ndarray] = []

  @property
  def spent(self) -> dict[str, np.ndarray]:
    """The totals at each point, by budget; a block's time is the shortest of all timings."""
    seconds = np.min(self.block_seconds or [self._evaluations * math.nan], axis=0)
    return {
      "steps": np.cumsum(self._problem.blocks),
      "gradient_evaluations": self._evaluations,
      "seconds": np.cumsum(seconds),
    }

  def curves(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns for each quantity an array with the curve of each of `seeds` as a row."""
    rows = [self.points[seed] for seed in seeds]
    return {name: np.array([[point[name] for point in row] for row in rows]) for name in rows[0][0]}

  def begin(self, seed: int, step: _train_step.TrainStep | None = None) -> _Training:
    """Returns a new training of one seed, with `step` or by default the method's step."""
    step, problem = step or self._step, self._problem
    state = step.init(*problem.start(seed))
    return _Training(step, state, problem.batches(seed), problem.key(seed))

  def count(self, seed: int) -> None:
    """Compiles the step, then trains a seed and stores the gradients spent at each point."""
    training = self.begin(seed)
    training.advance(2)
    self.freezes = any("frozen_groups" in name for name in training.metrics)
    self._evaluations = np.array(self._record([seed], self.begin(seed, self._counting)))

  def train(self, seeds: Sequence[int], at_once: bool) -> None:
    """Trains `seeds` and stores their curves; with `at_once`, vmaps the step if possible."""
    if not at_once or self.freezes or len(seeds) < 2:
      for seed in seeds:
        self._record([seed], self.begin(seed))
    else:
      problem = self._problem
      states = _stack_trees([self._step.init(*problem.start(seed)) for seed in seeds])
      feed = map(_stack_trees, zip(*map(problem.batches, seeds), strict=True))
      keys = _stack_trees([problem.key(seed) for seed in seeds])
      self._record(seeds, _Training(self._vmapped, states, feed, keys))

  def _record(self, seeds: Sequence[int], training: _Training) -> list[float]:
    """Trains, and stores each seed's metrics; returns the cost counted until each point."""
    points: dict[int, list[dict[str, float]]] = {seed: [] for seed in seeds}
    totals = []
    for length in self._problem.blocks:
      losses = training.advance(length)[0].reshape(length, -1)
      totals.append(self._counter.total())
      trained = self._params_to_evaluate(training.state, len(seeds))
      for i, seed in enumerate(seeds):
        model = trained if len(seeds) == 1 else jax.tree.map(lambda leaf, i=i: leaf[i], trained)
        with np.errstate(all="ignore"):
          loss = float(losses[:, i].mean())
        points[seed].append({**self._problem.measure(*model), _result.LOSS: loss})
        before, now = sorted(points[seed][0]), sorted(points[seed][-1])
        if before != now:
          raise ValueError(
            f"`evaluate` must return the same metrics each time; got {now} after {before}. Return"
            " nan for a metric without a value."
          )
    self.points |= points
    return totals

  def _params_to_evaluate(
    self, state: _train_step.TrainState, seeds: int
  ) -> tuple[_types.Params, _types.ModelState]:
    """Returns the params and statistics to evaluate, which are averages if the optimizer keeps any.

    For several seeds, all arrays have a leading axis of seeds.
    """
    average = _averaged_params.find_average(state.opt_state, state.params)
    self.is_averaged = average is not None and self._problem.evaluate is not None
    if average is None or not self.is_averaged:
      return state.params, state.model_state

    def read(state: _train_step.TrainState) -> tuple[_types.Params, _types.ModelState]:
      statistics = _averaged_params.averaged_statistics(state.opt_state, state.model_state)
      return average(state.opt_state, state.params), statistics

    return (read if seeds == 1 else jax.vmap(read))(state)


def _stack_trees(trees: Sequence[_types.Tree]) -> Any:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def train(
  methods: Mapping[str, Method],
  blocks: Sequence[int],
  seeds: Sequence[int],
  vmap_seeds: bool,
  progress: bool,
) -> bool:
  """Counts gradients and times steps on the first seed, then trains the other seeds.

  `blocks` are the numbers of steps between points of the curves. Returns True if all trainings
  ended. After Ctrl-C, returns False if every method has trained a seed, else raises
  KeyboardInterrupt.
  """
  first, *later_seeds = seeds
  counts = [(name, method.count, (first,)) for name, method in methods.items()]
  clock = ("all in turns", _clock, (methods, blocks, first))
  trains = [(name, method.train, (later_seeds, vmap_seeds)) for name, method in methods.items()]
  jobs: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [*counts, clock, *trains]
  try:
    for name, run, args in _progress.with_progress(jobs, progress, "race", "part"):
      try:
        run(*args)
      except Exception as error:
        error.add_note(f"`race` was training with the method {name!r}.")
        raise
  except KeyboardInterrupt:
    if not all(method.points for method in methods.values()):
      raise
    return False
  return True


def _clock(methods: Mapping[str, Method], blocks: Sequence[int], seed: int) -> None:
  """Times each block of steps with all methods, in turns.

  `blocks` has the number of steps of each block. In each block, the methods take turns in random
  order, so that other work on the machine slows all alike. Short trainings are timed several times.
  """
  shuffled, spent = random.Random(0), 0.0
  minimum = 2 if any(method.freezes for method in methods.values()) else 1
  for number in range(_MOST_TIMED):
    if number >= minimum and spent > _TIMED_SECONDS:
      return
    trainings = {name: method.begin(seed) for name, method in methods.items()}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for length in blocks:
      for name in shuffled.sample(list(methods), len(methods)):
        times[name].append(trainings[name].advance(length)[1])
    for name, method in methods.items():
      method.block_seconds.append(np.array(times[name]))
      spent += sum(times[name])
