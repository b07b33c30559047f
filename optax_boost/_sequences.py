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
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _checks, _paths, _patterns, _types

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
# How a leaf of a batch is cut; the docstring of `cut_sequences` explains the values.
LeafAxes: TypeAlias = int | tuple[int, int] | Literal["positions", "repeat", "keep"]
_WORDS = ("positions", "repeat", "keep")
# How far a sum of probabilities in bfloat16 may be from 1.
_ROUNDING = 1e-2


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
      _check_length("lengths", length, self.full_length)

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
      divisor that can be the first length; or `length_prices` lacks a length.

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
  _check_length("first_length", first_length, full_length)
  least = math.ceil(full_length / factor ** (_MOST_LENGTHS - 1))
  if not least <= first_length < full_length:
    raise ValueError(
      f"`first_length` must be below `full_length` {full_length}, and at least {least} for at most"
      f" {_MOST_LENGTHS} lengths; got {first_length}."
    )
  lengths = [first_length]
  while lengths[-1] < full_length:
    lengths.append(next((n for n in divisors if n >= factor * lengths[-1]), full_length))
  if length_prices is not None:
    lengths = _cheap_lengths(lengths, length_prices)
    first_length = lengths[0]
    if first_length == full_length:
      return LengthSchedule((full_length,), (0,))
  scale = (lambda n: n) if growth == "linear" else math.log
  span = scale(full_length) - scale(first_length)
  shares = [warmup_fraction * (scale(n) - scale(first_length)) / span for n in lengths]
  starts = [math.floor(share * total_steps) for share in shares]
  # If several lengths would begin in one step of a short training, keep the last.
  kept = [i for i, start in enumerate(starts) if start not in starts[i + 1 :]]
  return LengthSchedule(tuple(lengths[i] for i in kept), tuple(starts[i] for i in kept))


def _cheap_lengths(lengths: list[int], length_prices: Mapping[Any, float]) -> list[int]:
  """Returns the lengths whose price is at most `HIGHEST_PRICE`, and the last, the full length."""
  prices = read_prices(length_prices)
  if not set(lengths[:-1]) <= set(prices):
    raise ValueError(
      f"`length_prices` must have a price for each length below the full one, {lengths[:-1]}; got"
      f" {_checks.shorten(prices)}. `optax_boost.length_prices` measures them."
    )
  return [n for n in lengths[:-1] if prices[n] <= HIGHEST_PRICE] + lengths[-1:]


def read_prices(length_prices: Mapping[Any, float]) -> dict[int, float]:
  """Checks prices by length, and returns them with integers as keys, which JSON makes strings."""
  words = "a dict from lengths to prices, as of `optax_boost.length_prices`"
  _checks.check_type("length_prices", length_prices, Mapping, words)
  for length, price in length_prices.items():
    if not (_checks.is_integer(length) or (isinstance(length, str) and length.isdecimal())):
      raise TypeError(f"`length_prices` must be {words}; got the key {_checks.shorten(length)}.")
    _checks.check_number("length_prices", price, above=0.0)
  return {int(length): float(price) for length, price in length_prices.items()}


