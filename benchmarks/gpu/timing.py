"""Runs steps, and reads their time, the memory that they need and the bytes that they must move."""

from collections.abc import Callable
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost

_ROUNDS = 3

Record = dict[str, Any]


class Contender(NamedTuple):
  """An optimizer's step, to be measured inside of a program.

  Attributes:
    init: makes the state from params.
    step: ``step(params, state, grads)`` returns new params and state.
    moved: the bytes that a step must read and write; None: those of params and state twice, and of
      gradients once.
  """

  init: Callable[[Any], Any]
  step: Callable[[Any, Any, Any], tuple[Any, Any]]
  moved: float | None = None


def ours(tx: optax.GradientTransformation, moved: float | None = None, **extra: Any) -> Contender:
  """An optimizer applied by `apply_gradients`, in place."""

  def step(params: Any, state: Any, grads: Any) -> Any:
    return optax_boost.apply_gradients(tx, grads, state, params, **extra)

  return Contender(tx.init, step, moved)


def theirs(tx: optax.GradientTransformation, moved: float | None = None) -> Contender:
  """An optimizer applied as optax's documentation does it."""

  def step(params: Any, state: Any, grads: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return Contender(tx.init, step, moved)


def copy_speed(megabytes: int) -> float:
  """Bytes that the device reads and writes in a second, copying an array inside of a program."""
  steps = 20
  numbers = jnp.zeros(megabytes * 250_000)
  add = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda i, x: x + i, x), donate_argnums=0)
  numbers = jax.block_until_ready(add(numbers))
  found = []
  for _ in range(_ROUNDS):
    start = time.perf_counter()
    numbers = jax.block_until_ready(add(numbers))
    found.append(time.perf_counter() - start)
  return 2 * numbers.nbytes * steps / min(found)


def optimizer_steps(
  contender: Contender, params: Any, speed: float, steps: int, grads: Any = None
) -> Record:
  """Measures an optimizer inside of a program that makes so many steps.

  Steps that are called from Python take the host's time to hand over hundreds of buffers.

  Args:
    contender: the optimizer.
    params: a tree of arrays.
    speed: bytes that the device moves in a second.
    steps: in one program.
    grads: the gradients; None: like the params.
  """
  grads = jax.tree.map(lambda x: 0.01 * x, params) if grads is None else grads
  carry = jax.tree.map(jnp.copy, (params, contender.init(params)))
  moved = contender.moved or 2 * _bytes(carry) + _bytes(grads)

  def program(carry: Any, grads: Any) -> Any:
    def body(number: jax.Array, carry: Any) -> Any:
      # Behind a barrier with the counter, gradients are others in each step to XLA, which would
      # compute before the loop what depends on them alone.
      each, _ = jax.lax.optimization_barrier((grads, number))
      return contender.step(*carry, each)

    return jax.lax.fori_loop(0, steps, body, carry)

  record = _measure(jax.jit(program, donate_argnums=0).lower(carry, grads), carry, (grads,), steps)
  least = 1e3 * moved / speed
  return record | {"must move, MB": moved / 1e6, "least, ms": least, "over": record["ms"] / least}


def train_step(step: Any, state: Any, batch: Any, calls: int) -> Record:
  """Measures calls of a train step, or of a jitted ``step(state, batch)``."""
  lowered = step.lower(state, batch)
  return _measure(lowered, state, (batch,), 1, calls, lambda *arguments: step(*arguments)[0])


def plain_step(loss: Any, tx: optax.GradientTransformation) -> Any:
  """The train step that a user of optax writes."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return jax.jit(step, donate_argnums=0)


def _measure(
  lowered: Any,
  carry: Any,
  others: tuple[Any, ...],
  steps: int,
  calls: int = 1,
  run: Callable[..., Any] | None = None,
) -> Record:
  """Times a program that takes its results again.

  Args:
    lowered: the program, from ``jax.jit(...).lower``.
    carry: its first argument, which may be donated.
    others: what every call gets.
    steps: that the program makes.
    calls: how many make one of the measurements.
    run: a function to call instead of the compiled program; it returns the next carry.

  Returns:
    The least milliseconds a step of several measurements, the spread over the least, the memory,
    and seconds to compile.
  """
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  run = run or compiled
  carry = jax.block_until_ready(run(carry, *others))
  found = []
  for _ in range(_ROUNDS):
    start = time.perf_counter()
    for _ in range(calls):
      carry = run(carry, *others)
    jax.block_until_ready(carry)
    found.append(1e3 * (time.perf_counter() - start) / calls / steps)
  memory = compiled.memory_analysis()
  return {
    "ms": min(found),
    "spread": max(found) / min(found) - 1,
    "temporary, MB": memory.temp_size_in_bytes / 1e6,
    "compile, s": seconds,
  }


def peak_memory() -> Record:
  """The most memory that the process has had in use on the device; nothing where JAX can't tell."""
  statistics = jax.devices()[0].memory_stats() or {}
  return {"peak, MB": statistics["peak_bytes_in_use"] / 1e6} if statistics else {}


def _bytes(tree: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def filled(shapes: Any) -> Any:
  """Random leaves of a tree of shapes, made on the host: no program is compiled for them."""
  rng = np.random.default_rng(0)

  def fill(leaf: Any) -> jax.Array:
    numbers = rng.standard_normal(min(leaf.size, 4096), np.float32)
    return jnp.asarray(np.resize(0.02 * numbers, leaf.shape).astype(leaf.dtype))

  return jax.tree.map(fill, shapes)
