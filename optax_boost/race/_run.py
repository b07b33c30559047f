"""The training itself: who runs when, on the clock or not, and how many seeds at once.

The seeds that a method runs one at a time are run *interleaved*: from one point of the curves to
the next, every method once, in random order. So other work of the machine slows all methods alike,
and the same steps are timed of each: a schedule that makes late steps cheaper is seen. The median
over these passes is a method's time from point to point. Every method runs at least its first seed
this way, and again where that was too short to be timed well; its other seeds then run all at once,
where that is faster, compiling included.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import itertools
import math
import random
import time
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _jaxpr
from optax_boost import _train_step
from optax_boost.race import _cost
from optax_boost.race import _curves
from optax_boost.race import _data

# A pass over all methods is repeated until the clock has run for so long, up to so many passes.
_TIMED_SECONDS = 2.0
_MOST_TIMED = 5
# Batches are made ahead, so that the clock doesn't see it: so many, or so many bytes.
_AHEAD = 16
_AHEAD_BYTES = 64 * 2**20
# Steps that say whether training several seeds at once is faster.
_TRIAL_STEPS = 3


class Problem(NamedTuple):
  """The training problem; `start` and `batches` take the seed."""

  loss_fn: Callable[..., Any]
  # To the initial params and statistics (None without any).
  start: Callable[[int], tuple[Any, Any]]
  batches: _data.Batches
  evaluate: Callable[[Any, Any], Mapping[str, Any]]
  has_model_state: bool
  takes_rng: bool
  full_grad_fn: Callable[..., Any] | None

  def key(self, seed: int) -> jax.Array | None:
    """The key of a seed's training, other than the key of its initial params."""
    return jax.random.fold_in(jax.random.key(seed), 1) if self.takes_rng else None

  def train_step(
    self, loss_fn: Callable[..., Any], tx: optax.GradientTransformation
  ) -> _train_step.TrainStep:
    """The train step for one method."""
    return _train_step.make_train_step(
      loss_fn, tx, has_model_state=self.has_model_state, full_grad_fn=self.full_grad_fn
    )


def seconds_per_block(
  passes: Sequence[Sequence[float]],
  rough: Sequence[float],
  lengths: Sequence[int],
  steady: bool,
) -> np.ndarray:
  """The seconds for each of `lengths` steps: the median over the passes, else the rough pass.

  Where neither is known, the mean of the others, and everywhere if `steady`; nan without any.
  """
  count, steps = len(lengths), np.asarray(lengths)
  table = np.array([[*times, *[math.nan] * count][:count] for times in [[], *passes, rough]])
  medians = np.ma.median(np.ma.masked_invalid(table[:-1]), axis=0).filled(math.nan)
  seconds = np.where(np.isnan(medians), table[-1], medians)
  timed = ~np.isnan(seconds)
  if not timed.any():
    return seconds
  average = seconds[timed].sum() / steps[timed].sum() * steps
  return average if steady else np.where(timed, seconds, average)


