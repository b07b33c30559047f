"""Activations of frozen layers, computed once per example instead of once per epoch."""

from collections.abc import Callable
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _files
from optax_boost import _groups
from optax_boost import _tree
from optax_boost._cached_prefix import _rows
from optax_boost._cached_prefix import _split

_METHOD = "cache_prefix"
# How far activations of one example may differ between batches, relative to the largest.
_TOLERANCE = 0.02


class PrefixCache:
  """The activations of a frozen prefix, per example; made by :func:`cache_prefix`.

  Attributes:
    bytes_per_example: the size of an example's activations.
    capacity: for how many examples there is room.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    params: optax.Params,
    batch: Any,
    rng: Any,
    groups: _groups.Groups,
    frozen_groups: int,
    num_examples: int,
    max_bytes: int,
    path: str | None,
  ):
    numbers = _groups.layer_numbers(params, groups, _METHOD)
    self._frozen = [number < frozen_groups for number in numbers]
    self._loss_fn = loss_fn
    self._rng = rng
    self._compute = jax.jit(lambda p, batch: self._split(p, batch, rng).activations(p, batch, rng))
    self._checksum = jax.jit(self._checksums)
    self._shapes, self._axes = self._find_rows(params, batch)
    self._sizes = [
      int(np.prod(shape[:axis] + shape[axis + 1 :])) * dtype.itemsize
      for (shape, dtype), axis in zip(self._shapes, self._axes, strict=True)
    ]
    self.bytes_per_example = sum(self._sizes)
    self.capacity = min(num_examples, max_bytes // self.bytes_per_example)
    if self.capacity < 1:
      raise ValueError(
        f"`max_bytes` must hold at least one example, {self.bytes_per_example} bytes; got"
        f" {max_bytes}."
      )
    self._num_examples = num_examples
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
    if abstract and path is not None:
      raise ValueError("`path` needs params that are arrays, whose activations it keeps.")
    # Abstract params become known with the first activations.
    self._sums = None if abstract else self._sums_of(params)
    facts = {"shapes": [str(shape) for shape in self._shapes], "checksums": self._sums}
    self._rows = _rows.Rows(num_examples, self.capacity, self.bytes_per_example, path, facts)
    self._checked = False
    # Where activations of so many examples were left by the program that computed them.
    self._shardings: dict[int, list[jax.sharding.Sharding | None]] = {}
    # Rows of an earlier run that no batch of this one was compared with.
    self._unconfirmed = self._rows.used > 0

  @property
  def num_cached(self) -> int:
    """How many examples have their activations in the cache."""
    return self._rows.used

  def __call__(
    self, params: optax.Params, indices: jax.typing.ArrayLike, batch: Any
  ) -> tuple[Any, list[jax.Array]]:
    """A batch with its activations, from the cache or computed.

    Args:
      params: the current params; the frozen ones must be those that the cache was made with.
      indices: integers [batch], each example's number in the data.
      batch: the batch, as the loss takes it.

    Returns:
      ``(batch, activations)``, the batch of :meth:`loss_fn`.

    Raises:
      ValueError: an index is out of range, there is not one for each example, the frozen params
        have changed, an example's activations depend on the others in its batch, or have other
        shapes than those of the batch that the cache was made with; params or batch lie on the
        devices of several processes; activations in `path` are of another prefix or other data,
        checked for the first batch that an earlier run kept.
      TypeError: `indices` are no integers.
    """
    examples = self._check_indices(indices, batch)
    _check_addressable((params, batch))
    found = self._rows.has_found(examples)
    check_found = self._unconfirmed and bool(np.any(found))
    cached = self._rows.has(examples)
    if check_found or not cached:
      activations = self._compute(params, batch)
      self._check_shapes(activations)
      self._shardings[len(examples)] = [
        x.sharding if _arrays.is_committed(x) else None for x in activations
      ]
    if check_found:
      self._check_found(activations, examples, found)
    if cached:
      kept = self._unpack(self._rows.read(examples))
      # Where computed ones lay, so that a step takes both: sharded, and compiled once.
      shardings = self._shardings.get(len(examples), [None] * len(kept))
      return batch, list(map(jax.device_put, kept, shardings))
    if not self._checked:
      self._checked = self._check_examples_apart(params, batch, activations)
    # Before that, rows of this run might not be of the prefix that made the others.
    if not self._unconfirmed and self.num_cached < self.capacity:
      sums = self._sums_of(params)
      if self._sums is None:
        self._sums = sums
      if sums != self._sums:
        raise ValueError(
          "The frozen params are not those that the cache was made with, so kept activations are"
          " wrong. Freeze them in every step (`freeze_layers` with `fixed_freezing`), or make a new"
          " cache."
        )
      self._rows.add(examples, self._pack(activations))
    return batch, activations

  def loss_fn(self, params: optax.Params, batch: Any, *rng: jax.Array) -> Any:
    """The loss without its prefix, for :func:`make_train_step`.

    Args:
      params: the params; frozen ones have a gradient of zero.
      batch: what the cache returned: ``(batch, activations)``.
      *rng: a key, if the loss takes one.

    Returns:
      What the loss returns.
    """
    if not (isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], list)):
      raise TypeError(
        "`batch` must be what the cache returned, (batch, activations); got"
        f" {_base.shorten(jax.tree.structure(batch))}. Pass cache(params, indices, batch)."
      )
    own, activations = batch
    key = rng[0] if rng else None
    split = self._split(params, own, key)
    got = [(jnp.shape(x), jnp.result_type(x)) for x in activations]
    wanted = [(shape.shape, shape.dtype) for shape in split.shapes]
    if got != wanted:
      raise ValueError(
        f"`batch` must hold the activations of its own examples: {wanted}; got {got}. Pass"
        " cache(params, indices, batch)."
      )
    return split.rest(params, (own, key), activations)

  def _split(self, params: Any, batch: Any, rng: Any) -> _split.Split:
    return _split.split(self._loss_fn, params, batch, rng, self._frozen)

  def _find_rows(self, params: Any, batch: Any) -> tuple[list[Any], list[int]]:
    """The activations' shapes and dtypes, and the axis of each along which examples lie."""
    count = _count(batch)
    twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * count, *x.shape[1:]), x.dtype), batch)
    once = self._split(params, batch, self._rng).shapes
    pairs = zip(once, self._split(params, twice, self._rng).shapes, strict=True)
    axes = []
    for own, double in pairs:
      grown = [i for i, (n, m) in enumerate(zip(own.shape, double.shape, strict=True)) if n != m]
      if len(grown) != 1 or double.shape[grown[0]] != 2 * own.shape[grown[0]]:
        raise ValueError(
          f"`{_METHOD}` needs activations with one axis along the examples; the frozen groups make"
          f" some of shape {own.shape} from {count} examples and {double.shape} from {2 * count}."
          " They mix the examples of a batch, or join them with another axis."
        )
      # Of one example, several may lie behind each other.
      if own.shape[grown[0]] != count:
        raise ValueError(
          f"`{_METHOD}` needs activations with one entry for each example; the frozen groups make"
          f" {own.shape[grown[0]]} from {count} along axis {grown[0]}, as of examples joined with"
          " another axis."
        )
      axes.append(grown[0])
    return [(own.shape, own.dtype) for own in once], axes

  def _check_indices(self, indices: Any, batch: Any) -> np.ndarray:
    examples = np.asarray(indices)
    if not np.issubdtype(examples.dtype, np.integer):
      raise TypeError(f"`indices` must be integers; got {_base.shorten(indices)}.")
    if examples.shape != (_count(batch),):
      raise ValueError(
        f"`indices` must have one number for each of the {_count(batch)} examples; got shape"
        f" {examples.shape}."
      )
    if np.any((examples < 0) | (examples >= self._num_examples)):
      raise ValueError(
        f"`indices` must be from 0 to {self._num_examples - 1}, by `num_examples`; got"
        f" {_base.shorten(examples)}."
      )
    return examples

  def _check_shapes(self, activations: list[jax.Array]) -> None:
    """Refuses activations for which the rows have no place."""
    shapes = [(x.shape, x.dtype) for x in activations]
    wanted, got = (
      [
        f"{(*shape[:axis], *shape[axis + 1 :])} {dtype}"
        for (shape, dtype), axis in zip(of_batch, self._axes, strict=False)
      ]
      for of_batch in (self._shapes, shapes)
    )
    if got != wanted or len(shapes) != len(self._shapes):
      raise ValueError(
        f"`{_METHOD}` keeps activations of the same shapes for all examples, {wanted}; those of"
        f" this batch have {got}. Pad all batches to the lengths of the batch that the cache was"
        " made with."
      )

  def _check_examples_apart(self, params: Any, batch: Any, activations: Any) -> bool:
    """Refuses a prefix that gives an example other activations in another batch.

    Returns whether its examples have different activations: equal ones prove nothing.
    """
    # On the host: JAX can't cut one example out of a batch that an Explicit mesh shards.
    examples = jax.tree.map(_on_host, batch)
    if all(np.all(x == x[:1]) for x in jax.tree.leaves(examples)):
      return False

    def first_of(x: Any, example: np.ndarray) -> Any:
      repeated = example[np.zeros(len(example), int)]
      return jax.device_put(repeated, x.sharding) if _arrays.is_committed(x) else repeated

    first = jax.tree.map(first_of, batch, examples)
    differ = False
    pairs = zip(activations, self._compute(params, first), self._axes, strict=True)
    for own, repeated, axis in pairs:
      expected = np.take(own, [0], axis)
      differ |= bool(np.any(np.asarray(own) != expected))
      if not _close(repeated, expected):
        raise ValueError(
          f"`{_METHOD}` needs activations that depend on their example alone; the first example's"
          " differ where others stand beside it. The frozen groups use statistics of the batch"
          " (BatchNorm in training mode) or draw random numbers: evaluate them as in inference."
        )
    return differ

  def _check_found(self, activations: Any, examples: np.ndarray, found: np.ndarray) -> None:
    """Refuses a folder whose activations are not those of this prefix and this batch."""
    kept = self._unpack(self._rows.read(examples[found]))
    for own, expected, axis in zip(activations, kept, self._axes, strict=True):
      if not _close(np.compress(found, own, axis), expected):
        raise ValueError(
          "The activations in `path` are not those that this prefix makes of this batch: the loss,"
          " the data or their numbers have changed since, or the frozen params. Delete the folder,"
          " or pass another `path`."
        )
    self._unconfirmed = False

  def _sums_of(self, params: Any) -> list[int]:
    return np.asarray(self._checksum(params)).tolist()

  def _checksums(self, params: Any) -> jax.Array:
    """For each frozen leaf a sum of its bits that depends on their places."""
    sums = []
    for leaf, frozen in zip(jax.tree.leaves(params), self._frozen, strict=True):
      if np.any(frozen) and leaf.size:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(*leaf.shape, -1)
        bits = bits * jnp.asarray(frozen, jnp.uint8)[..., None]
        sums.append(jnp.sum(bits.astype(jnp.uint32) * (2 * _places(bits.shape) + 1)))
    return jnp.array(sums, jnp.uint32)

  def _pack(self, activations: list[jax.Array]) -> np.ndarray:
    parts = []
    for activation, axis in zip(activations, self._axes, strict=True):
      rows = np.ascontiguousarray(np.moveaxis(np.asarray(activation), axis, 0))
      parts.append(rows.reshape(len(rows), -1).view(np.uint8))
    return np.concatenate(parts, axis=1)

  def _unpack(self, rows: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(self._sizes)[:-1]
    activations = []
    parts = zip(np.split(rows, ends, axis=1), self._shapes, self._axes, strict=True)
    for part, (shape, dtype), axis in parts:
      own = (len(rows), *shape[:axis], *shape[axis + 1 :])
      values = np.ascontiguousarray(part).view(dtype).reshape(own)
      activations.append(np.moveaxis(values, 0, axis))
    return activations


def _places(shape: tuple[int, ...]) -> jax.Array:
  """The place of each entry in the raveled array, modulo 2^32; raveling would undo its sharding."""
  places = jnp.zeros(shape, jnp.uint32)
  for axis, length in enumerate(shape):
    places = places * length + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
  return places


def _on_host(x: Any) -> Any:
  # Keys have no form in NumPy; it can compare and repeat them.
  return x if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) else np.asarray(x)


