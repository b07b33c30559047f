"""Steps that are skipped, and steps that may be: ``python -m benchmarks.in_place --rounds 20``."""

import argparse
from collections.abc import Callable
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness
import optax_boost

_ABOUT = """\
One step in one jit, params and state donated, 1e7 float32 entries. Ours is `apply_gradients`,
optax's is `update` and `optax.apply_updates`. An idle micro-step is one that ends no window, and
`a += g` the pass that it can't do without; `unchecked` is `not_finite=None`. A window is four
micro-steps, and its time that of one of them. Temporary memory is that of the compiled program, in
leaves. Ratios are medians of the ratios within a round.

What such a step can't go below: `carried` takes params and state through the call untouched, as a
call takes its time for each array; `read twice` reads the gradients once more, for their sum, as a
check of them must before anything is written.

`dynamic_loss_scale` looks at the gradients, as `optax.apply_if_finite` does; `updates` is
`check="updates"`, which computes a step once ahead, to see whether its result is finite; `two
calls` are `update` and `optax.apply_updates`."""

ENTRIES = 10_000_000
LEAVES = (40, 161)
WINDOW = 4
IDLE = 2**30
Step = Callable[[Any, Any, Any], Any]


def contender(name: str, step: Step, state: Any, params: Any, calls: int = 1) -> _harness.Contender:
  """Compiles a step.

  Args:
    name: of the contender.
    step: from gradients, state and params to params and state.
    state: the first one.
    params: the first ones.
    calls: how many make a measurement.
  """
  grads = jax.tree.map(lambda p: 0.01 * p, params)
  params, state = jax.tree.map(jnp.array, (params, state))

  def carried(params: Any, state: Any, grads: Any) -> Any:
    return step(grads, state, params)

  start = time.perf_counter()
  compiled = jax.jit(carried, donate_argnums=(0, 1)).lower(params, state, grads).compile()
  facts = {
    "temp, leaves": compiled.memory_analysis().temp_size_in_bytes / params[0].nbytes,
    "trace and compile, s": time.perf_counter() - start,
  }
  return _harness.carried(name, compiled, (params, state), grads, calls=calls, facts=facts)


def two_calls(tx: optax.GradientTransformation) -> Step:
  """A step as optax's users write it."""

  def step(grads: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def add(grads: Any, state: Any, params: Any) -> Any:
  """The pass of an accumulation."""
  return jax.tree.map(jnp.add, params, grads), state


def add_beside(grads: Any, state: Any, params: Any) -> Any:
  """The pass of an accumulation beside params and an optimizer's state."""
  accumulator, inner_state = state
  return params, (jax.tree.map(jnp.add, accumulator, grads), inner_state)


def reading_twice(step: Step) -> Step:
  """A step that reads the gradients once more; its state has their sum first."""

  def with_sum(grads: Any, state: Any, params: Any) -> Any:
    total, inner_state = state
    params, inner_state = step(grads, inner_state, params)
    # Not of squares: XLA would keep those for Adam, as arrays.
    return params, (total + jnp.sum(jnp.stack([jnp.sum(g) for g in grads])), inner_state)

  return with_sum


def compare(name: str, tx: optax.GradientTransformation, leaves: int, rounds: int) -> list[Any]:
  """Idle micro-steps, windows and loss scales around an optimizer."""
  # XLA's code for CPUs vectorises rows of 256, as layers have them, but none of ten.
  rows = ENTRIES // leaves // 256
  params = [jnp.full((rows, 256), 0.5 + i / leaves) for i in range(leaves)]

  def ours(title: str, tx: optax.GradientTransformation, calls: int = 1) -> _harness.Contender:
    step = functools.partial(optax_boost.apply_gradients, tx)
    return contender(title, step, tx.init(params), params, calls)

  def optaxes(title: str, tx: optax.GradientTransformation, calls: int = 1) -> _harness.Contender:
    return contender(title, two_calls(tx), tx.init(params), params, calls)

  accumulate, scale = optax_boost.accumulate, optax_boost.dynamic_loss_scale
  idle = (params, tx.init(params))
  total = jnp.zeros([])
  of = f"{name}, {leaves} leaves"
  steps = optax.MultiSteps(tx, WINDOW).gradient_transformation()
  return [
    _harness.compare(
      [
        contender("a += g", add, (), params),
        contender("a += g, carried", add_beside, idle, params),
        contender("a += g, carried, read twice", reading_twice(add_beside), (total, idle), params),
        ours("accumulate, unchecked", accumulate(tx, IDLE, not_finite=None)),
        ours("accumulate", accumulate(tx, IDLE)),
      ],
      ["a += g"],
      rounds,
      f"An idle micro-step, {of}",
    ),
    _harness.compare(
      [
        ours("accumulate, unchecked", accumulate(tx, WINDOW, not_finite=None), WINDOW),
        ours("accumulate", accumulate(tx, WINDOW), WINDOW),
        optaxes("optax.MultiSteps", steps, WINDOW),
      ],
      ["optax.MultiSteps"],
      rounds,
      f"A window of four, {of}",
    ),
    _harness.compare(
      [
        optaxes(name, tx),
        contender(f"{name}, read twice", reading_twice(two_calls(tx)), (total, idle[1]), params),
        ours("dynamic_loss_scale", scale(tx)),
        ours("dynamic_loss_scale, updates", scale(tx, check="updates")),
        optaxes("dynamic_loss_scale, two calls", scale(tx)),
        optaxes("dynamic_loss_scale, updates, two calls", scale(tx, check="updates")),
        optaxes("optax.apply_if_finite", optax.apply_if_finite(tx, 5)),
      ],
      [name, "optax.apply_if_finite"],
      rounds,
      f"A step that may be skipped, {of}",
    ),
  ]


def main() -> None:
  """Measures all pairs and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=20, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  optimizers = {"Adam": optax.adam(1e-3), "SGD with momentum": optax.sgd(0.1, 0.9)}
  comparisons = []
  for leaves in LEAVES:
    for name, tx in optimizers.items():
      comparisons += compare(name, tx, leaves, options.rounds)
  where = _harness.machine(["jax", "jaxlib", "optax"])
  _harness.write("in_place", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