class _Training:
  """A training under way, of one seed or of several at once."""

  def __init__(self, step: Callable[..., Any], state: Any, feed: Iterator[Any], key: Any):
    self._step, self._feed, self._key = step, feed, key
    self.state = state

  def advance(
    self, count: int, versions: Callable[[], int] = lambda: 0
  ) -> tuple[np.ndarray, float]:
    """Makes steps; returns their losses and the time.

    Steps during which `versions` (compiled programs) grows are not timed.
    """
    losses: list[Any] = []
    seconds, timed = 0.0, 0
    while len(losses) < count:
      batches = self._ahead(count - len(losses))
      before, begin = versions(), time.perf_counter()
      for batch in batches:
        self.state, metrics = self._step(self.state, batch, self._key)
        losses.append(metrics["loss"])
      jax.block_until_ready(self.state)
      if versions() == before:
        seconds += time.perf_counter() - begin
        timed += len(batches)
    total = seconds / timed * count if timed else math.nan
    return np.asarray(jax.device_get(losses), np.float64), total

  def _ahead(self, most: int) -> list[Any]:
    batches = [jax.device_put(next(self._feed))]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(batches[0]))
    number = min(most, _AHEAD, 1 + _AHEAD_BYTES // max(1, size))
    batches += [jax.device_put(batch) for batch in itertools.islice(self._feed, number - 1)]
    return jax.block_until_ready(batches)


class Method:
  """One transformation in the race; curves have a point at each of `eval_steps`.

  Lists of the curves and times have a value for each point reached so far.
  """

  def __init__(
    self, problem: Problem, tx: optax.GradientTransformation, eval_steps: Sequence[int]
  ) -> None:
    self._problem = problem
    self._lengths = np.diff(eval_steps, prepend=0).tolist()
    self._counter = _cost.Counter()
    self._plain = problem.train_step(problem.loss_fn, tx)
    self._marked = problem.train_step(self._counter.mark(problem.loss_fn), tx)
    self._at_once = jax.jit(jax.vmap(lambda *args: self._plain(*args)), donate_argnums=0)
    # The evaluations of each step; None where they vary.
    self._per_step: _cost.Evaluations | None = None
    # Whether its seeds must be trained one at a time, and whether they had better be.
    self.always_alone = self.better_alone = False
    # By seed, the training loss among the metrics.
    self.curves: dict[int, list[dict[str, float]]] = {}
    self.evaluations: list[float] = []
    # Seconds since the point before, in each pass on the clock; nan: a step was compiled.
    self.passes: list[list[float]] = []
    # The same of a pass that counted gradients, which takes longer.
    self._rough: list[float] = []
    self.compile_seconds = math.nan
    self.seeds_at_once = 1
    # Of the metrics.
    self._names: list[str] = []

  def compile(self, seed: int) -> None:
    """Compiles the step and counts its gradients, as far as its program tells."""
    problem, training = self._problem, self._begin([seed])
    batch = next(problem.batches(seed))
    jaxpr = self._marked.trace(training.state, batch, problem.key(seed)).jaxpr
    traced = _cost.traced(jaxpr)
    # A step without any gradient is one whose marks the trace does not show.
    self._per_step = traced if traced is not None and traced.gradients else None
    # The host chooses the compiled step by the depth.
    frozen = optax.tree.get_all_with_path(training.state.opt_state, "frozen_groups")
    self.always_alone = bool(frozen)
    self.better_alone = (
      # A vectorized conditional runs all of its branches.
      self._per_step is None
      # Its data would be built into the program.
      or problem.full_grad_fn is not None
      # Weights of their own for each seed make it a slow grouped convolution.
      or (jax.default_backend() == "cpu" and _jaxpr.has_convolution(jaxpr))
    )
    self.compile_seconds = self._time_to_compile(training)
    self._evaluate(training.state.params, training.state.model_state)
    if self._per_step is None:
      self._begin([seed], self._marked).advance(1)
      self._counter.take()

  def _time_to_compile(self, training: _Training) -> float:
    """The time of the first steps, each of which compiled a program, beyond that of the next."""
    times: list[float] = []
    compiled = True
    while compiled and len(times) < _TRIAL_STEPS + 1:
      before = self._plain.cache_size()
      times.append(training.advance(1)[1])
      compiled = self._plain.cache_size() > before
    return max(0.0, sum(times) - len(times) * times[-1])

  @property
  def badly_timed(self) -> bool:
    """Whether there are steps that no pass has timed well."""
    return bool(self._rough) or any(map(math.isnan, itertools.chain(*self.passes)))

  def seconds(self, points: int) -> np.ndarray:
    """The seconds from point to point, of the first `points`."""
    # Where every step does the same, all share the time evenly.
    steady = self._per_step is not None and not self.always_alone
    return seconds_per_block(self.passes, self._rough, self._lengths[:points], steady)

  def run(
    self, seeds: Sequence[int], *, records: bool = True, clocked: bool = True
  ) -> Iterator[int]:
    """Trains one seed, or several at once; yields the steps made, after each point of the curves.

    `records` is whether the curves are kept, `clocked` whether the times are.
    """
    first = not self.curves
    counts = first and self._per_step is None
    step = self._marked if counts else self._plain
    training = self._begin(seeds, step)
    self.seeds_at_once = max(self.seeds_at_once, len(seeds))
    seconds: list[float] = self._rough if counts else []
    if clocked and not counts:
      self.passes.append(seconds)
    if records:
      self.curves |= {seed: [] for seed in seeds}
    for length in self._lengths:
      losses, time_taken = training.advance(length, step.cache_size)
      seconds.append(time_taken)
      if first:
        evaluations = self._counter.take() if self._per_step is None else self._per_step
        self.evaluations.append(evaluations.cost * (1 if counts else length))
      if records:
        for i, seed in enumerate(seeds):
          trained = training.state.params, training.state.model_state
          metrics = self._evaluate(*(trained if len(seeds) == 1 else _pick(trained, i)))
          loss = _mean(losses.reshape(length, -1)[:, i])
          self.curves[seed].append({_curves.LOSS: loss, **metrics})
      yield length * len(seeds) if records else 0

  def faster_at_once(self, seeds: Sequence[int]) -> bool:
    """Whether the seeds can be trained at once and are faster that way, by a few steps."""
    alone = self.seconds(len(self._lengths)).sum()
    # Compiling the step for several seeds takes at least as long as the one for one seed.
    if len(seeds) < 2 or len(seeds) * alone < self.compile_seconds:
      return False
    try:
      training = self._begin(seeds)
      together = min(training.advance(1)[1] for _ in range(_TRIAL_STEPS))
    except Exception:
      # One seed has been trained: it is because of the others beside it. They don't fit into
      # memory, their shapes differ, or the loss holds what JAX can't vectorize.
      return False
    return bool(together * sum(self._lengths) < len(seeds) * alone)

  def _begin(self, seeds: Sequence[int], step: _train_step.TrainStep | None = None) -> _Training:
    problem, step = self._problem, step or self._plain
    states = [step.init(*problem.start(seed)) for seed in seeds]
    feeds = [problem.batches(seed) for seed in seeds]
    keys = [problem.key(seed) for seed in seeds]
    if len(seeds) == 1:
      return _Training(step, states[0], feeds[0], keys[0])
    feed = (_stack(batches) for batches in zip(*feeds, strict=True))
    return _Training(self._at_once, _stack(states), feed, _stack(keys))

  def _evaluate(self, params: Any, model_state: Any) -> dict[str, float]:
    metrics = jax.device_get(self._problem.evaluate(params, model_state))
    self._names = self._names or sorted(metrics)
    if sorted(metrics) != self._names:
      raise ValueError(
        f"`evaluate` must return the same metrics each time; got {sorted(metrics)} after"
        f" {self._names}. Return nan for one that has no value."
      )
    return {name: float(value) for name, value in metrics.items()}


def _mean(losses: np.ndarray) -> float:
  with np.errstate(all="ignore"):
    return float(np.mean(losses))


def _stack(trees: Sequence[Any]) -> Any:
  def stack(*leaves: Any) -> Any:
    # NumPy is faster for batches that are still on the host.
    on_host = all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
    if len(shapes := {np.shape(leaf) for leaf in leaves}) > 1:
      raise ValueError(
        "Seeds that are trained at once need batches and params of the same shapes; got arrays of"
        f" {sorted(shapes)}. Pass seeds_at_once=1."
      )
    return np.stack(leaves) if on_host else jnp.stack(leaves)

  return jax.tree.map(stack, *trees)


@jax.jit
def _pick(tree: Any, index: int) -> Any:
  return jax.tree.map(lambda leaf: leaf[index], tree)


def train(
  methods: Mapping[str, Method], seeds: Sequence[int], seeds_at_once: int | None
) -> Iterator[tuple[str, int]]:
  """Trains every method with every seed; yields the activity and the steps just made."""
  for name, method in methods.items():
    yield f"compiling {name}", 0
    with _note_method(name):
      method.compile(seeds[0])
  alone = {
    name
    for name, method in methods.items()
    if seeds_at_once == 1 or method.always_alone or (seeds_at_once is None and method.better_alone)
  }
  shuffle = random.Random(0).shuffle
  begin = time.perf_counter()
  first = {name: method.run(seeds[:1]) for name, method in methods.items()}
  yield from _interleave(f"seed {seeds[0]}", first, shuffle)
  timed = min(_MOST_TIMED, math.ceil(_TIMED_SECONDS / (time.perf_counter() - begin)))
  if any(method.badly_timed for method in methods.values()):
    timed = max(2, timed)

  for number in range(1, max(timed, len(seeds) if alone else 1)):
    trainings = {}
    for name, method in methods.items():
      if name in alone and number < len(seeds):
        trainings[name] = method.run([seeds[number]])
      elif number < timed:
        trainings[name] = method.run(seeds[:1], records=False)
    activity = f"seed {seeds[number]}" if alone and number < len(seeds) else "timing"
    yield from _interleave(activity, trainings, shuffle)

  others, sizes = seeds[1:], {}
  for name, method in methods.items():
    if others and name not in alone:
      yield f"trying {name} with several seeds", 0
      if seeds_at_once is None:
        with _note_method(name):
          sizes[name] = len(others) if method.faster_at_once(others) else 1
      else:
        sizes[name] = min(seeds_at_once, len(others))
  for start in range(len(others)):
    for name, size in sizes.items():
      if start % size == 0:
        group = others[start : start + size]
        training = methods[name].run(group, clocked=False)
        yield from _interleave(f"{name}, {len(group)} seeds", {name: training}, shuffle)


@contextlib.contextmanager
def _note_method(name: str) -> Iterator[None]:
  """Adds to an error the method that raised it: nothing else in the traceback tells."""
  try:
    yield
  except Exception as error:
    error.add_note(f"`race` was training with the method {name!r}.")
    raise


def _interleave(
  activity: str, trainings: Mapping[str, Iterator[int]], shuffle: Callable[[Any], None]
) -> Iterator[tuple[str, int]]:
  """Takes the trainings of some methods from point to point, in random order each time."""
  yield activity, 0
  running = list(trainings)
  while running:
    order = running.copy()
    shuffle(order)
    for name in order:
      with _note_method(name):
        steps = next(trainings[name], None)
      if steps is None:
        running.remove(name)
      else:
        yield activity, steps
