"""Does stochastic rounding replace float32 masters? A small transformer with bfloat16 params.

``make evidence PARTS=rounding`` trains the transformer of ``examples/_transformer.py`` on
``tinyshakespeare.txt`` in the folder of the environment variable ``OPTAX_BOOST_DATA``, and writes
``benchmarks/results/rounding_evidence.md``.
"""

import functools
import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests.evidence import common, report, runs, texts

sys.path.append(str(pathlib.Path(__file__).parent.parent.parent / "examples"))
import _transformer

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
STEPS = 300
BATCH = 8
WEIGHT_DECAY = 0.01
STATIC = ("b1", "b2", "eps", "eps_root", "weight_decay")
RATES = (1.5e-3, 5e-3, 1.5e-2)
# Points of a curve.
LOOKS = 6
FLOAT32, MASTERS = "float32", "bfloat16, float32 masters"
PLAIN, OURS = "bfloat16", "bfloat16, stochastic rounding"
CONTENDERS = {FLOAT32: report.LIGHT, MASTERS: "black", PLAIN: report.ORANGE, OURS: report.BLUE}


class Setting(NamedTuple):
  """One training."""

  contender: str
  rate: float


def batch(part, rng):
  text = texts.characters("tinyshakespeare")[part]
  return texts.random_windows(text, _transformer.LENGTH + 1, BATCH, rng)


@jax.jit
def losses(params, batches):
  """The mean loss over batches, computed in float32."""
  wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
  return jax.lax.map(lambda text: _transformer.loss_fn(wide, text), batches).mean()


def evaluate(params, part):
  rng = np.random.default_rng(1)
  return float(losses(params, np.stack([batch(part, rng) for _ in range(16)])))


def train(setting, seed):
  """Trains once."""
  rate = optax.warmup_cosine_decay_schedule(0.0, setting.rate, STEPS // 10, STEPS)
  # As an array in the state, a rate needs no program of its own; 0.999 would be 1 in bfloat16.
  adamw = optax.inject_hyperparams(optax.adamw, STATIC, hyperparam_dtype=jnp.float32)
  tx = adamw(0.0, weight_decay=WEIGHT_DECAY)
  if setting.contender == MASTERS:
    tx = optax_boost.master_weights(tx)
  elif setting.contender == OURS:
    tx = optax_boost.stochastic_rounding(tx, key=seed)
  step = optax_boost.make_train_step(_transformer.loss_fn, tx)
  dtype = jnp.float32 if setting.contender == FLOAT32 else jnp.bfloat16
  params = _transformer.init(jax.random.key(seed))
  state = step.init(jax.tree.map(lambda p: p.astype(dtype), params))
  size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
  rng = np.random.default_rng(seed)
  curve = []
  for i in range(STEPS):
    wrapper = state.opt_state
    inner = wrapper if setting.contender in (FLOAT32, PLAIN) else wrapper.inner_state
    inner.hyperparams["learning_rate"] = jnp.asarray(rate(i), jnp.float32)
    state, _ = step(state, batch("train", rng))
    if (i + 1) % (STEPS // LOOKS) == 0:
      curve.append(evaluate(state.params, "validation"))
  return {
    "validation": -curve[-1],
    "curve": curve,
    "training loss": evaluate(state.params, "train"),
    "validation loss": curve[-1],
    "test loss": evaluate(state.params, "test"),
    "bytes": size,
  }


@functools.cache
def tuned():
  grids = {name: [Setting(name, rate) for rate in RATES] for name in CONTENDERS}
  return runs.tune(train, grids, SEEDS)


def above_float32(contender, key):
  """Differences of losses at equal seeds: equal initial weights and batches."""
  return np.subtract(tuned()[contender].values(key), tuned()[FLOAT32].values(key))


def test_stochastic_rounding_is_level_with_masters_and_ahead_of_plain_bfloat16():
  common.need("tinyshakespeare")
  write()
  for contender, outcome in tuned().items():
    assert max(outcome.values("validation loss")) < 3.2, contender  # a guess: 4.85
  assert np.mean(above_float32(OURS, "test loss")) < 0.005
  assert min(above_float32(PLAIN, "test loss")) > max(above_float32(OURS, "test loss"))


def picture():
  titles = ("validation loss above float32's", "validation loss, nats per character")
  figure, (left, right) = report.panels(titles, 4.5, 3.6)
  steps = np.linspace(0, STEPS, LOOKS + 1)[1:]
  for name, colour in CONTENDERS.items():
    above = above_float32(name, "curve")
    report.curve(left, steps, above, name, color=colour, marker=".")
    size, last = tuned()[name].values("bytes")[0] / 1e6, tuned()[name].values("validation loss")
    report.points(right, [size], [last], name, color=colour, marker="o")
  left.set(xlabel="steps")
  right.set(xlabel="params and optimizer state, MB", xlim=(0, 5))
  left.legend(fontsize=9, frameon=False)
  return figure


def write():
  count = sum(p.size for p in jax.tree.leaves(_transformer.init(jax.random.key(0))))
  rows = [
    [
      name,
      outcome.rate,
      *(outcome.spread(f"{part} loss", "{:.3f}") for part in ("training", "validation", "test")),
      report.spread(above_float32(name, "test loss"), "{:.4f}"),
      f"{outcome.values('bytes')[0] / 1e6:.2f}",
      f"{outcome.values('bytes')[0] / count:.1f}",
    ]
    for name, outcome in tuned().items()
  ]
  header = (
    *("params", "rate", "training loss", "validation loss", "test loss"),
    *("test loss above float32's", "params and state, MB", "bytes per param"),
  )
  tries = "; ".join(
    f"{name}: " + ", ".join(f"{s.rate:g}: {-v:.3f}" for s, v in outcome.tried)
    for name, outcome in tuned().items()
  )
  numbers = {"params": count, "batch": BATCH, "length": _transformer.LENGTH}
  numbers |= {"decay": WEIGHT_DECAY, "steps": STEPS, "seeds": len(SEEDS)}
  page = report.words(
    "rounding",
    table=report.table(header, rows),
    tries=tries,
    **numbers,
  )
  report.write("rounding", *page, picture())
