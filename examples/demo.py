"""Trains a small transformer at a level, fine-tunes it, and takes a large batch in less memory.

`python examples/demo.py` compares what optax_boost does with plain training, on plays of
Shakespeare: a level of `auto_boost`, frozen layers, layer-wise decay, accumulated gradients, a step
inside of the backward pass. It prints a table of times, losses and memory, and saves a picture.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from pathlib import Path
import sys
from typing import Any, NamedTuple

import _command
import _memory

NAME, OUT = "demo", "out/demo.png"

try:  # JAX takes seconds to import: long enough for a Ctrl-C.
  _memory.keep_freed_memory()
  from _demo_report import (
    AFTER,
    ALL,
    AT_ONCE,
    DECAY,
    DEEP,
    HALF,
    INSIDE,
    MICRO_BATCHES,
    O0,
    O1,
    Results,
    picture,
    report,
  )
  import _texts
  import _transformer
  import _transformer_training as training
  import jax
  import jax.numpy as jnp
  from matplotlib.figure import Figure
  import numpy as np
  import optax
  from tqdm import tqdm

  import optax_boost
except KeyboardInterrupt:
  sys.exit(_command.interrupted(NAME))

LAYERS, LENGTH, BATCH_SIZE = 4, 256, 2
STEPS, TUNING_STEPS = 600, 100
# The batch size and the rates were chosen on validation text, with a seed that the demo does not
# use, as `python examples/tune_demo.py` does: for O0 those with the least loss, which O1 takes
# over; for fine-tuning the best rate of each way. O0 had 2.070 nats, but 2.114 and 2.100 at half
# and twice the rate, and 2.187 in batches of 4.
RATE = 0.006
TUNING_RATES = {ALL: 0.003, HALF: 0.01, DECAY: 0.01}
# Windows of held-out text, and how often the loss on them is measured.
HELD_OUT, EVALUATIONS, TUNING_EVALUATIONS = 32, 16, 8
LAYER_DECAY = 0.75
# The tokens of the deep model's batch: few, as its params take most of the memory.
FEW_TOKENS = 16

Batches = list[np.ndarray]


class Plan(NamedTuple):
  """The arguments of a run, all checked."""

  steps: int
  tuning_steps: int
  seed: int
  out: Path


def optimizer(rate: float, steps: int) -> optax.GradientTransformation:
  """AdamW; its rate climbs in the first tenth of the steps and falls to zero."""
  schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


def initial_params(seed: int) -> Any:
  """The params of a transformer with rotary positions, which suit sequences of any length."""
  # Generators of this kind compile in a third of the time.
  key = jax.random.key(seed, impl="rbg")
  return jax.jit(lambda key: _transformer.init(key, LAYERS, rotary=True))(key)


def batches(text: np.ndarray, steps: int, seed: int, size: int = BATCH_SIZE) -> Batches:
  """Random windows of a text, for each step."""
  rng = np.random.default_rng(seed)
  return [_texts.windows(text, size, LENGTH, rng) for _ in range(steps)]


def held_out(text: np.ndarray) -> np.ndarray:
  """The windows on which losses are measured."""
  return _texts.windows(text, HELD_OUT, LENGTH, np.random.default_rng(0))


class AtLevel(NamedTuple):
  """A training at a level of `auto_boost`.

  Attributes:
    boost: the level.
    tx: its transformation.
    feed: whole batches, one for each step.
  """

  boost: optax_boost.AutoBoost
  tx: optax.GradientTransformation
  feed: Batches

  def prepare(self, step: Any, state: Any, report: Callable[[str], Any]) -> None:
    """Times the step at each length; the level keeps those that save time here."""
    step.compile_ahead(state, self.boost.coming_batches(self.feed[0]), report=report)
    self.boost.measure(step.on_copy(state), self.feed[0])

  def batches(self) -> Iterator[np.ndarray]:
    """The batches as the level cuts them, by what was measured."""
    for step, batch in enumerate(self.feed):
      yield self.boost.batch(batch, step)


def at_level(level: str, start: Any, feed: Batches, rate: float) -> AtLevel:
  """Sets a level up."""
  boost = optax_boost.auto_boost(level, len(feed), sequence_length=LENGTH)
  adamw = optimizer(rate, len(feed))
  tx = boost.optimizer(adamw, _transformer.loss_fn, start, feed[0])
  return AtLevel(boost, tx, feed)


def all_layers(adamw: Any, start: Any) -> optax.GradientTransformation:
  """Fine-tunes everything."""
  return adamw


def last_half(adamw: Any, start: Any) -> optax.GradientTransformation:
  """The first half of the layers never moves."""
  groups = optax_boost.layer_groups(start, _transformer.NAMES, num_groups=2)
  return optax_boost.freeze_layers(adamw, groups, optax_boost.fixed_freezing(2, 1))


def layerwise(adamw: Any, start: Any) -> optax.GradientTransformation:
  """Each layer has a part of the rate of the layer after it."""
  groups = optax_boost.layer_groups(start, _transformer.NAMES)
  return optax_boost.layerwise_decay(adamw, groups, LAYER_DECAY)


WAYS: dict[str, Callable[..., optax.GradientTransformation]] = {
  ALL: all_layers,
  HALF: last_half,
  DECAY: layerwise,
}


def memory(params: Any, text: np.ndarray, every: int = MICRO_BATCHES) -> dict[str, int]:
  """The bytes of a step on a large batch, and of one on its micro-batches. Nothing is run."""
  adamw = optimizer(RATE, STEPS)
  programs = {
    AT_ONCE: (adamw, every * BATCH_SIZE),
    f"{every} micro-batches": (optax_boost.accumulate(adamw, every), BATCH_SIZE),
  }
  found = {}
  for name, (tx, size) in programs.items():
    step = optax_boost.make_train_step(_transformer.loss_fn, tx)
    (batch,) = batches(text, 1, seed=0, size=size)
    found[name] = training.step_memory(step.lower(step.init(params), batch).compile()).whole
  return found


def memory_of_updates() -> dict[str, training.Memory]:
  """The memory of a deep model's step after the backward pass, and inside. Nothing is run."""
  init = functools.partial(_transformer.init, layers=DEEP, rotary=True)
  params = jax.eval_shape(init, jax.random.key(0))
  batch = jax.ShapeDtypeStruct((1, FEW_TOKENS + 1), jnp.int32)
  found = {}
  for name, inside in {AFTER: False, INSIDE: True}.items():
    adamw = optax.adamw(RATE)  # a global norm would need all gradients at once
    step = optax_boost.make_train_step(_transformer.loss_fn, adamw, update_in_backward=inside)
    found[name] = training.step_memory(step.lower(step.init(params), batch).compile())
  return found