def cut_sequences(
  batch: _types.Batch,
  length: int,
  full_length: int,
  axes: Mapping[str, LeafAxes] | None = None,
) -> _types.Batch:
  """Cuts each sequence of a batch into windows, which become sequences of a larger batch.

  L is `full_length`. By default an array is cut along axis 1, if axis 1 has L or L + 1 entries and
  no later axis has L or L + 1. Every other array, except a scalar, must be named in `axes`. All
  tokens are kept. Windows of one sequence lie side by side, so a batch that is sharded over its
  sequences stays so, without communication. If leaves have L + 1 tokens, from which a loss takes
  inputs and targets, the windows have one token more than `length`, and overlap by one.

  Args:
    batch: a tree of NumPy or JAX arrays, with B sequences along axis 0. The arrays may be traced.
      Cut stacked micro-batches with ``jax.vmap``.
    length: the length of the windows in tokens, a divisor of L; static. L leaves the batch as is.
    full_length: L, the sequence length in tokens; static.
    axes: how to cut leaves: a dict from patterns (see :func:`path_mask`) to one of these values. A
      number is the axis of L or L + 1 entries. Two numbers are the axes of a mask of pairs of
      tokens; pairs within a window are kept. ``"positions"`` cuts positions along axis 1 and lets
      them begin at 0 in each window. ``"repeat"`` gives a sequence's value to all of its windows,
      which is right for an id, but seldom for a label, and never for a length: pass a mask of
      tokens instead. ``"keep"`` is for an array without sequences.

  Returns:
    The batch, with B L / `length` sequences. Scalars and leaves that aren't arrays are unchanged.

  Raises:
    TypeError: `length` is traced, or a leaf is an array of another library.
    ValueError: `length` doesn't divide L; `axes` doesn't name a leaf that is not cut by default, or
      a leaf each of whose rows sums to 1, as probabilities of L classes do; leaves have unequal
      numbers of sequences; `axes` has a pattern that matches no leaf, or an axis of another length.

  Examples:
    >>> import numpy as np, optax_boost
    >>> batch = {"tokens": np.arange(9)[None], "document": np.array([7])}
    >>> batch = optax_boost.cut_sequences(batch, 4, 8, axes={"document": "repeat"})
    >>> batch["tokens"]
    array([[0, 1, 2, 3, 4],
           [4, 5, 6, 7, 8]])
    >>> batch["document"]
    array([7, 7])
  """
  return cut(batch, length, full_length, axes, reads_values=True)


def cut(
  batch: _types.Batch,
  length: int,
  full_length: int,
  axes: Mapping[str, LeafAxes] | None,
  *,
  reads_values: bool,
) -> _types.Batch:
  """Cuts a batch as :func:`cut_sequences` does.

  If `reads_values` is False, no values are read, so leaves that hold classes are not refused.
  """
  _checks.check_whole_number("full_length", full_length, static=True)
  _check_length("length", length, full_length)
  leaves, structure = jax.tree.flatten(batch)
  paths = _paths.leaf_paths(batch)
  found = [
    _treatment(path, leaf, named, full_length, reads_values)
    for path, leaf, named in zip(paths, leaves, match_axes(axes, paths), strict=True)
  ]
  treatments = _check_named(paths, leaves, found, full_length, axes or {})
  _check_sequences(paths, leaves, treatments)
  if length == full_length:
    return batch
  windows = [
    leaf if how == "keep" else _windows(leaf, how, length, full_length)
    for leaf, how in zip(leaves, treatments, strict=True)
  ]
  return jax.tree.unflatten(structure, windows)


def _check_length(name: str, length: int, full_length: int) -> None:
  _checks.check_whole_number(name, length, static=True)
  if full_length % length:
    raise ValueError(
      f"`{name}` must divide the full length {full_length}, so that windows keep all tokens; got"
      f" {length}."
    )


def match_axes(axes: Mapping[str, LeafAxes] | None, paths: list[str]) -> list[LeafAxes | None]:
  """Checks `axes`; returns for each path the value of the pattern that matches it, or None."""
  if axes is None:
    return [None] * len(paths)
  _checks.check_type("axes", axes, Mapping, "a dict from patterns to axes")
  for pattern, how in axes.items():
    pair = isinstance(how, tuple) and len(how) == 2 and all(map(_checks.is_integer, how))
    if not (_checks.is_integer(how) or pair or (isinstance(how, str) and how in _WORDS)):
      raise TypeError(
        "`axes` must give each pattern an axis, two axes, 'positions', 'repeat' or 'keep'; got"
        f" {_checks.shorten(how)} for {pattern!r}."
      )
  treatments = list(axes.values())
  matches = _patterns.first_match("axes", list(axes), paths, required=True)
  return [None if index is None else treatments[index] for index in matches]


