"""``cut_sequences``: cuts the sequences of a batch into windows, which are shorter sequences."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _checks, _paths, _patterns, _types
from optax_boost._sequences import _schedule

# How a leaf of a batch is cut; the docstring of `cut_sequences` explains the values.
LeafAxes: TypeAlias = int | tuple[int, int] | Literal["positions", "repeat", "keep"]
_WORDS = ("positions", "repeat", "keep")
# How far a sum of probabilities in bfloat16 may be from 1.
_ROUNDING = 1e-2


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
      a leaf each of whose rows sums to 1, as probabilities of L classes do (if several processes
      train together, only arrays that lie on all of them are read); leaves have unequal
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
  _schedule.check_length("length", length, full_length)
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
  """Returns whether each row sums to 1, as one-hot labels do; False for a traced array.

  Of several processes, all must return the same: they judge an array that lies on all of them by
  all of its rows, and read no arrays of their own.
  """
  if jnp.ndim(leaf) != 2 or isinstance(leaf, jax.core.Tracer):
    return False
  if not (_is_real(leaf) or leaf.dtype == bool):
    return False
  if jax.process_count() > 1:
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return is_global and bool(_sum_to_one(leaf))
  rows = np.asarray(leaf)
  return len(rows) > 0 and bool(_sum_to_one(rows[:1]) and _sum_to_one(rows))


def _sum_to_one(rows: Any) -> Any:
  """Returns whether each row of a NumPy array or a global array sums to 1, with no entry below."""
  sums = rows.sum(1, dtype=np.float32)
  return (rows >= 0).all() & (abs(sums - 1) < _ROUNDING).all()


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
  return _patterns.exact_pattern(path, paths)


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
