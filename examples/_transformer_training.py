"""Trains the transformer, and keeps its loss on held-out text against processor time."""

from collections.abc import Callable, Iterable, Sequence
import time
from typing import Any, NamedTuple

import _transformer
import jax
import jax.numpy as jnp
import numpy as np


class Run(NamedTuple):
  """A training.

  Processor time is the sum over all cores. Other work on the machine changes it little.

  Attributes:
    seconds: of processor time that the steps took until each evaluation: the median time of a step
      of each kind, added up, without compiling.
    clock: seconds by the clock until each evaluation, with compiling and all else before the first
      step, without evaluating.
    losses: on held-out text at these, in nats per character.
    programs: how many were compiled: one for each shape of a batch and number of frozen groups.
    memory: bytes that a step occupies at most.
  """

  seconds: np.ndarray
  clock: np.ndarray
  losses: np.ndarray
  programs: int
  memory: int


class Memory(NamedTuple):
  """The bytes of a step.

  Attributes:
    whole: params, state, batch and temporary memory.
    temporary: of these, what is freed at the end of the step.
  """

  whole: int
  temporary: int


def step_memory(program: jax.stages.Compiled) -> Memory:
  """The bytes of a step by XLA's account."""
  sizes = program.memory_analysis()
  donated = sizes.alias_size_in_bytes  # results in the place of arguments
  kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - donated
  return Memory(kept + sizes.temp_size_in_bytes, sizes.temp_size_in_bytes)


def evaluation_points(steps: int, number: int) -> list[int]:
  """After which of the steps to evaluate: at the end, and evenly before."""
  return sorted({max(1, steps * i // number) for i in range(1, number + 1)})


# All windows in one program, one after the other, in the memory of a single window.
@jax.jit
def evaluate(params: Any, held_out: np.ndarray) -> jax.Array:
  """The loss on held-out windows ``(count, length + 1)``, in nats per character."""
  losses = jax.lax.map(lambda window: _transformer.loss_fn(params, window[None]), held_out)
  return losses.mean()


def step_seconds(step: Any, state: Any, batch: np.ndarray, count: int = 15) -> float:
  """The median processor time of a step, of which a copy of the state is trained."""
  state, seconds = jax.tree.map(jnp.copy, state), []
  for _ in range(1 + count):
    begin = time.process_time()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds.append(time.process_time() - begin)
  return float(np.median(seconds[1:]))


def train(
  step: Any,
  start: Any,
  batches: Iterable[np.ndarray],
  held_out: np.ndarray,
  points: Sequence[int],
  on_step: Callable[[], Any] = lambda: None,
  prepare: Callable[[Any, Any], None] = lambda step, state: None,
) -> tuple[Any, Run]:
  """Trains from given params.

  Args:
    step: a train step of the transformer, of :func:`optax_boost.make_train_step`.
    start: the params.
    batches: one for each step.
    held_out: windows to evaluate on.
    points: after which steps to evaluate.
    on_step: called after each step.
    prepare: called with the step and the first state before the first batch is drawn.

  Returns:
    The trained params, and the run.
  """
  evaluate(start, held_out).block_until_ready()  # compiles it
  begin, evaluating = time.perf_counter(), 0.0
  state = step.init(start)
  prepare(step, state)
  kinds: list[Any] = []
  first: dict[Any, tuple[Any, np.ndarray]] = {}
  times: dict[Any, list[float]] = {}
  clock, losses = [], []
  for number, batch in enumerate(batches, 1):
    before = jax.tree.map(jnp.copy, state)  # The step frees the state.
    start_time = time.process_time()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    spent = time.process_time() - start_time
    kind = batch.shape, int(metrics.get("frozen_groups", 0))
    first.setdefault(kind, (before, batch))
    kinds.append(kind)
    times.setdefault(kind, []).append(spent)
    if number in points:
      now = time.perf_counter()
      clock.append(now - begin - evaluating)
      losses.append(float(evaluate(state.params, held_out)))
      evaluating += time.perf_counter() - now
    on_step()

  def seconds(kind: Any) -> float:
    if len(times[kind]) > 5:
      return float(np.median(times[kind]))
    return step_seconds(step, *first[kind])

  cost = {kind: seconds(kind) for kind in first}
  until = np.cumsum([cost[kind] for kind in kinds])
  memory = max(step_memory(step.lower(*sample).compile()).whole for sample in first.values())
  at_points = until[np.array(points) - 1]
  return state.params, Run(at_points, np.array(clock), np.array(losses), len(first), memory)
