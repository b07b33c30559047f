"""Loading checkpoints of the original model into the model after ``less_bn``."""

from collections.abc import Collection
import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _tree


@dataclasses.dataclass(frozen=True)
class LoadReport:
  """The arrays of a checkpoint that were loaded and those that were not; ``print`` shows them.

  Attributes:
    loaded: paths that were loaded.
    left_over: paths of the checkpoint for which the model has no place: those of BatchNorms that
      are gone.
    fresh: paths of the model that the checkpoint lacks, which stay as they are: a head's
      multiplier, new biases.
  """

  loaded: tuple[str, ...]
  left_over: tuple[str, ...]
  fresh: tuple[str, ...]

  def __str__(self) -> str:
    rows = (
      ("left over in the checkpoint", self.left_over),
      ("not in the checkpoint, left as they were", self.fresh),
    )
    lines = [f"loaded: {len(self.loaded)} of {len(self.loaded) + len(self.left_over)} arrays"]
    return "\n".join(lines + [f"{words}: {', '.join(paths)}" for words, paths in rows if paths])


def load_tree(target: Any, checkpoint: Any, ignore: Collection[str] = ()) -> tuple[Any, LoadReport]:
  """Loads arrays by path into a tree like `target`, in its dtypes and on its mesh, with a report.

  The report leaves out fresh paths that are in `ignore`.
  """
  paths = _tree.leaf_paths(target)
  try:
    names = _tree.paths_among(set(paths), checkpoint)
    values = dict(zip(names, jax.tree.leaves(checkpoint), strict=True))
  except (TypeError, ValueError) as error:
    raise ValueError(
      "`checkpoint` must be a tree whose dicts have keys of one kind each, as strings; got"
      f" {_base.shorten(checkpoint)}."
    ) from error
  loaded = tuple(path for path in paths if path in values)
  if paths and not loaded:
    raise ValueError(
      f"The checkpoint has none of the model's paths, such as '{paths[0]}'; it has"
      f" {sorted(values)[:3]}. Pass it in the model's own nesting."
    )
  leaves, structure = jax.tree.flatten(target)
  leaves = [
    _load(path, values[path], leaf) if path in values else leaf
    for path, leaf in zip(paths, leaves, strict=True)
  ]
  left_over = tuple(path for path in values if path not in set(paths))
  fresh = tuple(path for path in paths if path not in values and path not in ignore)
  return jax.tree.unflatten(structure, leaves), LoadReport(loaded, left_over, fresh)


def _load(path: str, new: Any, old: Any) -> jax.Array:
  """A copy of an array of the checkpoint for the place of `old`, so that it can be donated."""
  dtype = _dtype(path, new)
  if jnp.shape(new) != jnp.shape(old):
    raise ValueError(
      f"The checkpoint's '{path}' has shape {jnp.shape(new)}, the model's {jnp.shape(old)}: it"
      " is not a checkpoint of this architecture."
    )
  if not _castable(dtype, old.dtype):
    raise ValueError(
      f"The checkpoint's '{path}' has dtype {dtype}, which does not fit the model's {old.dtype}."
    )
  copy = jnp.array(new, None if dtype == old.dtype else old.dtype)
  sharding = getattr(old, "sharding", None)
  return _arrays.put(copy, sharding) if isinstance(sharding, jax.sharding.NamedSharding) else copy


def _dtype(path: str, value: Any) -> Any:
  error: Exception | None = None
  if _base.is_any_array(value) or isinstance(value, np.generic | numbers.Number):
    try:
      return jnp.result_type(value)
    except (TypeError, OverflowError) as caught:
      error = caught
  raise TypeError(
    f"The checkpoint's '{path}' must be an array of numbers; got {_base.shorten(value)}."
  ) from error


def _castable(dtype: Any, target: Any) -> bool:
  keys = any(jnp.issubdtype(kind, jax.dtypes.extended) for kind in (dtype, target))
  from_complex, to_complex = (jnp.issubdtype(kind, jnp.complexfloating) for kind in (dtype, target))
  return dtype == target or not (keys or (from_complex and not to_complex))
