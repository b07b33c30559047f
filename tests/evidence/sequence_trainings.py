"""Trainings of small transformers of characters, whole or on sequences that grow."""

import itertools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import models
import optax_boost
from tests.evidence import texts

# The tokens that O0 sees in a budget of one, in batches of `TOKENS_OF_A_BATCH`.
TOKENS, TOKENS_OF_A_BATCH = 512_000, 512
MASKED_SHARE = 0.15
# Short trainings in turns of a few steps give the ratios of the steps' times.
TIMED, TURN, ROUNDS = 12, 3, 7
BINS = 8
# Longer ones have no controls.
LONGEST_CONTROLLED = 128


class Task(NamedTuple):
  """A training of a transformer of 4 blocks on characters.

  Attributes:
    title: for tables.
    data: of `texts.characters`.
    rotary: rotary positions, or learned ones.
    length: of the sequences.
    budget: the time of O0, in that of `TOKENS` tokens.
    masked: whether to predict masked characters instead of the next ones.
    width: of the residual stream.
    batches: of O0 that are tried, in sequences; None: around `TOKENS_OF_A_BATCH`.
  """

  title: str
  data: str
  rotary: bool = True
  length: int = 128
  budget: int = 1
  masked: bool = False
  width: int = 64
  batches: tuple[int, ...] | None = None

  @property
  def attention_share(self):
    """L / 6d: a block's multiplications for attention over those of its kernels."""
    return self.length / (6 * self.width)

  @property
  def programs(self):
    """What decides the time of a step of a shape."""
    return self.rotary, self.length, self.masked, self.width


SHAKESPEARE = "tinyshakespeare"
TASKS = {
  "learned": Task("learned positions", SHAKESPEARE, rotary=False),
  "rotary": Task("rotary positions", SHAKESPEARE),
  "sources": Task("Python's library, rotary", "sources"),
  "masked": Task("masked characters, rotary", SHAKESPEARE, masked=True),
  "rotary x 4": Task("rotary, four times as long", SHAKESPEARE, budget=4),
  "learned x 4": Task("learned, four times as long", SHAKESPEARE, rotary=False, budget=4),
}
# Sequences of which attention takes a large part of a step, and a width at which it doesn't.
LONG_TASKS = {
  "rotary 256": Task("rotary, length 256", SHAKESPEARE, length=256),
  "learned 256": Task("learned, length 256", SHAKESPEARE, rotary=False, length=256),
  "rotary 256 x 4": Task("rotary, 256, four times as long", SHAKESPEARE, length=256, budget=4),
  "learned 256 x 4": Task(
    "learned, 256, four times as long", SHAKESPEARE, rotary=False, length=256, budget=4
  ),
  "512": Task("rotary, length 512", SHAKESPEARE, length=512, batches=(1, 2)),
  "learned 512": Task("learned, length 512", SHAKESPEARE, rotary=False, length=512, batches=(1,)),
  "sources 512": Task("Python's library, rotary, 512", "sources", length=512, batches=(1,)),
  "wide 512": Task("rotary, 512, width 256", SHAKESPEARE, length=512, width=256, batches=(1,)),
  "1024": Task("rotary, length 1,024", SHAKESPEARE, length=1024, batches=(1,)),
  "learned 1024": Task(
    "learned, length 1,024", SHAKESPEARE, rotary=False, length=1024, batches=(1,)
  ),
  "512 x 4": Task(
    "rotary, 512, four times as long", SHAKESPEARE, length=512, budget=4, batches=(1, 2)
  ),
}
ALL_TASKS = TASKS | LONG_TASKS
O0, O1, O2 = "O0", "O1", "O2"
SHORT, DROPPED, SMALL = "a quarter, then full", "the ladder, rest dropped", "small batch first"


