"""Batches that hold NNX objects, such as a second model, which a step only reads."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax

from optax_boost import _train_step
from optax_boost._foundation import _batches, _checks, _paths, _types
from optax_boost.nnx import _model

# Flax 0.12 renamed the base class of modules.
_GRAPH_NODE = (nnx.Variable, nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object)


class KeyedBatch(NamedTuple):
  """The batch of a step that is called with a key; a full pass has batches without this mark."""

  batch: _types.Tree


def user_batch(batch: _types.Tree) -> Any:
  """A batch as a loss sees it."""
  batch = batch.batch if isinstance(batch, KeyedBatch) else batch
  return batch.open()[0] if isinstance(batch, ClosedBatch) else batch


def on_user_batch(function: _types.WeightFn | None) -> _types.WeightFn | None:
  """A function of the user's batch as a function of the batch inside a step; None stays None."""
  return None if function is None else lambda batch: function(user_batch(batch))


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["batch", "constants"],
  meta_fields=["structure", "graphdef"],
)
@dataclasses.dataclass(frozen=True)
class ClosedBatch:
  """A batch that holds NNX objects, such as a second model, as a tree of arrays.

  Attributes:
    batch: the batch, with None in the place of each NNX object.
    constants: the arrays of the NNX objects.
    structure: the structure of the batch, of which NNX objects are leaves.
    graphdef: the structure of the NNX objects.
  """

  batch: _types.Tree
  constants: _batches.Constants
  structure: Any
  graphdef: nnx.GraphDef

  def open(self) -> tuple[Any, tuple[Any, ...]]:
    """The batch with new NNX objects, and these objects."""
    with nnx.merge_context() as context:
      objects = context.unflatten(self.graphdef, list(self.constants.arrays))
    unused = iter(objects)
    leaves = [
      next(unused) if leaf is None else leaf for leaf in self.structure.flatten_up_to(self.batch)
    ]
    return jax.tree.unflatten(self.structure, leaves), objects

  def names(self) -> list[str]:
    """The path of each NNX object in the batch."""
    is_object = [leaf is None for leaf in self.structure.flatten_up_to(self.batch)]
    paths = _paths.leaf_paths(jax.tree.unflatten(self.structure, is_object))
    return [path for path, selected in zip(paths, is_object, strict=True) if selected]


def close(batch: _types.Tree) -> Any:
  """Takes the NNX objects in a batch apart; a batch without any is returned as it is."""
  leaves, structure = jax.tree.flatten(batch, is_leaf=_is_graph_node)
  objects = tuple(filter(_is_graph_node, leaves))
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
  without = jax.tree.unflatten(
    structure, [None if _is_graph_node(leaf) else leaf for leaf in leaves]
  )
  return ClosedBatch(without, _batches.Constants(tuple(arrays)), structure, graphdef)


class ClosedBatches:
  """An iterable of batches whose NNX objects are taken apart."""

  def __init__(self, batches: Iterable[_types.Tree]):
    self._batches = batches

  def __iter__(self) -> Iterator[_types.Tree]:
    return map(close, self._batches)

  def __len__(self) -> int:
    # A TypeError if the batches have no length, as a progress bar expects.
    return len(self._batches)  # type: ignore[arg-type]


def close_all(batches: Any) -> Any:
  """Batches whose NNX objects are taken apart; what is no iterable of batches is left alone."""
  is_iterable = isinstance(batches, Iterable) and not isinstance(batches, Mapping | str | bytes)
  return ClosedBatches(batches) if is_iterable else batches


def call_read_only(function: Callable[[Any], Any], closed: ClosedBatch) -> Any:
  """Calls a function of a batch, and refuses changes of the NNX objects in the batch."""

  def call(constants: _batches.Constants) -> Any:
    batch, objects = dataclasses.replace(closed, constants=constants).open()
    output = function(batch)
    with nnx.split_context() as context:
      return output, objects, context.flatten(objects, with_paths=False)[1]

  def arrays_after(constants: _batches.Constants) -> list[Any]:
    return jax.tree.leaves(call(constants)[2])

  output, objects, arrays = call(closed.constants)
  before, after = _variable_paths(closed.open()[1]), _variable_paths(objects)
  changed = {*before} ^ {*after}
  replaced = [
    old is not new
    for old, new in zip(jax.tree.leaves(closed.constants), jax.tree.leaves(arrays), strict=False)
  ]
  if not changed and any(replaced):
    # `nnx.jit`, `nnx.remat` and the like return all variables of their modules as other arrays.
    program = jax.make_jaxpr(arrays_after)(closed.constants)
    copied = _train_step.copied_inputs(program)
    paths = [
      path
      for path, array in zip(before, closed.constants.arrays, strict=True)
      for _ in jax.tree.leaves(array)
    ]
    changed = {path for path, same in zip(paths, copied, strict=True) if not same}
  if changed:
    names = closed.names()
    shown = sorted("/".join([names[i], *map(str, path)]).strip("/") for i, *path in changed)
    raise ValueError(
      "`loss_fn` must not change the NNX objects in the batch, which a step only reads; it changes"
      f" {_checks.shorten(shown, 400)}. Put a module whose statistics or rng counts change into"
      " evaluation mode before the step: module.eval(). To change it, return the new values as aux"
      " and write them after the step, or make it a part of the step's `model`."
    )
  return output


def _variable_paths(objects: tuple[Any, ...]) -> list[_types.KeyPath]:
  """The path of each variable, in the order of Flax's flattening."""
  with nnx.split_context() as context:
    return list(context.flatten(objects)[1].paths)


def _is_graph_node(node: _types.Tree) -> bool:
  """Whether a node of a batch is an object of NNX: a module, a variable, a metric, an optimizer."""
  return isinstance(node, _GRAPH_NODE)
