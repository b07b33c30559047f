"""Measures what a step on short sequences costs on a device, relative to a step on full ones."""

from collections.abc import Callable, Mapping
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from optax_boost._foundation import _checks, _types
from optax_boost._sequences import _cut, _schedule

# How many steps are timed as one, so that Python prepares the next while the device computes.
_STEPS = 2


def length_prices(
  step: Callable[[_types.Batch], Any],
  batch: _types.Batch,
  schedule: _schedule.LengthSchedule,
  *,
  axes: Mapping[str, _cut.LeafAxes] | None = None,
  rounds: int = 5,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
  r"""Measures the price of each length: the time of a step, relative to one at full length.

  .. math::
    \text{price}(l) = \operatorname{median}_r \frac{t_r(l)}{t_r(L)}

  where :math:`t_r(l)` is the time of two steps at length l in round r, and L is the full length.
  The lengths take turns, so that other work on the machine slows all of them. The price depends on
  the device, the kernel of attention and the width of the model. Measure before the training: the
  programs that are compiled are those that the training needs. If several processes train together,
  all of them must call this function, and all get the prices of the first.

  Args:
    step: a function of a batch, which makes a step of the training on a copy of its state and
      returns arrays of the new state: ``train_step.on_copy(state)``, or a function of yours.
    batch: a batch of full sequences, as for :func:`cut_sequences`.
    schedule: the schedule whose lengths are measured.
    axes: how to cut leaves of the batch, as for :func:`cut_sequences`.
    rounds: how many times each length is timed. Raising it makes prices less noisy and takes
      longer: `rounds` times two steps at each length, after one which compiles the program.
    clock: a function that returns the time in seconds.

  Returns:
    A dict from each length to its price, rounded to three digits. The full length has the price 1.
    :func:`sequence_length_warmup` and :func:`auto_boost` take the dict, also after ``json.dumps``
    and ``json.loads``.

  Raises:
    TypeError: `step` is a train step, which takes a state, too.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> def loss_fn(scale, x):  # of (batch, length): pairs of tokens cost time
    ...   return jnp.mean(scale * jnp.einsum("bi,bj->bij", x, x))
    >>> step = optax_boost.make_train_step(loss_fn, optax.sgd(0.1))
    >>> state, batch = step.init(jnp.ones(())), jnp.ones((2, 64))
    >>> schedule = optax_boost.sequence_length_warmup(64, total_steps=100)
    >>> prices = optax_boost.length_prices(step.on_copy(state), batch, schedule)
    >>> list(prices), prices[64]
    ([8, 16, 32, 64], 1.0)
    >>> schedule = optax_boost.sequence_length_warmup(64, total_steps=100, length_prices=prices)
  """
  if hasattr(step, "on_copy"):
    raise TypeError(
      "`step` must be a function of a batch; got a train step, which takes a state, too. Pass"
      " `step.on_copy(state)`, or for an NNX model `step.on_copy(model, optimizer)`."
    )
  _checks.check_callable("step", step, "step(batch)")
  _checks.check_callable("clock", clock, "clock()")
  _checks.check_type("schedule", schedule, _schedule.LengthSchedule, "of sequence_length_warmup")
  _checks.check_whole_number("rounds", rounds, static=True)
  full = schedule.full_length
  batches = {n: _cut.cut_sequences(batch, n, full, axes) for n in schedule.lengths}
  for windows in batches.values():  # compiles the programs
    jax.block_until_ready(step(windows))
  ratios = []
  for _ in range(rounds):
    seconds = []
    for windows in batches.values():
      start = clock()
      results = [step(windows) for _ in range(_STEPS)]
      jax.block_until_ready(results[-1])
      seconds.append(clock() - start)
    ratios.append(np.divide(seconds, seconds[-1]))
  prices = np.asarray(multihost_utils.broadcast_one_to_all(np.median(ratios, axis=0)))
  return {n: round(float(price), 3) for n, price in zip(batches, prices, strict=True)}
