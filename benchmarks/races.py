"""The races that the method cards show: `python -m benchmarks races`.

Each trains on scikit-learn's digits. The tables go to ``results/races.md``, the pictures, which the
docs include, to ``docs/figures``.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize

import optax_boost
import optax_boost.nnx

ROOT = pathlib.Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
sys.path.insert(0, str(ROOT / "examples"))

from _data import digits  # noqa: E402
from _methods import METHODS  # noqa: E402
import _training  # noqa: E402


def large_batches() -> optax_boost.RaceResult:
  """LARS and centralization against SGD: the demo's network, batches of 512."""
  steps = _training.STEPS
  methods = {name: method.make(steps, **method.chosen) for name, method in METHODS.items()}
  return _training.race(digits(), methods, batch_size=512, epochs=steps // 2, seeds=range(5))


def freezing() -> optax_boost.RaceResult:
  """Freezing schedules against none: the demo's network, batches of 64, 10 epochs."""
  data, epochs, batch_size = digits(), 10, 64
  steps = epochs * _training.steps_per_epoch(data, batch_size)
  # The layers in the order of the forward pass.
  groups = ["conv_1|norm", "conv_2", "conv_3", "conv_4", "conv_5", "conv_6", "head"]
  number = len(groups)
  rate = optax.cosine_decay_schedule(0.05, steps)
  schedules = {
    "interval, 30 %": optax_boost.interval_freezing(number, 0.3),
    "continuous, 50 %": optax_boost.continuous_freezing(number, 0.5),
  }
  methods = {"no freezing": optax.sgd(rate, 0.9)}
  methods |= {
    name: optax_boost.freeze(optax.sgd(rate, 0.9), groups, schedule)
    for name, schedule in schedules.items()
  }
  methods["progressive from 50 %"] = optax_boost.freeze(
    # The schedule anneals each group's rate itself.
    optax.sgd(0.05, 0.9),
    groups,
    optax_boost.progressive_freezing(number, steps, first=0.5),
  )
  return _training.race(data, methods, batch_size=batch_size, epochs=epochs, seeds=range(3))


def convex() -> optax_boost.RaceResult:
  """SVRG against SGD on logistic regression, batches of 32, at a constant learning rate."""
  part = digits().train
  x = part.images.reshape(len(part.labels), -1)
  x = jnp.asarray(np.concatenate([x, np.ones_like(x[:, :1])], axis=1))
  y = jnp.asarray(part.labels)

  def loss_fn(w, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])
    return jnp.mean(losses) + 0.005 * jnp.sum(w * w)

  data = {"x": x, "y": y}
  with jax.enable_x64(True):
    wide = {"x": jnp.asarray(x, jnp.float64), "y": y}
    objective = jax.jit(jax.value_and_grad(lambda w: loss_fn(w.reshape(-1, 10), wide)))
    start = np.zeros(x.shape[1] * 10)
    found = scipy.optimize.minimize(
      lambda w: [np.asarray(v) for v in objective(w)], start, jac=True, tol=1e-14,
      options={"maxiter": 2000},
    )  # fmt: skip
  optimum = float(found.fun)
  batches = jax.tree.map(lambda a: a.reshape(32, 32, *a.shape[1:]), data)
  full = functools.partial(optax_boost.scan_full_gradient, batches=batches)
  return optax_boost.race(
    loss_fn,
    lambda key: 0.1 * jax.random.normal(key, (x.shape[1], 10)),
    data,
    {
      "sgd": optax.sgd(0.05),
      "svrg": optax.chain(optax_boost.svrg(refresh_every=64), optax.sgd(0.05)),
    },
    steps=40_000,
    batch_size=32,
    full_grad_fn=full,
    # In float32 the objective itself is known to 1e-7.
    evaluate=lambda w: {"loss above the optimum": jnp.maximum(loss_fn(w, data) - optimum, 1e-8)},
  )


RACES = {"large_batches": large_batches, "freezing": freezing, "svrg": convex}


def main() -> None:
  """Runs the races named on the command line, or all."""
  # All benchmarks are called with the same options, such as --rounds 20, which races have not.
  wanted = [name for name in sys.argv[1:] if name in RACES] or list(RACES)
  FIGURES.mkdir(exist_ok=True)
  path = pathlib.Path(__file__).parent / "results" / "races.md"
  text = path.read_text() if path.exists() else "# Races\n\nMade by `python -m benchmarks races`.\n"
  for name in wanted:
    result = RACES[name]()
    heading, rest = f"\n## {RACES[name].__doc__.partition(chr(10))[0]}\n", ""
    before, found, after = text.partition(heading)
    if found and "\n## " in after:
      rest = "\n## " + after.partition("\n## ")[2]
    text = f"{before}{heading}\n{result.table()}\n{rest}"
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.replace(path)
    result.plot(FIGURES / f"{name}.png")
    print(result.table())


if __name__ == "__main__":
  main()
