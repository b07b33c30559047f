r"""Sequence length warm-up: training sequences that begin short and grow to full length.

  L                    the full sequence length, in tokens
  l_1 < ... < l_k = L  the lengths of the schedule; each divides L
  B                    the number of sequences in a batch

A step at length l trains on the same tokens as a step at full length: each of the B sequences is
cut into L / l *windows*, which makes a batch of B L / l sequences. Attention costs less in short
windows, which saves time where attention is a large part of a step on the device, and a model
learns first from the nearest tokens. Other names are context window scheduling, and curriculum of
sequence lengths.

Sources: Li, Zhang & He, "The Stability-Efficiency Dilemma", arXiv:2108.06084 (DeepSpeed; it
truncates sequences); Zhu et al., "SkyLadder", arXiv:2503.15450 (it masks attention).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np

from optax_boost._foundation import _checks

# A train step is compiled for each length.
_MOST_LENGTHS = 5
# Sequences of 256 tokens and more begin at L / 16 and quadruple. From these, models learned more in
# the same time than with lengths that begin at L / 8 and double. From shorter sequences they
# learned less, so these begin at L / 8 and double (benchmarks/results/long_levels_evidence.md).
_LONG = 256
_FACTOR, _FIRST_SHARE = 2, 8
_LONG_FACTOR, _LONG_FIRST_SHARE = 4, 16
# The largest price of a length that is kept. Schedules whose dearest length had the price 0.79
# gained time on CPUs; one whose cheapest had 0.88 lost time, though its steps were cheaper, since
# fewer steps at full length are left (docs/cards/sequence_lengths.md).
HIGHEST_PRICE = 0.85


@dataclasses.dataclass(frozen=True)
class LengthSchedule:
  """The sequence length of each step; made by :func:`sequence_length_warmup`, or directly.

  Attributes:
    lengths: the lengths in tokens, ascending; at most five, each of which divides the last.
    starts: the first step of each length, ascending from 0.
  """

  lengths: tuple[int, ...]
  starts: tuple[int, ...]

  def __post_init__(self) -> None:
    for name in ("lengths", "starts"):
      values = getattr(self, name)
      if not (isinstance(values, Sequence) and values and all(map(_checks.is_integer, values))):
        raise TypeError(f"`{name}` must be a tuple of integers; got {_checks.shorten(values)}.")
      object.__setattr__(self, name, tuple(map(int, values)))
      if list(values) != sorted(set(values)):
        raise ValueError(f"`{name}` must ascend; got {self.__dict__[name]}.")
    if len(self.lengths) != len(self.starts) or self.starts[0] != 0:
      raise ValueError(
        "`starts` must be the first step of each length, beginning with 0; got"
        f" lengths={self.lengths}, starts={self.starts}."
      )
    if len(self.lengths) > _MOST_LENGTHS:
      raise ValueError(
        f"`lengths` must be at most {_MOST_LENGTHS}, since a train step is compiled for each; got"
        f" {self.lengths}."
      )
    for length in self.lengths:
      check_length("lengths", length, self.full_length)

  @property
  def full_length(self) -> int:
    """The last length, in tokens."""
    return self.lengths[-1]

  def __call__(self, step: int | jax.Array) -> int:
    """Returns the sequence length at an optimizer step, counted from 0; micro-steps don't count.

    Raises:
      TypeError: `step` is traced, though the length is a shape, which ``jit`` must know.
    """
    _checks.check_whole_number("step", step, minimum=0)
    concrete = _checks.concrete_number(step)
    if concrete is None:
      raise TypeError(
        "`step` must be known outside `jit`, for the length is a shape of the batch; got a traced"
        " array. Cut the batch before the compiled step: step_fn(cut_sequences(batch, ...))."
      )
    return self.lengths[int(np.searchsorted(self.starts, int(concrete), side="right")) - 1]


def sequence_length_warmup(
  full_length: int,
  total_steps: int,
  *,
  first_length: int | None = None,
  factor: int | None = None,
  warmup_fraction: float = 0.5,
  growth: Literal["linear", "doubling"] = "linear",
  length_prices: Mapping[Any, float] | None = None,
) -> LengthSchedule:
  r"""Makes a schedule of sequence lengths that grow by a factor until they are full.

  By default, the lengths are L / 16, L / 4 and L if the full length L is 256 tokens or more. Else
  they are L / 8, L / 4, L / 2 and L, since windows of L / 16 tokens would have too little context.
  If L is not a multiple of 16 (below 256 tokens, of 8), larger divisors of L replace fractions.

  With ``growth="linear"``, a length :math:`l_i` begins at the share
  :math:`(l_i - l_1) / (L - l_1)` of the warm-up, when a length that grows linearly from :math:`l_1`
  to :math:`L` would reach :math:`l_i`. With ``"doubling"``, such a length grows exponentially, so
  each doubling takes equally many steps.

  Args:
    full_length: the full sequence length L: the number of tokens of a sequence that a loss
      predicts, which is one less than the number of tokens that the loss reads.
    total_steps: the number of optimizer steps of the training.
    first_length: the first length, a divisor of L. Lowering it makes the first steps cheaper, with
      less context. None: the smallest divisor of L that is at least L / 16, or L / 8 if `factor` is
      2 or 3.
    factor: by how much lengths grow, >= 2: the next length is the smallest divisor of L that is at
      least `factor` times the last one, or L if there is none. Raising it leaves out lengths, so
      fewer programs are compiled. None: 4 from 256 tokens on, else 2.
    warmup_fraction: the share of the steps before L is reached, > 0 and < 1. Raising it makes the
      training cheaper, and leaves fewer steps to learn from long contexts: with 0.75, the last half
      of learned positions is trained too little.
    growth: ``"linear"`` or ``"doubling"``, with which sequences stay short for longer.
    length_prices: the time of a step at each length, relative to the full one, as
      :func:`length_prices` measures it; keys may be strings, as from JSON. A length is left out if
      a step at this length takes more than 0.85 of the time of a full one; sequences stay whole if
      all lengths are left out. Pass the same prices in each process, and to a resumed training.
      None: all lengths are used, whatever a step takes.

  Returns:
    A :class:`LengthSchedule`, a function of the step alone, so a resumed training continues it.

  Raises:
    ValueError: `first_length` doesn't divide `full_length` or is too small; `full_length` has no
      divisor that can be the first length; or `length_prices` lacks a length of the schedule.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.sequence_length_warmup(128, total_steps=1000)
    >>> schedule.lengths, schedule.starts
    ((16, 32, 64, 128), (0, 71, 214, 500))
    >>> schedule(100)
    32
    >>> optax_boost.sequence_length_warmup(1024, total_steps=1000).lengths
    (64, 256, 1024)
    >>> prices = {64: 0.31, 256: 0.92}
    >>> optax_boost.sequence_length_warmup(1024, 1000, length_prices=prices).lengths
    (64, 1024)

  References:
    Li, Zhang & He, `arXiv:2108.06084 <https://arxiv.org/abs/2108.06084>`_; Zhu et al.,
    `arXiv:2503.15450 <https://arxiv.org/abs/2503.15450>`_.
  """
  for name, value in {"full_length": full_length, "total_steps": total_steps}.items():
    _checks.check_whole_number(name, value, static=True)
  _checks.check_number("warmup_fraction", warmup_fraction, above=0.0, below=1.0)
  _checks.check_name("growth", growth, ("linear", "doubling"))
  if factor is None:
    factor = _LONG_FACTOR if full_length >= _LONG else _FACTOR
  _checks.check_whole_number("factor", factor, minimum=2, static=True)
  divisors = [n for n in range(1, full_length + 1) if full_length % n == 0]
  if first_length is None:
    share = _LONG_FIRST_SHARE if factor >= _LONG_FACTOR else _FIRST_SHARE
    first_length = next(n for n in divisors if share * n >= full_length)
    if first_length == full_length:
      raise ValueError(
        f"`full_length` must have a divisor from {math.ceil(full_length / share)} to"
        f" {full_length // 2}, the first length; got {full_length}. Take sequences whose length is"
        f" a multiple of {share}, with one token more if the loss cuts one off."
      )
  check_length("first_length", first_length, full_length)
  least = math.ceil(full_length / factor ** (_MOST_LENGTHS - 1))
  if not least <= first_length < full_length:
    raise ValueError(
      f"`first_length` must be below `full_length` {full_length}, and at least {least} for at most"
      f" {_MOST_LENGTHS} lengths; got {first_length}."
    )
  lengths = [first_length]
  while lengths[-1] < full_length:
    lengths.append(next((n for n in divisors if n >= factor * lengths[-1]), full_length))
  grow = functools.partial(_grow, warmup_steps=warmup_fraction * total_steps, growth=growth)
  schedule = grow(lengths)
  return schedule if length_prices is None else grow(_cheap(schedule.lengths, length_prices))


def _grow(lengths: Sequence[int], warmup_steps: float, growth: str) -> LengthSchedule:
  """Returns the schedule of lengths; of several that would begin in one step, keeps the last."""
  first, full = lengths[0], lengths[-1]
  scale = (lambda n: n) if growth == "linear" else math.log
  span = scale(full) - scale(first) or 1.0  # only the full length is left
  starts = [math.floor(warmup_steps * (scale(n) - scale(first)) / span) for n in lengths]
  kept = [i for i, start in enumerate(starts) if start not in starts[i + 1 :]]
  return LengthSchedule(tuple(lengths[i] for i in kept), tuple(starts[i] for i in kept))


def _cheap(lengths: Sequence[int], length_prices: Mapping[Any, float]) -> list[int]:
  """Returns the lengths whose price is at most `HIGHEST_PRICE`, and the last, the full length."""
  prices, (*short, full) = read_prices(length_prices), lengths
  if not set(short) <= set(prices):
    raise ValueError(
      f"`length_prices` must have a price for each length below the full one, {short}; got"
      f" {_checks.shorten(prices)}. `optax_boost.length_prices` measures them."
    )
  return [n for n in short if prices[n] <= HIGHEST_PRICE] + [full]


def read_prices(length_prices: Mapping[Any, float]) -> dict[int, float]:
  """Checks prices by length, and returns them with integers as keys, which JSON makes strings."""
  words = "a dict from lengths to prices, as of `optax_boost.length_prices`"
  _checks.check_type("length_prices", length_prices, Mapping, words)
  for length, price in length_prices.items():
    if not (_checks.is_integer(length) or (isinstance(length, str) and length.isdecimal())):
      raise TypeError(f"`length_prices` must be {words}; got the key {_checks.shorten(length)}.")
    _checks.check_number("length_prices", price, above=0.0)
  return {int(length): float(price) for length, price in length_prices.items()}


def check_length(name: str, length: int, full_length: int) -> None:
  """Raises ValueError unless a length divides the full length."""
  _checks.check_whole_number(name, length, static=True)
  if full_length % length:
    raise ValueError(
      f"`{name}` must divide the full length {full_length}, so that windows keep all tokens; got"
      f" {length}."
    )
