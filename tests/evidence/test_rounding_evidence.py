"""Does stochastic rounding replace float32 masters? A small transformer with bfloat16 params.

``make evidence PARTS=rounding`` trains the transformer of ``examples/_transformer.py`` on
``tinyshakespeare.txt``, where the environment variable ``OPTAX_BOOST_DATA`` names a folder with it,
or else on Python's language reference, and writes ``benchmarks/results/rounding_evidence.md``.
"""

import functools
import os
import pathlib
import pydoc_data.topics
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import pytest

import optax_boost
from tests.evidence import report
from tests.evidence import runs

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
CONTENDERS = (FLOAT32, MASTERS, PLAIN, OURS)


class Setting(NamedTuple):
  """One training."""

  contender: str
  rate: float


@functools.cache
def data():
  """Where the text is from, and its parts: characters as integers below 128."""
  path = pathlib.Path(os.environ.get("OPTAX_BOOST_DATA", ".")) / "tinyshakespeare.txt"
  known = path.exists()
  text = path.read_text(encoding="utf-8") if known else "\n".join(pydoc_data.topics.topics.values())
  numbers = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
  ends = [len(numbers) * 8 // 10, len(numbers) * 9 // 10]
  parts = dict(zip(("train", "validation", "test"), np.split(numbers, ends), strict=True))
  return "tiny Shakespeare" if known else "Python's language reference", parts


def batch(part, rng):
  text = data()[1][part]
  columns = np.arange(_transformer.LENGTH + 1)
  return text[rng.integers(0, len(text) - len(columns), BATCH)[:, None] + columns]


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
  wrap = {
    MASTERS: optax_boost.master_weights,
    OURS: functools.partial(optax_boost.stochastic_rounding, key=seed),
  }.get(setting.contender, lambda tx: tx)
  step = optax_boost.make_train_step(
    _transformer.loss_fn, wrap(adamw(0.0, weight_decay=WEIGHT_DECAY))
  )
  dtype = jnp.float32 if setting.contender == FLOAT32 else jnp.bfloat16
  params = _transformer.init(jax.random.key(seed))
  state = step.init(jax.tree.map(lambda p: p.astype(dtype), params))
  size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
  rng = np.random.default_rng(seed)
  points = []
  for i in range(STEPS):
    wrapper = state.opt_state
    inner = wrapper if setting.contender in (FLOAT32, PLAIN) else wrapper.inner_state
    inner.hyperparams["learning_rate"] = jnp.asarray(rate(i), jnp.float32)
    state, _ = step(state, batch("train", rng))
    if (i + 1) % (STEPS // LOOKS) == 0:
      points.append({"steps": i + 1, "loss": evaluate(state.params, "validation")})
  return {
    "validation": -points[-1]["loss"],
    "points": points,
    "training loss": evaluate(state.params, "train"),
    "validation loss": points[-1]["loss"],
    "test loss": evaluate(state.params, "test"),
    "bytes": size,
  }


@functools.cache
def tuned():
  grids = {name: [Setting(name, rate) for rate in RATES] for name in CONTENDERS}
  return runs.tune(train, grids, SEEDS)


def found(contender, key):
  return [result[key] for result in tuned()[contender].results]


def test_every_contender_trains():
  for contender in CONTENDERS:
    assert max(found(contender, "validation loss")) < 3.2, contender  # a guess: 4.85


def test_masters_take_four_bytes_a_param_more():
  ours, masters, float32 = (found(name, "bytes")[0] for name in (OURS, MASTERS, FLOAT32))
  params = (float32 - ours) / 2
  assert masters - ours == pytest.approx(4 * params, rel=1e-3)


def above_float32(contender):
  """Differences of test losses at equal seeds: equal initial weights and batches."""
  pairs = zip(found(contender, "test loss"), found(FLOAT32, "test loss"), strict=True)
  return [ours - theirs for ours, theirs in pairs]


def test_stochastic_rounding_is_level_with_masters_and_ahead_of_plain_bfloat16():
  assert np.mean(above_float32(OURS)) < 0.005
  assert min(above_float32(PLAIN)) > max(above_float32(OURS))


def picture():
  figure = Figure(figsize=(9, 3.6), dpi=110)
  figure.set_layout_engine("constrained")
  colors = dict(zip(CONTENDERS, ("#9A9A9A", "black", "#D55E00", "#0072B2"), strict=True))
  left, right = figure.subplots(1, 2)
  base = np.array([[p["loss"] for p in run] for run in found(FLOAT32, "points")])
  for name, color in colors.items():
    points = found(name, "points")
    x = [p["steps"] for p in points[0]]
    curves = np.array([[p["loss"] for p in run] for run in points])
    above = curves - base
    left.plot(x, above.mean(0), color=color, marker=".", label=name)
    left.fill_between(x, above.min(0), above.max(0), color=color, alpha=0.15, lw=0)
    last, size = curves[:, -1], found(name, "bytes")[0] / 1e6
    right.errorbar(size, last.mean(), last.std(ddof=1), color=color, marker="o", capsize=3)
  left.set(xlabel="steps", ylabel="validation loss above that of float32")
  right.set(xlabel="params and optimizer state, MB", xlim=(0, 5))
  right.set_ylabel("validation loss, nats per character")
  left.legend(fontsize=8, frameon=False)
  for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
  return figure


def test_the_results_are_written():
  count = sum(p.size for p in jax.tree.leaves(_transformer.init(jax.random.key(0))))
  rows = [
    [
      name,
      f"{tuned()[name].setting.rate:g}{' (edge of the grid)' if tuned()[name].at_edge else ''}",
      *(
        report.spread(found(name, key), "{:.3f}")
        for key in ("training loss", "validation loss", "test loss")
      ),
      report.spread(above_float32(name), "{:.4f}"),
      f"{found(name, 'bytes')[0] / 1e6:.2f}",
      f"{found(name, 'bytes')[0] / count:.1f}",
    ]
    for name in CONTENDERS
  ]
  header = (
    *("params", "rate", "training loss", "validation loss", "test loss"),
    *("test loss above float32's", "params and state, MB", "bytes per param"),
  )
  tries = "; ".join(
    f"{name}: " + ", ".join(f"{s.rate:g}: {-v:.3f}" for s, v in tuned()[name].tried)
    for name in CONTENDERS
  )
  about = (
    f"A transformer of six layers of width 64 ({count:,.0f} params), which computes in its params'"
    f" dtype, on {data()[0]}: characters, batches of {BATCH} stretches of {_transformer.LENGTH},"
    f" AdamW with weight decay {WEIGHT_DECAY:g}, {STEPS} steps. The rate rises in the first tenth"
    " of the steps, then falls to 0 (cosine); its peak was chosen for each row by the loss on"
    " validation text. Losses are nats per character, computed in float32 from the params. Mean ±"
    f" standard deviation over {len(SEEDS)} seeds; a seed means the same initial weights and the"
    " same batches in all rows. Plain bfloat16 has Adam's moments in bfloat16, too."
  )
  record = {
    name: {
      "rate": tuned()[name].setting.rate,
      "tried": [(s.rate, -v) for s, v in tuned()[name].tried],
      "seeds": tuned()[name].results,
    }
    for name in CONTENDERS
  }
  body = f"{report.table(header, rows)}\nValidation loss by rate, another seed: {tries}.\n"
  title = "bfloat16 params: masters, stochastic rounding, neither"
  report.write("rounding", title, about, body, record, picture())
