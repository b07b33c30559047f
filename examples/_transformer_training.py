"""Trains the transformer, and keeps its loss on held-out text against processor time."""

from collections.abc import Callable, Iterable, Sequence
import time
from typing import Any, NamedTuple

import _transformer
import jax
import numpy as np
import optax


class Run(NamedTuple):
  """A training.

  Processor time is the sum over all cores. Other work on the machine changes it little.

  Attributes:
    seconds: of processor time since the start, at each evaluation, without compiling and
      evaluating.
    losses: on held-out text at these, in nats per character.
    programs: how many were compiled: one for each shape of a batch and number of frozen groups.
    compiling: seconds of processor time that this took.
    memory: bytes that a step occupies at most.
  """

  seconds: np.ndarray
  losses: np.ndarray
  programs: int
  compiling: float
  memory: int


def step_memory(program: jax.stages.Compiled) -> int:
  """The bytes of a step by XLA's account: params, state, batch and temporary memory."""
  sizes = program.memory_analysis()
  donated = sizes.alias_size_in_bytes  # results in the place of arguments
  kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - donated
  return kept + sizes.temp_size_in_bytes


def evaluation_points(steps: int, number: int) -> list[int]:
  """After which of the steps to evaluate: at the end, and evenly before."""
  return sorted({max(1, steps * i // number) for i in range(1, number + 1)})


# All windows in one program, one after the other, in the memory of a single window.
@jax.jit
def evaluate(params: Any, held_out: np.ndarray) -> jax.Array:
  """The loss on held-out windows ``(count, length + 1)``, in nats per character."""
  losses = jax.lax.map(lambda window: _transformer.loss_fn(params, window[None]), held_out)
  return losses.mean()


def train(
  step: Any,
  start: Any,
  batches: Iterable[np.ndarray],
  held_out: np.ndarray,
  points: Sequence[int],
  on_step: Callable[[], Any] = lambda: None,
) -> tuple[Any, Run]:
  """Trains from given params.

  Args:
    step: a train step of the transformer, of :func:`optax_boost.make_train_step`.
    start: the params.
    batches: one for each step.
    held_out: windows to evaluate on.
    points: after which steps to evaluate.
    on_step: called after each step.

  Returns:
    The trained params, and the run.
  """
  state = step.init(start)
  spent = compiling = 0.0
  memory: dict[Any, int] = {}
  seconds, losses = [], []
  for number, batch in enumerate(batches, 1):
    kind = batch.shape, int(optax.tree.get(state.opt_state, "frozen_groups", 0))
    if kind not in memory:
      begin = time.process_time()
      memory[kind] = step_memory(step.lower(state, batch).compile())
      compiling += time.process_time() - begin
    begin = time.process_time()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    spent += time.process_time() - begin
    if number in points:
      seconds.append(spent)
      losses.append(float(evaluate(state.params, held_out)))
    on_step()
  run = Run(np.array(seconds), np.array(losses), len(memory), compiling, max(memory.values()))
  return state.params, run
