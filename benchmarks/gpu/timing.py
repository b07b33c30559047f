"""Compiles a step, runs it, and reads its time and memory."""

from collections.abc import Callable
import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.devices import programs
import optax_boost

_ROUNDS = 5

Record = dict[str, Any]


def measure(
  lowered: Any,
  carry: tuple[Any, ...],
  rest: tuple[Any, ...],
  calls: int,
  run: Callable[..., tuple[Any, ...]] | None = None,
) -> Record:
  """Times a step that takes its results again.

  Args:
    lowered: the step, from ``jax.jit(...).lower``.
    carry: its first arguments, which may be donated.
    rest: what every call gets.
    calls: how many make one of the measurements.
    run: a function to call instead of the compiled step; it returns the next carry.

  Returns:
    The least milliseconds a call of several measurements, the spread over the least, seconds to
    compile, and figures of the program.
  """
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  run = run or compiled
  for _ in range(2):
    carry = run(*carry, *rest)
  jax.block_until_ready(carry)
  found = []
  for _ in range(_ROUNDS):
    start = time.perf_counter()
    for _ in range(calls):
      carry = run(*carry, *rest)
    jax.block_until_ready(carry)
    found.append(1e3 * (time.perf_counter() - start) / calls)
  return {
    "ms": min(found),
    "spread": max(found) / min(found) - 1,
    "compile, s": seconds,
    **memory_of(compiled),
  }


def memory_of(compiled: Any) -> Record:
  """What a compiled program needs, and how many kernels its entry computation has."""
  memory = compiled.memory_analysis()
  return {
    "temporary, MB": memory.temp_size_in_bytes / 1e6,
    "whole, MB": (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 1e6,
    "kernels": programs.read(compiled)["kernels"],
  }


def optimizer_step(
  tx: optax.GradientTransformation, params: Any, calls: int, **extra: Any
) -> Record:
  """Measures an optimizer alone, on gradients that are like the params."""

  def step(params: Any, state: Any, grads: Any) -> Any:
    return optax_boost.apply_gradients(tx, grads, state, params, **extra)

  grads = jax.tree.map(lambda x: 0.01 * x, params)
  # Copies, since they are donated.
  params = jax.tree.map(lambda x: x.copy(), params)
  carry = (params, tx.init(params))
  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*carry, grads)
  return measure(lowered, carry, (grads,), calls)


def train_step(step: Any, state: Any, batch: Any, calls: int) -> Record:
  """Measures a train step, with its work on the host."""

  def run(state: Any, batch: Any) -> tuple[Any]:
    return (step(state, batch)[0],)

  return measure(step.lower(state, batch), (state,), (batch,), calls, run)


def arrays(shapes: list[tuple[int, ...]], dtype: Any = np.float32) -> list[jax.Array]:
  """Random leaves."""
  keys = jax.random.split(jax.random.key(0), len(shapes))
  draw: Callable[..., jax.Array] = jax.jit(jax.random.normal, static_argnums=(1, 2))
  return [0.02 * draw(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
