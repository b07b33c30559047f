"""Ours next to optax's own: ``python -m benchmarks.optax_peers --rounds 20``.

With ``--ema``: an exponential average of the params.
"""

import argparse
from collections.abc import Mapping
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _harness
import optax_boost

_ABOUT = """\
One call of `update` and `optax.apply_updates` in one jit, params and state donated, float32, 161
leaves of 256 x 64 (2.6 M parameters). Ratios are medians of the ratios within a round to optax's
own. Accumulation: a window of four micro-batches, four calls; `optax.MultiSteps` computes the inner
optimizer at each of them, ours at the last. `optax.centralize` averages over all axes but the
first, which for Flax's kernels is the wrong axis; the work is the same. `optax.apply_if_finite`
skips bad steps as `dynamic_loss_scale` does, without a scale."""

_ABOUT_EMA = """\
One Adam step of 2.6 M float32 params in 40 leaves, in one jit, params, state and average donated,
with an exponential average of the params (decay 0.99). `optax_boost.average_params` is around Adam,
and steps by `apply_gradients`; the average is in its state. By hand, `update` and
`optax.apply_updates` are followed by `optax.incremental_update` of an average that the loop
carries. (`optax.ema` averages updates, not params.) Times are processor time, ratios are medians of
the ratios within a round."""

SHAPES = [(256, 64)] * 161


def contender(
  name: str, tx: optax.GradientTransformation, params: Any, calls: int
) -> _harness.Contender:
  """Compiles one call.

  Args:
    name: of the contender.
    tx: the transformation.
    params: the params.
    calls: how many make a measurement.
  """
  grads = jax.tree.map(lambda p: 0.01 * p, params)
  params = jax.tree.map(jnp.array, params)
  state = tx.init(params)

  def update(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  start = time.perf_counter()
  step = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, grads).compile()
  facts = {
    "trace and compile, s": time.perf_counter() - start,
    "temp bytes": step.memory_analysis().temp_size_in_bytes,
  }

  return _harness.carried(name, step, (params, state), grads, calls=calls, facts=facts)


def compare(
  title: str, methods: Mapping[str, optax.GradientTransformation], rounds: int, calls: int = 1
) -> dict[str, Any]:
  """Runs ours and optax's, which is the last of the methods."""
  rng = np.random.default_rng(0)
  params = [jnp.asarray(rng.standard_normal(s, dtype=np.float32)) for s in SHAPES]
  contenders = [contender(name, tx, params, calls) for name, tx in methods.items()]
  return _harness.compare(contenders, [contenders[-1].name], rounds, title)


def compare_ema(rounds: int) -> dict[str, Any]:
  """Compares averages of params with one by hand."""
  adam, by_hand = optax.adam(1e-3), "optax.incremental_update by hand"
  averaging = optax_boost.average_params(adam, decay=0.99)
  params = [jnp.full((256, 256), 0.1 + i) for i in range(40)]
  grads = jax.tree.map(lambda p: 0.01 * p, params)

  def alone(params: Any, state: Any, grads: Any) -> Any:
    updates, state = adam.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def ours(params: Any, state: Any, grads: Any) -> Any:
    return optax_boost.apply_gradients(averaging, grads, state, params)

  def theirs(params: Any, state: Any, grads: Any) -> Any:
    adam_state, average = state
    params, adam_state = alone(params, adam_state, grads)
    return params, (adam_state, optax.incremental_update(params, average, 0.01))

  contenders = []
  for name, step, state in (
    ("Adam alone", alone, adam.init(params)),
    ("optax_boost.average_params", ours, averaging.init(params)),
    (by_hand, theirs, (adam.init(params), params)),
  ):
    carry = jax.tree.map(jnp.copy, (params, state))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carry, grads).compile()
    facts = {"temp bytes": compiled.memory_analysis().temp_size_in_bytes}
    contender = _harness.carried(name, compiled, carry, grads, facts=facts)
    contenders.append(_harness.in_processor_time(contender))
  return _harness.compare(
    contenders, ["Adam alone", by_hand], rounds, "Adam, 40 leaves", patience=1
  )


def main() -> None:
  """Measures all pairs and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=20, help="quiet rounds to collect")
  parser.add_argument("--ema", action="store_true", help="an average of the params")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  where = _harness.machine(["jax", "jaxlib", "optax", "numpy"])
  if options.ema:
    averages = [compare_ema(options.rounds)]
    _harness.write("params_ema", _ABOUT_EMA, averages, where, options.out)
    return
  adam, sgd, rounds = optax.adam(1e-3), optax.sgd(0.1, 0.9), options.rounds
  comparisons = [
    compare(
      "Four micro-batches, Adam",
      {
        "optax_boost.accumulate": optax_boost.accumulate(adam, 4),
        "optax.MultiSteps": optax.MultiSteps(adam, 4).gradient_transformation(),
      },
      rounds,
      calls=4,
    ),
    compare(
      "Centralization, then SGD",
      {
        "optax_boost.centralize": optax.chain(optax_boost.centralize(), sgd),
        "optax.centralize": optax.chain(optax.centralize(), sgd),
      },
      rounds,
    ),
    compare(
      "Skipping what is not finite, SGD",
      {
        "optax_boost.dynamic_loss_scale": optax_boost.dynamic_loss_scale(sgd),
        "optax.apply_if_finite": optax.apply_if_finite(sgd, 5),
      },
      rounds,
    ),
  ]
  _harness.write("optax_peers", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