def compare(plan: Plan) -> Results:
  """Trains at both levels, fine-tunes what O1 trained in three ways, and compares memory."""
  plays, comedy = _texts.split(_texts.plays()), _texts.split(_texts.comedy())
  start = initial_params(plan.seed)
  runs, tuned = {}, {}
  with tqdm(total=2 * plan.steps + len(WAYS) * plan.tuning_steps, unit="step") as bar:

    def train(
      name: str,
      start: Any,
      tx: Any,
      feed: Any,
      test: np.ndarray,
      points: list[int],
      prepare: Any = lambda step, state, report: None,
    ) -> tuple[Any, training.Run]:
      def prepare_with_bar(step: Any, state: Any) -> None:
        prepare(step, state, bar.set_description)
        bar.set_description(name)

      step = optax_boost.make_train_step(_transformer.loss_fn, tx)
      windows = held_out(test)
      return training.train(step, start, feed, windows, points, bar.update, prepare_with_bar)

    feed = batches(plays.train, plan.steps, plan.seed)
    points = training.evaluation_points(plan.steps, EVALUATIONS)
    for level in (O0, O1):
      at = at_level(level, start, feed, RATE)
      params, runs[level] = train(level, start, at.tx, at.batches(), plays.test, points, at.prepare)
    feed = batches(comedy.train, plan.tuning_steps, plan.seed)
    points = training.evaluation_points(plan.tuning_steps, TUNING_EVALUATIONS)
    before = float(training.evaluate(params, held_out(comedy.test)))
    for name, make in WAYS.items():
      tx = make(optimizer(TUNING_RATES[name], plan.tuning_steps), params)
      _, tuned[name] = train(name, params, tx, feed, comedy.test, points)
    bar.set_description("memory of a large batch")
    prices = at.boost.on["sequence_length_warmup"]["length_prices"]
    kept = at.boost.length_schedule.lengths
    large = memory(params, plays.train)
    return Results(runs, before, tuned, large, memory_of_updates(), prices, kept)


def prepare(argv: Sequence[str] | None) -> Plan:
  """Reads the command line and checks all of it.

  Args:
    argv: the arguments; None: the process's.

  Raises:
    ValueError: an argument is wrong.
    OSError: the picture can't be written.
  """
  parser = _command.parser(NAME, __doc__)
  add = parser.add_argument
  add("--steps", type=int, default=STEPS, help="of a training from scratch")
  add("--tuning-steps", type=int, default=TUNING_STEPS, help="of fine-tuning")
  add("--seed", type=int, default=0, help="of initial params and batches")
  least = {"steps": EVALUATIONS, "tuning_steps": TUNING_EVALUATIONS, "seed": 0}
  options = _command.read(parser, argv, OUT, **least)
  return Plan(options.steps, options.tuning_steps, options.seed, options.out)


def work(plan: Plan) -> tuple[Figure, Path]:
  """Prints the table and the sentences; returns the picture and where it goes."""
  print(
    "A small transformer learns three plays of Shakespeare, with plain training (O0) and with"
    "\nauto_boost's O1; then it is fine-tuned to another, The Taming of the Shrew. About two"
    f"\nminutes on two CPU cores; nothing is downloaded. Running on {jax.default_backend()}.\n",
    flush=True,
  )
  results = compare(plan)
  print(f"\n{report(results)}")
  if (plan.steps, plan.tuning_steps) != (STEPS, TUNING_STEPS):
    print(
      f"\nThe rates were chosen for {STEPS} steps, and {TUNING_STEPS} of fine-tuning; here others"
      " may be better."
    )
  return picture(results), plan.out


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the demo; returns the exit status.

  Args:
    argv: the arguments; None: the process's.
  """
  return _command.run(NAME, prepare, work, argv)


if __name__ == "__main__":
  _command.end(main())