def _treatment(
  path: str, leaf: Any, named: LeafAxes | None, full_length: int, reads_values: bool
) -> LeafAxes | None:
  """Returns how a leaf is cut, with axes >= 0; None if `axes` must name the leaf, but does not.

  `named` is the value that `axes` has for the leaf, or None. If `reads_values`, a leaf that seems
  to hold classes must be named.
  """
  name = _leaf_name(path)
  if not _checks.is_any_array(leaf) and hasattr(leaf, "shape") and not isinstance(leaf, np.generic):
    raise TypeError(
      f"`batch` must hold NumPy or JAX arrays; got {name} of type {type(leaf).__name__}. Convert it"
      " with np.asarray."
    )
  shape = jnp.shape(leaf) if _checks.is_any_array(leaf) else ()
  if not shape:
    return "keep"
  long_axes = _long_axes(shape, full_length)
  if named is None:
    return 1 if long_axes == [1] and not (reads_values and _holds_classes(leaf)) else None
  if named in ("repeat", "keep"):
    return named
  axes = tuple(axis + len(shape) if axis < 0 else axis for axis in _cut_axes(named))
  if len(set(axes)) < len(axes) or not set(axes) <= set(long_axes):
    raise ValueError(
      f"`axes` must name axes of {full_length} or {full_length + 1} entries, axis 0 not among them,"
      f" and 'positions' needs them along axis 1; got {named!r} for {name} of shape {shape}."
    )
  if named != "positions":
    return axes if len(axes) == 2 else axes[0]
  if not _is_real(leaf):
    raise TypeError(f"'positions' must be of numbers; got {name} of dtype {leaf.dtype}.")
  return named


def _cut_axes(how: LeafAxes) -> tuple[int, ...]:
  if isinstance(how, str):
    return (1,) if how == "positions" else ()
  return how if isinstance(how, tuple) else (how,)


def _is_real(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jnp.integer) or jnp.issubdtype(leaf.dtype, jnp.floating)


def _long_axes(shape: tuple[int, ...], full_length: int) -> list[int]:
  """Returns the axes along which a sequence may be cut, never axis 0 (the batch).

  Such an axis has `full_length` entries, or one more if the inputs and targets share the array.
  """
  return [i for i, n in enumerate(shape) if i > 0 and n - full_length in (0, 1)]


def _holds_classes(leaf: Any) -> bool:
  """Returns whether each row sums to 1, as one-hot labels do; False for a traced array."""
  if jnp.ndim(leaf) != 2 or isinstance(leaf, jax.core.Tracer):
    return False
  if not (_is_real(leaf) or leaf.dtype == bool):
    return False
  rows = np.asarray(leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf)

  def sum_to_one(rows: np.ndarray) -> bool:
    sums = rows.sum(1, dtype=np.float64)
    return len(rows) > 0 and bool((rows >= 0).all() and (abs(sums - 1) < _ROUNDING).all())

  return sum_to_one(rows[:1]) and sum_to_one(rows)


