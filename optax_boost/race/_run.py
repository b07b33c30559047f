"""The training itself: who runs when, on the clock or not, and how many seeds at once.

The seeds that a method runs one at a time are run *interleaved*: from one point of the curves to
the next, every method once, in random order. So whatever else the machine does slows all methods
alike, and the same steps are timed of each: a schedule that makes late steps cheaper is seen. The
median over these passes is a method's time from point to point. Every method runs at least its
first seed this way, and again where that was too short to be timed well; its other seeds then run
all at once, where that is faster, compiling included.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib.util
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
  evaluate: Callable[[Any, Any], Mapping[str, jax.Array]] | None
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


@dataclasses.dataclass
class Recording:
  """The curves and times of one method so far; lists hold a value for each point."""

  loss: dict[int, list[float]] = dataclasses.field(default_factory=dict)
  metrics: dict[int, list[Mapping[str, float]]] = dataclasses.field(default_factory=dict)
  evaluations: list[float] = dataclasses.field(default_factory=list)
  # Seconds since the point before, in each pass on the clock; nan: a step was compiled.
  passes: list[list[float]] = dataclasses.field(default_factory=list)
  # The same of a pass that counted gradients, which takes longer.
  rough: list[float] = dataclasses.field(default_factory=list)
  # Whether every step does the same, so that they share the time evenly.
  steady: bool = True
  # The time of the first step minus that of the second.
  compile_seconds: float = math.nan
  seeds_at_once: int = 1

  def seconds(self, lengths: Sequence[int]) -> np.ndarray:
    """The seconds for each of `lengths` steps: the median over the passes, else the rough pass.

    Where neither is known, the mean of the others; nan without any.
    """
    columns = itertools.zip_longest(*self.passes, self.rough, fillvalue=math.nan)
    times = [([x for x in clocked if not math.isnan(x)] or [rough]) for *clocked, rough in columns]
    medians = np.full(len(lengths), math.nan)
    medians[: len(times)] = [np.median(column) for column in times][: len(lengths)]
    timed = ~np.isnan(medians)
    if not timed.any():
      return medians
    average = medians[timed].sum() / np.asarray(lengths)[timed].sum() * np.asarray(lengths)
    return average if self.steady else np.where(timed, medians, average)


class _Block(NamedTuple):
  losses: np.ndarray
  seconds: float


class _Training:
  """A training under way, of one seed or of several at once."""

  def __init__(self, step: Callable[..., Any], state: Any, feed: Iterator[Any], key: Any):
    self._step = step
    self._feed = feed
    self._key = key
    self.state = state

  def advance(self, count: int, versions: Callable[[], int] = lambda: 0) -> _Block:
    """Makes steps; those during which `versions` (compiled programs) grows are not timed."""
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
    return _Block(np.asarray(jax.device_get(losses), np.float64), total)

  def _ahead(self, most: int) -> list[Any]:
    batches = [jax.device_put(next(self._feed))]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(batches[0]))
    number = min(most, _AHEAD, 1 + _AHEAD_BYTES // max(1, size))
    batches += [jax.device_put(batch) for batch in itertools.islice(self._feed, number - 1)]
    return jax.block_until_ready(batches)


class Method:
  """One transformation in the race; curves have a point at each of `eval_steps`."""

  def __init__(
    self, problem: Problem, tx: optax.GradientTransformation, eval_steps: Sequence[int]
  ) -> None:
    self._problem = problem
    self._tx = tx
    self._lengths = np.diff(eval_steps, prepend=0).tolist()
    self._counter = _cost.Counter()
    self._plain = problem.train_step(problem.loss_fn, tx)
    self._marked = problem.train_step(self._counter.mark(problem.loss_fn), tx)
    # The evaluations of each step; None where they vary.
    self._per_step: _cost.Evaluations | None = None
    self._at_once = jax.jit(jax.vmap(lambda *args: self._plain(*args)), donate_argnums=0)
    self.recording = Recording()
    # Whether its seeds must be trained one at a time, and whether they had better be.
    self.always_alone = self.better_alone = False

  def compile(self, seed: int) -> None:
    """Compiles the step and counts its gradients, as far as its program tells."""
    training = self._begin(self._plain, seed)
    batch = next(self._problem.batches(seed))
    jaxpr = self._marked.trace(training.state, batch, self._problem.key(seed)).jaxpr
    traced = _cost.traced(jaxpr)
    # A step without any gradient is one whose marks the trace does not show.
    self._per_step = traced if traced is not None and traced.gradients else None
    # The host chooses the compiled step by the depth.
    self.always_alone = bool(
      optax.tree.get_all_with_path(training.state.opt_state, "frozen_groups")
    )
    self.better_alone = (
      # A vectorized conditional runs all of its branches.
      self._per_step is None
      # Its data would be built into the program.
      or self._problem.full_grad_fn is not None
      # Weights of their own for each seed make it a slow grouped convolution.
      or (jax.default_backend() == "cpu" and _jaxpr.has_convolution(jaxpr))
    )
    self.recording.steady = self._per_step is not None and not self.always_alone
    first, second = (training.advance(1).seconds for _ in range(2))
    self.recording.compile_seconds = max(0.0, first - second)
    self._evaluate(training.state.params, training.state.model_state)
    if self._per_step is None:
      self._begin(self._marked, seed).advance(1)
      self._counter.take()

  @property
  def badly_timed(self) -> bool:
    """Whether there are steps that no pass has timed well."""
    recording = self.recording
    return bool(recording.rough) or any(math.isnan(x) for one in recording.passes for x in one)

  def run(self, seed: int, *, records: bool = True, clocked: bool = True) -> Iterator[int]:
    """Trains one seed; yields the steps made, after each point of the curves."""
    recording = self.recording
    first = not recording.loss
    counts = first and self._per_step is None
    step = self._marked if counts else self._plain
    training = self._begin(step, seed)
    seconds: list[float] = recording.rough if counts else []
    if clocked and not counts:
      recording.passes.append(seconds)
    if records:
      recording.loss[seed], recording.metrics[seed] = [], []
    for length in self._lengths:
      block = training.advance(length, step.cache_size)
      seconds.append(block.seconds)
      if counts:
        recording.evaluations.append(self._counter.take().cost)
      elif first and self._per_step is not None:
        recording.evaluations.append(length * self._per_step.cost)
      if records:
        recording.metrics[seed].append(
          self._evaluate(training.state.params, training.state.model_state)
        )
        recording.loss[seed].append(_mean(block.losses))
      yield length if records else 0

  def run_at_once(self, seeds: Sequence[int]) -> Iterator[int]:
    """Trains several seeds at once, off the clock; yields the steps made, over all seeds."""
    if len(seeds) == 1:
      yield from self.run(seeds[0], clocked=False)
      return
    recording = self.recording
    recording.seeds_at_once = max(recording.seeds_at_once, len(seeds))
    training = self._begin_at_once(seeds)
    for seed in seeds:
      recording.loss[seed], recording.metrics[seed] = [], []
    for length in self._lengths:
      block = training.advance(length)
      for i, seed in enumerate(seeds):
        recording.metrics[seed].append(
          self._evaluate(*_pick((training.state.params, training.state.model_state), i))
        )
        recording.loss[seed].append(_mean(block.losses[:, i]))
      yield length * len(seeds)

  def faster_at_once(self, seeds: Sequence[int]) -> bool:
    """Whether the seeds fit into memory at once and train faster that way, by a few steps."""
    alone = self.recording.seconds(self._lengths).sum()
    # Compiling the step for several seeds takes at least as long as the one for one seed.
    if len(seeds) < 2 or len(seeds) * alone < self.recording.compile_seconds:
      return False
    try:
      training = self._begin_at_once(seeds)
      together = min(training.advance(1).seconds for _ in range(_TRIAL_STEPS))
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      return False
    return together * sum(self._lengths) < len(seeds) * alone

  def _begin(self, step: _train_step.TrainStep, seed: int) -> _Training:
    problem = self._problem
    state = step.init(*problem.start(seed))
    return _Training(step, state, problem.batches(seed), problem.key(seed))

  def _begin_at_once(self, seeds: Sequence[int]) -> _Training:
    problem = self._problem
    states = [self._begin(self._plain, seed).state for seed in seeds]
    feeds = [problem.batches(seed) for seed in seeds]
    keys = [problem.key(seed) for seed in seeds]
    feed = (_stack(batches) for batches in zip(*feeds, strict=True))
    return _Training(self._at_once, _stack(states), feed, _stack(keys))

  def _evaluate(self, params: Any, model_state: Any) -> Mapping[str, float]:
    if self._problem.evaluate is None:
      return {}
    metrics = jax.device_get(self._problem.evaluate(params, model_state))
    return {name: float(value) for name, value in metrics.items()}


def _mean(losses: np.ndarray) -> float:
  with np.errstate(all="ignore"):
    return float(np.mean(losses))


def _stack(trees: Sequence[Any]) -> Any:
  def stacked(*leaves: Any) -> Any:
    # NumPy is faster, where it is about batches that are still on the host.
    on_host = all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
    return np.stack(leaves) if on_host else jnp.stack(leaves)

  return jax.tree.map(stacked, *trees)


@jax.jit
def _pick(tree: Any, index: int) -> Any:
  return jax.tree.map(lambda leaf: leaf[index], tree)


class Bar:
  """A progress bar that counts steps, or nothing where there is no tqdm."""

  def __init__(self, total: int, shown: bool) -> None:
    self._bar: Any = None
    if shown and importlib.util.find_spec("tqdm") is not None:
      from tqdm import tqdm

      self._bar = tqdm(total=total, unit="step")

  def __enter__(self) -> "Bar":
    return self

  def __exit__(self, *_: Any) -> None:
    if self._bar is not None:
      self._bar.close()

  def say(self, text: str) -> None:
    """Describes what goes on."""
    if self._bar is not None:
      self._bar.set_description(text)

  def add(self, steps: int) -> None:
    """Counts steps made."""
    if self._bar is not None:
      self._bar.update(steps)


def run(
  methods: Mapping[str, Method], seeds: Sequence[int], seeds_at_once: int | None, bar: Bar
) -> None:
  """Trains every method with every seed, into the methods' recordings."""
  for name, method in methods.items():
    bar.say(f"compiling {name}")
    method.compile(seeds[0])
  alone = {
    name
    for name, method in methods.items()
    if seeds_at_once == 1 or method.always_alone or (seeds_at_once is None and method.better_alone)
  }
  shuffle = random.Random(0).shuffle
  bar.say(f"seed {seeds[0]}")
  begin = time.perf_counter()
  _interleave({name: method.run(seeds[0]) for name, method in methods.items()}, shuffle, bar)
  timed = math.ceil(_TIMED_SECONDS / (time.perf_counter() - begin))
  timed = min(timed, _MOST_TIMED)
  if any(method.badly_timed for method in methods.values()):
    timed = max(2, timed)

  for number in range(1, max(timed, len(seeds) if alone else 1)):
    trainings = {}
    for name, method in methods.items():
      if name in alone and number < len(seeds):
        trainings[name] = method.run(seeds[number])
      elif number < timed:
        trainings[name] = method.run(seeds[0], records=False)
    bar.say(f"seed {seeds[number]}" if alone and number < len(seeds) else "timing")
    _interleave(trainings, shuffle, bar)

  others = seeds[1:]
  sizes = {}
  for name, method in methods.items():
    if others and name not in alone:
      bar.say(f"trying {name} with several seeds")
      if seeds_at_once is None:
        sizes[name] = len(others) if method.faster_at_once(others) else 1
      else:
        sizes[name] = min(seeds_at_once, len(others))
  for start in range(len(others)):
    for name, size in sizes.items():
      if start % size == 0:
        group = others[start : start + size]
        bar.say(f"{name}, {len(group)} seeds")
        for steps in methods[name].run_at_once(group):
          bar.add(steps)


def _interleave(
  trainings: dict[str, Iterator[int]], shuffle: Callable[[Any], None], bar: Bar
) -> None:
  """Takes all trainings from point to point, in random order each time."""
  while trainings:
    order = list(trainings)
    shuffle(order)
    for name in order:
      steps = next(trainings[name], None)
      if steps is None:
        del trainings[name]
      else:
        bar.add(steps)
