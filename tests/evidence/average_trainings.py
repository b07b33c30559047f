"""Trainings of a small transformer of characters that keep several averages of the params at once.

They train the transformer of ``examples/_transformer.py`` on the sources of Python's standard
library. An average doesn't change the training, so one training measures them all.
"""

import copy
import functools
import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
from tests.evidence import runs, texts

sys.path.append(str(pathlib.Path(__file__).parent.parent.parent / "examples"))
import _transformer

STEPS, WARM_UP, BATCH = 1000, 50, 8
WEIGHT_DECAY = 0.01
CONSTANT, COOL_DOWN, COSINE = "constant", "cool-down", "cosine"
# Where the cool-down begins, in which the rate falls linearly to 0.
COOLING = 800
# What the model is evaluated at: the last params, or an average by its argument.
LAST = "last params"
DECAYS = {f"decay={decay:g}": decay for decay in (0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)}
STARTS = {f"start={start}": start for start in (500, 750, 900, 950)}
# Evaluations along the training, at equal distances, of the last params and the EMAs.
LOOKS = 4
WINDOWS = 192  # of the text, to evaluate at


class Setting(NamedTuple):
  """One training.

  Attributes:
    schedule: `CONSTANT`, which a cool-down from the same params follows, or `COSINE`.
    rate: the peak of AdamW's rate.
  """

  schedule: str
  rate: float


def rates(schedule, peak):
  """The rate at each step: it rises linearly to its peak, then does what the schedule says."""
  step = np.arange(STEPS)
  shape = {
    CONSTANT: np.ones(STEPS),
    COOL_DOWN: np.minimum(1, (STEPS - step) / (STEPS - COOLING)),
    COSINE: (1 + np.cos(np.pi * step / STEPS)) / 2,
  }[schedule]
  return np.float32(peak * np.minimum(1, (step + 1) / WARM_UP) * shape)


def transformation(rate):
  """AdamW with clipped gradients, inside one `average_params` for each average."""
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=WEIGHT_DECAY))
  for decay in DECAYS.values():
    tx = optax_boost.average_params(tx, decay=decay)
  for start in STARTS.values():
    tx = optax_boost.average_params(tx, start=start)
  return tx


def averages(state, params):
  """The params to evaluate at, by name."""
  found = {LAST: params}
  for name in reversed([*DECAYS, *STARTS]):
    # `averaged_params` refuses a state with several averages.
    found[name] = optax_boost.averaged_params(state._replace(inner_state=()), params)
    state = state.inner_state
  return found


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, text, rate):
  """One program for all settings."""
  grads = jax.grad(_transformer.loss_fn)(params, text)
  return optax_boost.apply_gradients(transformation(rate), grads, state, params)


@jax.jit
def mean_loss(params, batches):
  return jax.lax.map(lambda text: _transformer.loss_fn(params, text), batches).mean()


@functools.cache
def held_out(part):
  """Windows at equal distances in a part of the text: (batches, windows in a batch, length + 1)."""
  length = _transformer.LENGTH + 1
  windows = texts.windows(texts.characters("sources")[part], length)
  windows = windows[:: len(windows) // WINDOWS][:WINDOWS]
  return windows.reshape(-1, 16, length)


class Training:
  """A training in the making, and its evaluation at the last params and at all averages."""

  def __init__(self, rate, seed):
    self.params = _transformer.init(jax.random.key(seed))
    self.state = transformation(rate).init(self.params)
    self.rng = np.random.default_rng(seed)
    self.batches = held_out("validation" if seed == runs.TUNING_SEED else "test")

  def go_on(self, rates):
    text = texts.characters("sources")["train"]
    for rate in rates:
      batch = texts.random_windows(text, _transformer.LENGTH + 1, BATCH, self.rng)
      self.params, self.state = step(self.params, self.state, batch, rate)

  def branch(self):
    """A copy that goes on with the same batches."""
    other = copy.copy(self)
    # The step donates its arrays.
    other.params, other.state = jax.tree.map(jnp.array, (self.params, self.state))
    other.rng = copy.deepcopy(self.rng)
    return other

  def losses(self, names):
    found = averages(self.state, self.params)
    return {name: float(mean_loss(found[name], self.batches)) for name in names}


def train(setting, seed):
  """The losses by what is evaluated, at the end of each schedule and along the training.

  They are on test data, with the seed for tuning on validation data.
  """
  training = Training(setting.rate, seed)
  final, curves = {}, {name: [] for name in (LAST, *DECAYS)}
  made, looks = 0, range(STEPS // LOOKS, STEPS + 1, STEPS // LOOKS)
  for count in sorted({*looks, COOLING}):
    training.go_on(rates(setting.schedule, setting.rate)[made:count])
    made = count
    if count in looks:
      for name, loss in training.losses(curves).items():
        curves[name].append(loss)
    if count == COOLING and setting.schedule == CONSTANT:
      cooled = training.branch()
      cooled.go_on(rates(COOL_DOWN, setting.rate)[count:])
      final[COOL_DOWN] = cooled.losses((LAST, *DECAYS, *STARTS))
  final[setting.schedule] = training.losses((LAST, *DECAYS, *STARTS))
  return {"final": final, "curves": curves}