def _check_named(
  paths: list[str],
  leaves: list[Any],
  treatments: list[LeafAxes | None],
  full_length: int,
  axes: Mapping[str, LeafAxes],
) -> list[LeafAxes]:
  """Returns the treatments; raises ValueError if one is None or if no leaf is cut.

  A treatment tells how a leaf is cut (:data:`LeafAxes`). It is None for a leaf that `axes` must
  name; the error message proposes `axes` with such leaves.
  """
  shapes: dict[str, tuple[int, ...]] = {
    path: getattr(leaf, "shape", ()) for path, leaf in zip(paths, leaves, strict=True)
  }
  long_axes = {path: _long_axes(shape, full_length) for path, shape in shapes.items()}
  unnamed = [path for path, how in zip(paths, treatments, strict=True) if how is None]
  entries = f"{full_length} or {full_length + 1} entries"
  cut = any(how not in ("repeat", "keep", None) for how in treatments)
  if not cut and not any(long_axes[path] for path in unnamed):
    raise ValueError(
      f"`batch` must have a leaf that is cut, with {entries} along an axis after the first; got"
      f" {_checks.shorten(shapes)}. The full length is the number of tokens that a loss predicts."
    )
  if unnamed:
    counts = {shape[0] for path, shape in shapes.items() if long_axes[path]}
    # Longer paths come first, since the first pattern that matches a leaf decides.
    line = {
      leaf_pattern(path, paths): _proposal(shapes[path], long_axes[path], counts)
      for path in sorted(unnamed, key=len, reverse=True)
    }
    texts = [
      f"{_leaf_name(path)} of shape {shapes[path]}"
      + (", each row of which sums to 1 as of classes" if long_axes[path] == [1] else "")
      for path in unnamed
    ]
    raise ValueError(
      f"`axes` must say how to cut {'; '.join(texts)}: by default axis 1 is cut, if no later axis"
      f" has {entries}, too. Pass axes={line | dict(axes)} if this is right; the docstring of"
      " `cut_sequences` lists the other ways."
    )
  return [how for how in treatments if how is not None]


def _leaf_name(path: str) -> str:
  """Returns what a message calls a leaf: its path, or "the array" if the batch is one array."""
  return f"the leaf '{path}'" if path else "the array"


def leaf_pattern(path: str, paths: list[str]) -> str:
  """Returns a pattern of the leaf at `path`, as a key for `axes` of :func:`cut_sequences`.

  `paths` are the paths of all leaves.
  """
  return _patterns.anchor(_patterns.escape(path), paths)


def _proposal(shape: tuple[int, ...], long_axes: list[int], counts: set[int]) -> LeafAxes:
  """Returns how a leaf of this shape is probably to be cut, which an error message proposes.

  `long_axes` are the axes along which the leaf may be cut. `counts` are the numbers of sequences in
  the leaves with such axes.
  """
  if len(long_axes) > 1:
    return long_axes[-2], long_axes[-1]
  if long_axes and long_axes != [1]:
    return long_axes[0]
  return "repeat" if shape[0] in counts else "keep"


def _check_sequences(paths: list[str], leaves: list[Any], treatments: list[LeafAxes]) -> None:
  """Raises ValueError unless all leaves but the kept ones have equally many sequences."""
  counts = {
    path: jnp.shape(leaf)[0]
    for path, leaf, how in zip(paths, leaves, treatments, strict=True)
    if how != "keep"
  }
  if len(set(counts.values())) > 1:
    raise ValueError(
      "`batch` must have equally many sequences in all leaves, along axis 0; got"
      f" {_checks.shorten(counts)}. Broadcast a leaf that all sequences share by"
      " np.broadcast_to(leaf, shape)."
    )


def _windows(leaf: Any, how: LeafAxes, length: int, full_length: int) -> Any:
  """Returns the windows of a leaf along axis 0; windows of one sequence lie side by side.

  `how` tells how the leaf is cut (:data:`LeafAxes`); it is not "keep".
  """
  numpy: Any = np if isinstance(leaf, np.ndarray) else jnp
  shape = jnp.shape(leaf)

  def window(start: int) -> Any:
    index = [slice(None)] * len(shape)
    for axis in _cut_axes(how):
      # If the leaf has L + 1 tokens, each window has one more token at the end.
      index[axis] = slice(start, start + length + shape[axis] - full_length)
    return leaf[tuple(index)]

  stacked = numpy.stack(list(map(window, range(0, full_length, length))), 1)
  windows = stacked.reshape(-1, *stacked.shape[2:])
  if how != "positions":
    return windows
  # In a packed batch, a sequence may begin inside a window. Its positions count from its own first
  # token, so they are smaller than the positions counted from the window's start, and are kept.
  own = numpy.arange(windows.shape[1], dtype=windows.dtype)
  return numpy.minimum(windows, own.reshape(-1, *[1] * (windows.ndim - 2)))
