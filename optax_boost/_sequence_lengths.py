r"""Sequence length warm-up: training sequences that begin short and grow to full length.

  L                    the full sequence length, in tokens
  l_1 < ... < l_k = L  the lengths of the schedule; each divides L
  B                    the number of sequences in a batch

A step at length l trains on the same tokens as a step at full length: each of the B sequences is
cut into L / l windows, which makes a batch of B L / l sequences. Attention costs less in short
windows, and a model learns the nearest tokens first. In the field this is called sequence length
warm-up, context window scheduling, or a curriculum of sequence lengths.

Sources: Li, Zhang & He, "The Stability-Efficiency Dilemma", arXiv:2108.06084 (DeepSpeed; it
truncates sequences); Zhu et al., "SkyLadder", arXiv:2503.15450 (it masks attention).
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import Literal
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _base
from optax_boost import _tree

# Each length is a shape of the batch, for which a train step is compiled.
_MOST_LENGTHS = 5
_FIRST_SHARE = 8
# The sequence axis of a leaf, its two axes if it is a mask of pairs, or its treatment if none.
LeafAxes: TypeAlias = int | tuple[int, int] | Literal["repeat", "keep"]


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
      if not (isinstance(values, Sequence) and values and all(map(_base.is_integer, values))):
        raise TypeError(f"`{name}` must be a tuple of integers; got {_base.shorten(values)}.")
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

  def __call__(self, step: Any) -> int:
    """The sequence length at a step, an optimizer step counted from 0, not a micro-step.

    Raises:
      TypeError: `step` is traced: a length is a shape, so it must be known outside ``jit``.
    """
    _base.check_whole_number("step", step, minimum=0)
    concrete = _base.concrete_number(step)
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
  warmup_fraction: float = 0.5,
  growth: Literal["linear", "doubling"] = "linear",
) -> LengthSchedule:
  r"""A schedule of sequence lengths that at least double until they are full.

  With ``growth="linear"`` a length :math:`l_i` begins where a length that grows linearly from
  :math:`l_1` to :math:`L` over the warm-up reaches it, at the share
  :math:`(l_i - l_1) / (L - l_1)` of the warm-up; with ``"doubling"`` where one that grows
  exponentially does, so that each doubling takes equally many steps.

  Args:
    full_length: the full sequence length L in tokens: the number of positions of which a loss
      predicts the next token, one less than the tokens that it reads.
    total_steps: the number of optimizer steps of the training.
    first_length: the first length, a divisor of L and at least L / 16. Lowering it makes the first
      steps cheaper and shows them less context. None: the least divisor of L from L / 8 on.
    warmup_fraction: the share of the steps before L is reached, > 0 and < 1. Raising it makes the
      training cheaper, and leaves fewer steps to learn from long contexts: 0.75 trains learned
      positions of the last half too little.
    growth: ``"linear"`` or ``"doubling"``; the second stays short for longer.

  Returns:
    A :class:`LengthSchedule`, a function of the step alone; a resumed training goes on with it.

  Raises:
    ValueError: `first_length` doesn't divide `full_length` or is too small, or `full_length` has no
      divisor to begin with.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.sequence_length_warmup(128, total_steps=1000)
    >>> schedule.lengths, schedule.starts
    ((16, 32, 64, 128), (0, 71, 214, 500))
    >>> schedule(100)
    32

  References:
    Li, Zhang & He, `arXiv:2108.06084 <https://arxiv.org/abs/2108.06084>`_; Zhu et al.,
    `arXiv:2503.15450 <https://arxiv.org/abs/2503.15450>`_.
  """
  for name, value in {"full_length": full_length, "total_steps": total_steps}.items():
    _base.check_whole_number(name, value, static=True)
  _base.check_number("warmup_fraction", warmup_fraction, positive=True, below=1.0)
  _base.check_name("growth", growth, ("linear", "doubling"))
  divisors = [n for n in range(1, full_length + 1) if full_length % n == 0]
  if first_length is None:
    first_length = next(n for n in divisors if _FIRST_SHARE * n >= full_length)
    if first_length == full_length:
      raise ValueError(
        f"`full_length` must have a divisor from {math.ceil(full_length / _FIRST_SHARE)} to"
        f" {full_length // 2}, the first length; got {full_length}. Take sequences whose length is"
        " a multiple of 8, with one token more if the loss cuts one off."
      )
  _check_length("first_length", first_length, full_length)
  if first_length * 2 ** (_MOST_LENGTHS - 1) < full_length or first_length == full_length:
    raise ValueError(
      f"`first_length` must be below `full_length` {full_length}, and at least a sixteenth of it;"
      f" got {first_length}."
    )
  lengths = [first_length]
  while lengths[-1] < full_length:
    lengths.append(next(n for n in divisors if n >= 2 * lengths[-1]))
  scale = (lambda n: n) if growth == "linear" else math.log
  span = scale(full_length) - scale(first_length)
  shares = [warmup_fraction * (scale(n) - scale(first_length)) / span for n in lengths]
  starts = [math.floor(share * total_steps) for share in shares]
  # Of a short training, lengths that would begin in one step: the last of them.
  kept = [i for i, start in enumerate(starts) if start not in starts[i + 1 :]]
  return LengthSchedule(tuple(lengths[i] for i in kept), tuple(starts[i] for i in kept))


def cut_sequences(
  batch: Any,
  length: int,
  full_length: int,
  *,
  axes: Mapping[str, LeafAxes] | None = None,
  batch_axis: int = 0,
) -> Any:
  """Cuts each sequence of a batch into windows, which become sequences of a larger batch.

  All tokens are kept, and windows of one sequence lie side by side in the batch, so a batch that is
  sharded over its sequences stays so, without communication. Leaves of L + 1 tokens, of which a
  loss takes inputs and targets, give windows of `length` + 1 that overlap by one. Positions that
  are a leaf keep their values.

  Args:
    batch: a tree of NumPy or JAX arrays, with B sequences along `batch_axis` and L or L + 1 tokens
      along one other axis; also traced ones, under ``jit``.
    length: of the windows, in tokens, a divisor of L; static. At L the batch is returned as it is.
    full_length: L, the sequence length in tokens; static.
    axes: what to do with leaves whose shape doesn't tell, by regular expressions that match whole
      segments of their paths: the sequence axis; two axes of a mask of pairs of tokens, of which
      the windows' own blocks are kept; ``"repeat"`` for a value of each sequence, which all of its
      windows get; ``"keep"`` for an array that isn't of sequences. An id of a sequence is right for
      its windows; a label seldom is, and a length isn't: pass a mask of tokens instead. A leaf that
      all sequences share, of shape (L,) or (L, L), must be broadcast to each of them.
    batch_axis: the axis of the sequences, which grows.

  Returns:
    The batch, with B L / `length` sequences. Scalars and leaves that aren't arrays are unchanged.

  Raises:
    TypeError: `length` is traced, or a leaf is an array of another library.
    ValueError: `length` doesn't divide L; a leaf has no axis of L or L + 1 tokens or two of them,
      or another number of sequences than the other leaves; `axes` has a pattern that matches no
      leaf, or would leave a leaf with an axis of L or L + 1 tokens whole.

  Examples:
    >>> import numpy as np, optax_boost
    >>> batch = {"tokens": np.arange(9)[None], "mask": np.ones((1, 8))}
    >>> batch = optax_boost.cut_sequences(batch, 4, full_length=8)
    >>> batch["tokens"]
    array([[0, 1, 2, 3, 4],
           [4, 5, 6, 7, 8]])
    >>> batch["mask"].shape
    (2, 4)
  """
  _base.check_whole_number("full_length", full_length, static=True)
  _check_length("length", length, full_length)
  _base.check_whole_number("batch_axis", batch_axis, minimum=0, static=True)
  leaves, structure = jax.tree.flatten(batch)
  paths = _tree.leaf_paths(batch)
  shapes = _Shapes(full_length, batch_axis, _count_sequences(leaves, full_length, batch_axis))
  leaf_axes = [
    _leaf_axes(path, leaf, asked, shapes)
    for path, leaf, asked in zip(paths, leaves, asked_axes(axes, paths), strict=True)
  ]
  _check_sequences(paths, leaves, leaf_axes, shapes)
  if length == full_length:
    return batch
  windows = [
    leaf if how == "keep" else _windows(leaf, how, length, full_length, batch_axis)
    for leaf, how in zip(leaves, leaf_axes, strict=True)
  ]
  return jax.tree.unflatten(structure, windows)


def _check_length(name: str, length: Any, full_length: int) -> None:
  _base.check_whole_number(name, length, static=True)
  if full_length % length:
    raise ValueError(
      f"`{name}` must divide the full length {full_length}, so that windows keep all tokens; got"
      f" {length}."
    )


def asked_axes(axes: Mapping[str, LeafAxes] | None, paths: list[str]) -> list[LeafAxes | None]:
  """The treatment of each leaf by the argument `axes`, or None; checks the argument."""
  if axes is None:
    return [None] * len(paths)
  _base.check_type("axes", axes, Mapping, "a dict from regular expressions to axes")
  for pattern, how in axes.items():
    pair = isinstance(how, tuple) and len(how) == 2 and all(map(_base.is_integer, how))
    if not (_base.is_integer(how) or pair or how in ("repeat", "keep")):
      raise TypeError(
        f"`axes` must give each pattern an axis, two axes, 'repeat' or 'keep'; got"
        f" {_base.shorten(how)} for {pattern!r}."
      )
  treatments = list(axes.values())
  matches = _tree.first_match("axes", list(axes), paths, required=True)
  return [None if index is None else treatments[index] for index in matches]


@dataclasses.dataclass(frozen=True)
class _Shapes:
  """The numbers with which shapes of a batch's leaves are compared.

  Attributes:
    full_length: the sequence length L in tokens.
    batch_axis: the axis of the sequences.
    sequences: their number B as far as the leaves agree on it, for messages; else None.
  """

  full_length: int
  batch_axis: int
  sequences: int | None

  def token_axes(self, shape: tuple[int, ...]) -> list[int]:
    """The axes of L or L + 1 entries other than the axis of the sequences."""
    lengths = (self.full_length, self.full_length + 1)
    return [i for i, n in enumerate(shape) if n in lengths and i != self.batch_axis]

  def is_shared(self, shape: tuple[int, ...]) -> bool:
    """Whether a leaf has tokens along the axis of the sequences, or tokens and no such axis."""
    tokens = bool(self.token_axes(shape))
    if len(shape) <= self.batch_axis:
      return tokens
    if shape[self.batch_axis] - self.full_length not in (0, 1):
      return False
    # Unless the other leaves agree on the number of sequences, this may be it.
    return shape[self.batch_axis] != self.sequences and not (tokens and self.sequences is None)

  def broadcast(self, path: str, shape: tuple[int, ...]) -> str:
    """The advice for a leaf that all sequences share."""
    at = self.batch_axis
    leaf = "leaf" if at == 0 else f"np.expand_dims(leaf, {at})"
    full = (*shape[:at], self.sequences or "B", *shape[at:])
    tokens = self.token_axes(tuple(n if isinstance(n, int) else -1 for n in full))
    pair = f" with axes={{{_pattern(path)}: {tuple(tokens)}}}" if len(tokens) == 2 else ""
    words = ", ".join(map(str, full))
    return (
      f"np.broadcast_to({leaf}, ({words})){pair}, or keep it out of the batch and compute it in the"
      " loss from the tokens' shape"
    )


def leaf_label(path: str) -> str:
  """A leaf of a batch in messages; the only leaf of a bare array has no path."""
  return f"the leaf '{path}'" if path else "the array"


def _pattern(path: str) -> str:
  """What `axes` calls a leaf by."""
  return repr(path or ".*")


def _count_sequences(leaves: list[Any], full_length: int, batch_axis: int) -> int | None:
  """The number of sequences, if leaves with an axis of tokens agree on it.

  Leaves of 1, L or L + 1 sequences may be shared by all, and count if there are no others.
  """
  shapes = [jnp.shape(leaf) for leaf in leaves if _base.is_any_array(leaf)]
  of_tokens = _Shapes(full_length, batch_axis, None).token_axes
  counts = {shape[batch_axis] for shape in shapes if len(shape) > batch_axis and of_tokens(shape)}
  counts = counts - {1, full_length, full_length + 1} or counts
  return counts.pop() if len(counts) == 1 else None


def _leaf_axes(path: str, leaf: Any, asked: LeafAxes | None, shapes: _Shapes) -> LeafAxes:
  """The sequence axis of a leaf, or its pair of them, not negative; or how it is treated."""
  name, pattern = leaf_label(path), _pattern(path)
  if not _base.is_any_array(leaf):
    if hasattr(leaf, "shape") and not isinstance(leaf, np.generic):
      raise TypeError(
        f"`batch` must hold NumPy or JAX arrays; got {name} of type {type(leaf).__name__}. Convert"
        " it with np.asarray."
      )
    return "keep"
  shape = jnp.shape(leaf)
  if not shape:
    return "keep"
  batch_axis, fits = shapes.batch_axis, shapes.token_axes(shape)
  lengths = f"{shapes.full_length} or {shapes.full_length + 1} tokens"
  of_tokens = bool(fits) and len(shape) > batch_axis
  if asked == "keep" and not of_tokens:
    return asked
  if shapes.is_shared(shape):
    raise _shared(path, shape, shapes)
  if isinstance(asked, str) and of_tokens:
    raise ValueError(
      f"`axes` must cut each leaf that has an axis of {lengths}, for whole sequences don't belong"
      f" to the windows of other leaves; got {asked!r} for {name} of shape {shape}. Say its"
      " sequence axis, or cut the batch without it."
    )
  if len(shape) <= batch_axis:
    raise ValueError(
      f"`batch_axis` {batch_axis} must be an axis of each leaf that is cut or repeated; got {name}"
      f" of shape {shape}. A value of each sequence needs that axis, by np.expand_dims; say"
      f" axes={{{pattern}: 'keep'}} for an array that isn't of sequences."
    )
  if asked is None:
    if len(fits) == 1:
      return fits[0]
    problem = f"no axis of {lengths}"
    advice = (
      f"Say axes={{{pattern}: 'repeat'}} for a value that holds for each window of its sequence, as"
      " an id does. A length doesn't: pass a mask of tokens. Say 'keep' for an array that isn't of"
      " sequences."
    )
    if any(n > 1 for i, n in enumerate(shape) if i != batch_axis):
      advice += " If it is of tokens, `full_length` must be their number."
    if shape[batch_axis] - shapes.full_length in (0, 1):
      advice += f" If all sequences share it, pass {shapes.broadcast(path, shape)}."
    if fits:
      problem = f"the axes {', '.join(map(str, fits))}, which could all be of the tokens"
      advice = (
        f"Say axes={{{pattern}: {tuple(fits[:2])}}} if it is a mask of pairs of tokens, else the"
        f" one axis, as in axes={{{pattern}: {fits[0]}}}."
      )
    raise ValueError(
      f"`batch` must have one sequence axis in each leaf; {name} of shape {shape} has {problem}."
      f" {advice}"
    )
  if isinstance(asked, str):
    return asked
  wanted = asked if isinstance(asked, tuple) else (asked,)
  chosen = tuple(axis % len(shape) if -len(shape) <= axis < len(shape) else axis for axis in wanted)
  if len(set(chosen)) < len(chosen) or not set(chosen) <= set(fits):
    raise ValueError(
      f"`axes` must name axes of {lengths} other than `batch_axis` {batch_axis}; got {asked} for"
      f" {name} of shape {shape}."
    )
  return chosen if len(chosen) == 2 else chosen[0]


def _shared(path: str, shape: tuple[int, ...], shapes: _Shapes) -> ValueError:
  """The error for a leaf that all sequences share, whose windows need different parts of it."""
  return ValueError(
    f"`batch` must have an axis of sequences in each leaf, axis {shapes.batch_axis};"
    f" {leaf_label(path)} of shape {shape} has axes of tokens alone, so all sequences share it."
    f" Give each sequence its own by {shapes.broadcast(path, shape)}."
  )


def _check_sequences(
  paths: list[str], leaves: list[Any], leaf_axes: list[LeafAxes], shapes: _Shapes
) -> None:
  """Checks that some leaf has a sequence axis, and all have equally many sequences."""
  if all(isinstance(how, str) for how in leaf_axes):
    raise ValueError(
      f"`batch` must have a leaf with an axis of {shapes.full_length} or {shapes.full_length + 1}"
      f" tokens; got shapes {_base.shorten([jnp.shape(leaf) for leaf in leaves])}."
    )
  counts = {
    path: jnp.shape(leaf)[shapes.batch_axis]
    for path, leaf, how in zip(paths, leaves, leaf_axes, strict=True)
    if how != "keep"
  }
  if len(set(counts.values())) == 1:
    return
  for path, leaf in zip(paths, leaves, strict=True):
    # Unless the other leaves agree on the number of sequences, one may be it.
    if counts.get(path) == 1 and shapes.sequences is not None:
      shape = list(jnp.shape(leaf))
      shape[shapes.batch_axis] = shapes.sequences
      raise ValueError(
        f"`batch` must have {shapes.sequences} sequences in each leaf; {leaf_label(path)} of shape"
        f" {jnp.shape(leaf)} has one, which all share. Give each sequence its own by"
        f" np.broadcast_to(leaf, {tuple(shape)})."
      )
  found = ", ".join(f"{count} in '{path}'" for path, count in list(counts.items())[:8])
  raise ValueError(
    f"`batch` must have equally many sequences in all leaves, along axis {shapes.batch_axis}; got"
    f" {found}. A leaf that all sequences share must be broadcast to them, as by"
    " np.broadcast_to(leaf, shape)."
  )


def _windows(leaf: Any, how: LeafAxes, length: int, full_length: int, batch_axis: int) -> Any:
  """A leaf's windows as sequences: those of the first sequence, of the second, and so on."""
  numpy = np if isinstance(leaf, np.ndarray) else jnp
  shape = jnp.shape(leaf)

  def window(start: int) -> Any:
    index = [slice(None)] * len(shape)
    for axis in () if isinstance(how, str) else how if isinstance(how, tuple) else (how,):
      # A leaf of L + 1 tokens has one more at its end.
      index[axis] = slice(start, start + length + shape[axis] - full_length)
    return leaf[tuple(index)]

  stacked = numpy.stack(list(map(window, range(0, full_length, length))), batch_axis + 1)
  merged = (*stacked.shape[:batch_axis], -1, *stacked.shape[batch_axis + 2 :])
  return stacked.reshape(merged)