def _check_addressable(arrays: Any) -> None:
  for x in jax.tree.leaves(arrays):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      raise ValueError(
        f"`{_METHOD}` keeps activations on the host of one process; got an array of shape {x.shape}"
        " that lies on the devices of several. Train without the cache: `freeze_layers` with"
        " `fixed_freezing` still skips the backward pass of the prefix."
      )


def _close(activations: Any, expected: Any) -> bool:
  """Whether activations differ by rounding alone."""
  exact = np.asarray(expected, np.float64)
  difference = np.max(np.abs(np.asarray(activations, np.float64) - exact), initial=0.0)
  return bool(difference <= _TOLERANCE * np.max(np.abs(exact), initial=0.0))


def _count(batch: Any) -> int:
  """The number of examples, along the first axis of all leaves."""
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  if len(sizes) != 1 or sizes == {()}:
    raise ValueError(
      "`batch` must have the examples along axis 0 of all leaves, equally many; got shapes"
      f" {[jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]}."
    )
  return sizes.pop()[0]


def cache_prefix(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  batch: Any,
  groups: _groups.Groups,
  frozen_groups: int,
  *,
  num_examples: int,
  max_bytes: int,
  path: str | os.PathLike[str] | None = None,
  rng: jax.Array | None = None,
) -> PrefixCache:
  """Keeps the activations of groups that are frozen for good, so that later epochs skip them.

  The first time that an example comes its activations are computed and kept; from then on neither
  the forward nor the backward pass of the prefix is computed for it. For fine-tuning on data
  without augmentation, where the frozen groups use no dropout and no statistics of the batch.

  Args:
    loss_fn: the loss, ``loss_fn(params, batch)``, or ``loss_fn(params, batch, rng)`` if `rng` is
      given; it may return aux.
    params: the params, whose frozen ones must not change; ``jax.ShapeDtypeStruct`` will do.
    batch: one batch, or one of ``jax.ShapeDtypeStruct``; examples along axis 0 of each leaf.
    groups: what :func:`layer_groups` returned, or regular expressions.
    frozen_groups: how many groups from the first are frozen in every step.
    num_examples: how many examples the data has.
    max_bytes: the most that activations may take; further examples are computed each time.
    path: a folder for the activations, which a later run finds again; None: in memory. One cache
      at a time may use it, from its making until it is deleted or its process ends. Each run
      computes the first batch that it finds once more, and refuses a folder with other activations.
    rng: a key, if the loss takes one.

  Returns:
    A :class:`PrefixCache`: ``step = make_train_step(cache.loss_fn, tx)``, then
    ``state, metrics = step(state, cache(state.params, indices, batch))``.

  Raises:
    ValueError: the frozen groups make no activations, draw random numbers, or mix the examples of
      a batch; `max_bytes` holds no example; `path` holds activations of another prefix or damaged
      files, or is in use.
    OSError: the files can't be written; when called: the disk is full.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"body": jnp.eye(3), "head": jnp.ones((3, 1))}
    >>> def loss_fn(params, batch):
    ...   return jnp.mean(jnp.tanh(batch @ params["body"]) @ params["head"])
    >>> x = jnp.arange(12.0).reshape(4, 3)
    >>> cache = optax_boost.cache_prefix(
    ...   loss_fn, params, x[:2], ["body", "head"], 1, num_examples=4, max_bytes=2**20
    ... )
    >>> for indices in ([0, 1], [2, 3], [3, 0]):
    ...   batch = cache(params, indices, x[jnp.array(indices)])
    ...   print(cache.num_cached, bool(cache.loss_fn(params, batch) == loss_fn(params, batch[0])))
    2 True
    4 True
    4 True

  References:
    Liu, Agarwal, Venkataraman, `AutoFreeze <https://arxiv.org/abs/2102.01386>`_, 2021.
  """
  _base.check_callable("loss_fn", loss_fn, "loss_fn(params, batch)")
  _tree.check_floating(params, _METHOD, _tree.CLOSE_OVER)
  _tree.check_traceable("batch", batch)
  number = _groups.count_groups(groups)
  _base.check_whole_number("frozen_groups", frozen_groups, maximum=number - 1, static=True)
  _base.check_whole_number("num_examples", num_examples, static=True)
  if not _base.is_integer(max_bytes):
    raise TypeError(f"`max_bytes` must be a whole number; got {_base.shorten(max_bytes)}.")
  _base.check_key("rng", rng)
  folder = None if path is None else _files.check_path("path", path)
  examples, most = int(num_examples), int(max_bytes)
  return PrefixCache(
    loss_fn, params, batch, rng, groups, int(frozen_groups), examples, most, folder
  )
