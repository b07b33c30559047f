"""Trains the methods of a race: counts gradients, then trains all seeds and times them."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _progress, _tree_checks, _types
from optax_boost._race import _averaged_params, _result

# All seeds are timed again until timing has taken `_TIMED_SECONDS`, at most `_MOST_TIMED` times.
_TIMED_SECONDS, _MOST_TIMED = 2.0, 5
# The number of batches that are made before the clock starts.
_AHEAD = 8
# The cost of a loss without a gradient. A gradient, of cost 1, takes about as long as 3 losses.
_COST_OF_VALUE = 1 / 3
# The name of the metric if `evaluate` returns a scalar.
_UNNAMED = "evaluation"


# Makes the batch that a method trains with from a batch of the data and the number of the step.
BatchFn = Callable[[_types.Batch, int], _types.Batch]


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
    _checks.check_callable("init_fn", self.init_fn, "init_fn(key)", takes=1)
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
    step = _train_step.make_train_step(
      loss_fn, tx, has_model_state=self.has_model_state, full_grad_fn=self.full_grad_fn
    )
    # All methods get the `full_grad_fn` that some of them need.
    step.computation.warnings_given.add(_train_step.UNUSED_FULL_GRADIENT)
    return step

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
      if not number or np.ndim(value) or not np.isrealobj(value):
        raise TypeError(
          "`evaluate` must return a real number or a dictionary of them; got"
          f" {_checks.shorten(value)} for {name!r}. Take the mean."
        )
      if name in _result.COLUMNS:
        raise ValueError(
          f"`evaluate` must not name a metric {name!r}, as `race` does: {_result.COLUMNS} are"
          f" columns of its result. Call it 'test {name}', for example."
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
  """A training of one of `seeds`, or of all at once with a vmapped step; and what it measures."""

  def __init__(
    self,
    step: Callable[..., tuple[_train_step.TrainState, _types.Metrics]],
    state: _train_step.TrainState,
    feed: Iterator[_types.Batch],
    key: jax.Array | None,
    seeds: Sequence[int],
  ):
    self._step, self._feed, self._key = step, feed, key
    self.state, self.seeds = state, seeds
    self.metrics: _types.Metrics = {}
    # The metrics of each seed at each point, and the seconds from each point to the next.
    self.points: dict[int, list[dict[str, float]]] = {seed: [] for seed in seeds}
    self.seconds: list[float] = []

  def advance(self, count: int, compiled: set[Hashable] | None = None) -> np.ndarray:
    """Makes `count` steps and times them; returns their losses ``(count, seeds)``.

    `compiled` has the types of the batches for which the step is compiled. For another type, a copy
    of the state makes a step before the clock starts. None: compiling is on the clock.
    """
    losses, seconds = [], 0.0
    for start in range(0, count, _AHEAD):
      batches = list(itertools.islice(self._feed, min(_AHEAD, count - start)))
      for batch in batches:
        _tree_checks.check_traceable("batch", batch)
      batches = jax.device_put(batches)
      for batch in batches:
        type_ = (jax.tree.structure(batch), *map(jax.typeof, jax.tree.leaves(batch)))
        if compiled is not None and type_ not in compiled:
          self._step(jax.tree.map(jnp.copy, self.state), batch, self._key)
          compiled.add(type_)
      jax.block_until_ready((batches, self.state))
      begin = time.perf_counter()
      for batch in batches:
        self.state, self.metrics = self._step(self.state, batch, self._key)
        losses.append(self.metrics["loss"])
      jax.block_until_ready(self.state)
      seconds += time.perf_counter() - begin
    self.seconds.append(seconds)
    return np.asarray(jax.device_get(losses), np.float64).reshape(count, -1)


class Method:
  """One transformation in the race, and its measurements."""

  def __init__(self, problem: Problem, tx: optax.GradientTransformation, batch_fn: BatchFn) -> None:
    self._problem, self._batch_fn, self._counter = problem, batch_fn, _Counter()
    self._step = problem.train_step(problem.loss_fn, tx)
    self._counting = problem.train_step(self._counter.mark(problem.loss_fn), tx)
    self._vmapped = jax.jit(jax.vmap(lambda *args: self._step(*args)), donate_argnums=0)
    # The types of the batches for which `_step` is compiled.
    self._compiled: set[Hashable] = set()
    # Whether the method freezes layers. Then the host chooses the program of each step by the
    # number of frozen groups, so the step can't be vmapped.
    self._freezes = False
    # Whether `evaluate` gets an average of the params.
    self.is_averaged = False
    self._evaluations = np.full(len(problem.blocks), math.nan)
    # By seed: the metrics at each point, and the seconds from each point to the next.
    self.points: dict[int, list[dict[str, float]]] = {}
    self._seconds: dict[int, np.ndarray] = {}

  def spent(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns the totals at each point, by budget; the seconds have a row for each of `seeds`."""
    untimed = np.full(len(self._problem.blocks), math.nan)
    return {
      "steps": np.cumsum(self._problem.blocks),
      "gradient_evaluations": self._evaluations,
      "seconds": np.cumsum([self._seconds.get(seed, untimed) for seed in seeds], axis=1),
    }

  def curves(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns for each quantity an array with the curve of each of `seeds` as a row."""
    rows = [self.points[seed] for seed in seeds]
    return {name: np.array([[point[name] for point in row] for row in rows]) for name in rows[0][0]}

  def begin(self, seed: int, step: _train_step.TrainStep | None = None) -> _Training:
    """Returns a new training of one seed, with `step` or by default the method's step."""
    step, problem = step or self._step, self._problem
    state = step.init(*problem.start(seed))
    return _Training(step, state, self._batches(seed), problem.key(seed), [seed])

  def _batches(self, seed: int) -> Iterator[_types.Batch]:
    return map(self._batch_fn, self._problem.batches(seed), itertools.count())

  def count(self, seed: int) -> None:
    """Trains a seed, and stores the gradients spent at each point."""
    training, totals = self.begin(seed, self._counting), []
    for length in self._problem.blocks:
      training.advance(length)
      totals.append(self._counter.total())
    self._evaluations = np.array(totals)
    self._freezes = any("frozen_groups" in name for name in training.metrics)
    if self._freezes:
      # Compiles a program for each number of frozen groups.
      self.begin(seed).advance(self._problem.steps)

  def advance(self, training: _Training, length: int, measures: bool = True) -> None:
    """Makes `length` steps, whose time is without compiling, and then measures."""
    losses = training.advance(length, self._compiled)
    if measures:
      self._measure(training, losses)

  def store(self, training: _Training) -> None:
    """Stores what the training of one seed measured; a block's time is the shortest so far."""
    (seed,), seconds = training.seeds, np.array(training.seconds)
    self.points |= {seed: points for seed, points in training.points.items() if points}
    self._seconds[seed] = np.minimum(seconds, self._seconds.get(seed, seconds))

  def train_at_once(self, seeds: Sequence[int]) -> None:
    """Trains `seeds`, with a vmapped step if possible, and stores their curves, but no times."""
    problem = self._problem
    if self._freezes or len(seeds) < 2:
      trainings = [self.begin(seed) for seed in seeds]
    else:
      states = _stack_trees([self._step.init(*problem.start(seed)) for seed in seeds])
      feed = map(_stack_trees, zip(*map(self._batches, seeds), strict=True))
      keys = _stack_trees([problem.key(seed) for seed in seeds])
      trainings = [_Training(self._vmapped, states, feed, keys, seeds)]
    for training in trainings:
      for length in problem.blocks:
        self._measure(training, training.advance(length))
      self.points |= training.points

  def _measure(self, training: _Training, losses: np.ndarray) -> None:
    """Appends each seed's metrics to the points of the training."""
    trained, seeds = self._params_to_evaluate(training), training.seeds
    for i, points in enumerate(training.points.values()):
      model = trained if len(seeds) == 1 else jax.tree.map(lambda leaf, i=i: leaf[i], trained)
      with np.errstate(all="ignore"):
        loss = float(losses[:, i].mean())
      points.append({**self._problem.measure(*model), _result.LOSS: loss})
      before, now = sorted(points[0]), sorted(points[-1])
      if before != now:
        raise ValueError(
          f"`evaluate` must return the same metrics each time; got {now} after {before}. Return"
          " nan for a metric without a value."
        )

  def _params_to_evaluate(self, training: _Training) -> tuple[_types.Params, _types.ModelState]:
    """Returns the params and statistics to evaluate, which are averages if the optimizer keeps any.

    For several seeds, all arrays have a leading axis of seeds.
    """
    state = training.state
    average = _averaged_params.find_average(state.opt_state, state.params)
    self.is_averaged = average is not None and self._problem.evaluate is not None
    if average is None or not self.is_averaged:
      return state.params, state.model_state

    def read(state: _train_step.TrainState) -> tuple[_types.Params, _types.ModelState]:
      statistics = _averaged_params.averaged_statistics(state.opt_state, state.model_state)
      return average(state.opt_state, state.params), statistics

    return (read if len(training.seeds) == 1 else jax.vmap(read))(state)


def _stack_trees(trees: Sequence[_types.Tree]) -> Any:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def train(
  methods: Mapping[str, Method],
  blocks: Sequence[int],
  seeds: Sequence[int],
  vmap_seeds: bool,
  progress: bool,
) -> bool:
  """Counts gradients on the first seed, then trains all seeds and times them.

  `blocks` are the numbers of steps between points of the curves. Returns True if all trainings
  ended. After Ctrl-C, returns False if every method has trained a seed, else raises
  KeyboardInterrupt.
  """
  turns = _Turns(methods, blocks)
  jobs = [functools.partial(_naming(n)(method.count), seeds[0]) for n, method in methods.items()]
  if vmap_seeds:
    jobs += [functools.partial(_naming(n)(m.train_at_once), seeds) for n, m in methods.items()]
  else:
    jobs += [functools.partial(turns.train, seed) for seed in seeds]
    jobs += [functools.partial(turns.time_again, seeds)]
  try:
    for job in _progress.with_progress(jobs, progress, "race", "part"):
      job()
  except KeyboardInterrupt:
    if not all(method.points for method in methods.values()):
      raise
    return False
  return True


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
  """Adds the name of the method to an error."""
  try:
    yield
  except Exception as error:
    error.add_note(f"`race` was training with the method {name!r}.")
    raise


class _Turns:
  """Trains a seed with all methods in turns.

  After each block of steps, the methods take turns in random order, so that other work on the
  machine slows all alike.
  """

  def __init__(self, methods: Mapping[str, Method], blocks: Sequence[int]) -> None:
    self._methods, self._blocks, self._random = methods, blocks, random.Random(0)
    self._spent = 0.0

  def train(self, seed: int, measures: bool = True) -> None:
    """Trains a seed with each method, and stores its curves and its time."""
    trainings = {name: method.begin(seed) for name, method in self._methods.items()}
    for length in self._blocks:
      for name in self._random.sample(list(trainings), len(trainings)):
        with _naming(name):
          self._methods[name].advance(trainings[name], length, measures)
    for name, training in trainings.items():
      self._methods[name].store(training)
      self._spent += sum(training.seconds)

  def time_again(self, seeds: Sequence[int]) -> None:
    """Times short trainings again."""
    for _ in range(1, _MOST_TIMED):
      if self._spent > _TIMED_SECONDS:
        return
      for seed in seeds:
        self.train(seed, measures=False)
