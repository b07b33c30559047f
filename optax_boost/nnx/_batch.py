"""Batches that hold NNX objects, for example a second model, which a step must not change."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import numpy as np

from optax_boost import _train_step
from optax_boost._foundation import _batches, _checks, _paths, _types
from optax_boost.nnx import _model

# Flax 0.12 renamed the base class of modules.
_NNX_OBJECT = (nnx.Variable, nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object)


class KeyedBatch(NamedTuple):
  """Marks the batch of a step that is called with a key.

  The loss passes this key only to the user's `loss_fn`. With other batches, a key of the loss also
  advances the model's own rng streams.
  """

  batch: _types.Batch

  def __repr__(self) -> str:
    return repr(self.batch)  # as error messages show it


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["batch", "constants"],
  meta_fields=["structure", "graphdef"],
)
@dataclasses.dataclass(frozen=True)
class ClosedBatch:
  """A batch in which arrays replace the NNX objects, so that it is a pytree of arrays.

  Attributes:
    batch: the batch, with None in the place of each NNX object.
    constants: the arrays of the NNX objects.
    structure: the structure of the batch, in which each NNX object is a leaf.
    graphdef: the structure of the NNX objects.
  """

  batch: _types.Batch
  constants: _batches.Constants
  structure: _types.TreeDef
  graphdef: nnx.GraphDef

  def __repr__(self) -> str:
    return repr(self.batch)  # as error messages show it

  def open(self) -> tuple[_types.Batch, tuple[Any, ...]]:
    """Returns the batch, with NNX objects made from the arrays, and a tuple of these objects."""
    with nnx.merge_context() as context:
      objects = context.unflatten(self.graphdef, list(self.constants.arrays))
    unused = iter(objects)
    leaves = [
      next(unused) if leaf is None else leaf for leaf in self.structure.flatten_up_to(self.batch)
    ]
    return jax.tree.unflatten(self.structure, leaves), objects

  def names(self) -> list[str]:
    """Returns the path of each NNX object in the batch."""
    is_object = [leaf is None for leaf in self.structure.flatten_up_to(self.batch)]
    paths = _paths.leaf_paths(jax.tree.unflatten(self.structure, is_object))
    return [path for path, selected in zip(paths, is_object, strict=True) if selected]


def close(batch: _types.Batch) -> _types.Batch:
  """Returns a :class:`ClosedBatch` if the batch holds NNX objects, else the batch itself."""
  leaves, structure = jax.tree.flatten(batch, is_leaf=_is_nnx_object)
  objects = tuple(filter(_is_nnx_object, leaves))
  if not objects:
    return batch
  for node in objects:
    if isinstance(node, _model.RNG_TYPES):
      raise TypeError(
        f"`batch` can't hold an nnx.{type(node).__name__}, whose counts a step would not move."
        " Pass it as the argument `rng`: step(model, optimizer, batch, rngs) calls"
        " loss_fn(model, batch, rngs)."
      )
  with nnx.split_context() as context:
    graphdef, arrays = context.flatten(objects, with_paths=False)
  arrays_only = jax.tree.unflatten(
    structure, [None if _is_nnx_object(leaf) else leaf for leaf in leaves]
  )
  return ClosedBatch(arrays_only, _batches.Constants(tuple(arrays)), structure, graphdef)


def _is_nnx_object(node: _types.Tree) -> bool:
  return isinstance(node, _NNX_OBJECT)


class _ClosedBatches:
  """An iterable that calls :func:`close` on each batch of another iterable."""

  def __init__(self, batches: Iterable[_types.Batch]):
    self._batches = batches

  def __iter__(self) -> Iterator[_types.Batch]:
    return map(close, self._batches)

  def __len__(self) -> int:
    # Raises TypeError if the batches have no length; a progress bar expects this error.
    return len(self._batches)  # type: ignore[arg-type]


def close_all(batches: Any) -> Any:
  """Returns an iterable of closed batches if `batches` is an iterable, else `batches` itself."""
  refused = Mapping | str | bytes | jax.Array | np.ndarray
  is_iterable = isinstance(batches, Iterable) and not isinstance(batches, refused)
  return _ClosedBatches(batches) if is_iterable else batches


def user_batch(batch: _types.Batch) -> _types.Batch:
  """Returns the user's batch from a :class:`KeyedBatch` or :class:`ClosedBatch`, or as it is."""
  batch = batch.batch if isinstance(batch, KeyedBatch) else batch
  return batch.open()[0] if isinstance(batch, ClosedBatch) else batch


def on_user_batch(function: _types.WeightFn | None) -> _types.WeightFn | None:
  """Returns a function that calls `function` with the :func:`user_batch` of its argument."""
  return None if function is None else lambda batch: function(user_batch(batch))


def call_read_only(function: Callable[[_types.Batch], Any], closed: ClosedBatch) -> Any:
  """Opens the closed batch and returns ``function(batch)``.

  Raises ValueError if `function` changes an NNX object in the batch.
  """

  def call(constants: _batches.Constants) -> tuple[Any, tuple[Any, ...], list[Any]]:
    batch, objects = dataclasses.replace(closed, constants=constants).open()
    output = function(batch)
    with nnx.split_context() as context:
      return output, objects, context.flatten(objects, with_paths=False)[1]

  def arrays_after(constants: _batches.Constants) -> list[jax.Array]:
    return jax.tree.leaves(call(constants)[2])

  output, objects, arrays = call(closed.constants)
  before, after = _variable_paths(closed.open()[1]), _variable_paths(objects)
  changed = {*before} ^ {*after}
  replaced = [
    old is not new
    for old, new in zip(jax.tree.leaves(closed.constants), jax.tree.leaves(arrays), strict=False)
  ]
  if not changed and any(replaced):
    # `nnx.jit` and `nnx.remat` copy all variables of their modules into new arrays, so only the
    # traced program shows which variables change.
    program = jax.make_jaxpr(arrays_after)(closed.constants)
    copied = _train_step.copied_inputs(program)
    paths = [
      path
      for path, array in zip(before, closed.constants.arrays, strict=True)
      for _ in jax.tree.leaves(array)
    ]
    changed = {path for path, is_copy in zip(paths, copied, strict=True) if not is_copy}
  if changed:
    names = closed.names()
    shown = sorted("/".join([names[i], *map(str, path)]).strip("/") for i, *path in changed)
    raise ValueError(
      "`loss_fn` must not change the NNX objects in the batch, which a step only reads; it changes"
      f" {_checks.shorten(shown, 400)}. Put a module whose statistics or rng counts change into"
      " evaluation mode before the step (module.eval()), or make it a part of the step's `model`."
    )
  return output


def _variable_paths(objects: tuple[Any, ...]) -> list[_types.KeyPath]:
  """Returns the path of each variable, in the order of Flax's flattening."""
  with nnx.split_context() as context:
    return list(context.flatten(objects)[1].paths)