class Ladder(NamedTuple):
  """A schedule of lengths that is tried beside the levels'.

  Attributes:
    divisors: of the full length, descending to 1.
    full_from: the share of the steps from which sequences are full.
  """

  divisors: tuple[int, ...]
  full_from: float

  def schedule(self, full, steps):
    """The lengths, each of which begins where one that grows linearly reaches it."""
    lengths = tuple(full // n for n in self.divisors)
    shares = [(length - lengths[0]) / (full - lengths[0]) for length in lengths]
    starts = tuple(round(self.full_from * steps * share) for share in shares)
    return optax_boost.LengthSchedule(lengths, starts)


class Setting(NamedTuple):
  """A training: of what, in which form, with which batch and peak rate, in what time.

  Attributes:
    task: of `ALL_TASKS`.
    form: a level, a control or a ladder.
    batch: whole sequences in a step of O0.
    rate: the peak of the learning rate.
    time: in steps of O0.
    costs: the time of a step of each shape, in that of a step of O0.
  """

  task: str
  form: str
  batch: int
  rate: float
  time: float
  costs: tuple[tuple[tuple[int, int], float], ...] = ()


def shapes(task, batch):
  """The shapes (sequences, length) of all steps, in any form; O0's first."""
  full = task.length
  lengths = [full // n for n in (2, 4, 8)]
  if full > LONGEST_CONTROLLED:
    return ((batch, full), *((batch * n, full // n) for n in (2, 4, 8, 16, 32)))
  ladder = [(batch * full // n, n) for n in lengths]
  all_shapes = [(batch, full), *ladder, *((batch, n) for n in lengths), (max(1, batch // 2), full)]
  return tuple(dict.fromkeys(all_shapes))


def plan(setting):
  """The shape of each step, as many steps as fit into the setting's time."""
  full, batch = ALL_TASKS[setting.task].length, setting.batch

  def shapes_of(steps):
    if setting.form == O0:
      return [(batch, full)] * steps
    if setting.form == SMALL:
      early = steps // 2
      return [(max(1, batch // 2), full)] * early + [(batch, full)] * (steps - early)
    if setting.form == SHORT:
      early = steps * 9 // 10
      return [(4 * batch, full // 4)] * early + [(batch, full)] * (steps - early)
    if isinstance(setting.form, Ladder):
      schedule = setting.form.schedule(full, steps)
    else:
      # The levels' own, where no positions are learned.
      share = 0.75 if setting.form == O2 else 0.5
      schedule = optax_boost.sequence_length_warmup(full, steps, warmup_fraction=share)
    lengths = map(schedule, range(steps))
    if setting.form == DROPPED:
      return [(batch, length) for length in lengths]
    return [(batch * full // length, length) for length in lengths]

  table = {(batch, full): 1.0, **dict(setting.costs)}
  mean = np.mean([table[shape] for shape in shapes_of(10_000)])
  return shapes_of(round(setting.time / mean))


class Trainer:
  """A training in the making: AdamW, clipped gradients, a rate that rises and falls to 0."""

  def __init__(self, name, rate, steps):
    self.task = task = ALL_TASKS[name]
    self.network = models.GPT2(
      layers=4, width=task.width, heads=4, vocabulary=128, length=task.length, dtype=jnp.float32,
      rotary=task.rotary, causal=not task.masked, rematerialized=False,
    )  # fmt: skip
    self.loss = self.network.masked_loss if task.masked else self.network.loss
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    # Without the clipping, seeds scatter by 0.05 nats.
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    self.step = optax_boost.make_train_step(self.loss, adamw)

  def start(self, seed):
    return self.step.init(self.network.init(jax.random.key(seed)))

  def batch(self, text, sequences, length, rng):
    """Sequences of whole length, cut to windows of `length`."""
    full = self.task.length
    whole = max(1, sequences * length // full)
    batch = self.prepared(
      texts.random_windows(text, full + (not self.task.masked), whole, rng), rng
    )
    return optax_boost.cut_sequences(batch, length, full)

  def truncated(self, text, sequences, length, rng):
    """Sequences of whole length of which only the first `length` tokens are kept."""
    return self.prepared(
      texts.random_windows(text, length + (not self.task.masked), sequences, rng), rng
    )

  def prepared(self, tokens, rng):
    if not self.task.masked:
      return tokens
    masked = rng.random(tokens.shape) < MASKED_SHARE
    inputs = np.where(masked, 0, tokens).astype(np.int32)
    return {"tokens": inputs, "targets": tokens, "weights": masked.astype(np.float32)}

  def losses(self, params, part):
    """Mean loss by position, in `BINS` equal parts, of whole sequences."""
    length = self.task.length
    text = texts.characters(self.task.data)[part]
    tokens = texts.windows(text, length + (not self.task.masked), 110_000 // length // 64 * 64)
    batch = self.prepared(tokens, np.random.default_rng(0))
    masked = self.task.masked

    @jax.jit
    def sums_and_counts(params, batch):
      if not masked:
        losses = self.network.losses(params, batch[:, :-1], batch[:, 1:])
        return losses.sum(0), jnp.full(length, float(len(batch)))
      losses = self.network.losses(params, batch["tokens"], batch["targets"])
      return (losses * batch["weights"]).sum(0), batch["weights"].sum(0)

    at_once = 8192 // length
    parts = [
      sums_and_counts(params, jax.tree.map(lambda x, i=i: x[i : i + at_once], batch))
      for i in range(0, len(tokens), at_once)
    ]
    sums, counts = (np.sum(x, 0).reshape(BINS, -1).sum(1) for x in zip(*parts, strict=True))
    return (sums / counts).tolist(), float(sums.sum() / counts.sum())


def train(setting, seed):
  """Scores on validation and test data, the larger the better, and test losses by position."""
  steps = plan(setting)
  made, rng = Trainer(setting.task, setting.rate, len(steps)), np.random.default_rng(seed)
  text = texts.characters(ALL_TASKS[setting.task].data)["train"]
  cut = made.truncated if setting.form == DROPPED else made.batch
  state = made.start(seed)
  for shape in steps:
    state, _ = made.step(state, cut(text, *shape, rng))
  by_position, test = made.losses(state.params, "test")
  validation = made.losses(state.params, "validation")[1]
  return {"validation": -validation, "test": -test, "positions": by_position, "steps": len(steps)}


def measure(chosen, seed):
  """Processor seconds of a step of each shape of a task over the first's."""
  name, tried = chosen
  text, rng = texts.characters(ALL_TASKS[name].data)["train"], np.random.default_rng(seed)
  made = Trainer(name, 1e-3, 10_000)
  batches, seconds = {}, {shape: [] for shape in tried}
  state = made.start(0)
  for sequences, length in tried:
    whole = sequences * length >= ALL_TASKS[name].length
    cut = made.batch if whole else made.truncated
    batches[sequences, length] = cut(text, sequences, length, rng)
    state, _ = made.step(state, batches[sequences, length])
  for _ in range(ROUNDS):
    totals = dict.fromkeys(tried, 0.0)
    for _, shape in itertools.product(range(TIMED // TURN), tried):
      begin = time.process_time()
      for _ in range(TURN):
        state, _ = made.step(state, batches[shape])
      jax.block_until_ready(state)
      totals[shape] += time.process_time() - begin
    for shape in tried:
      seconds[shape].append(totals[shape])
  rounds = np.array([seconds[shape] for shape in tried])
  return {
    "ratios": np.median(rounds / rounds[0], 1).tolist(),
    "milliseconds": float(np.median(rounds[0]) / TIMED * 1e3),
  }
