"""An NNX model as a pure loss ``loss(params, model_state, batch, rng)`` with its arrays.

`roots` are the model and, after it, the rngs of a call if there are any; they may share streams.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax

from optax_boost import _train_step
from optax_boost._foundation import _batches, _checks, _paths, _tree_checks, _types
from optax_boost._trace import _layer_axes

# Before flax 0.12.7 it was called `pure`, a name that warns since.
as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure
# Seeds the masks of a full pass. They differ from pass to pass all the same: the key only moves the
# model's own rng streams.
PASS_SEED = 0

# Generators of random numbers, which a step or a loss may take besides its model.
RNG_TYPES = (nnx.Rngs, nnx.RngStream)

# Flax 0.12 renamed the base class of modules.
_GRAPH_NODE = (nnx.Variable, nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object)

# The arrays of each root that are not trained. The model's bear the name by which
# `hold_frozen_statistics` knows a collection.
_COLLECTION_OF_ROOT = ("batch_stats", "rngs")
# With them, the structure of the roots after a forward pass that has changed it: a tree without
# leaves, so that each compiled program returns its own.
_STRUCTURE = "structure"
# Names the contexts in which Flax finds the roots' objects again after such a pass.
_FORWARD_CONTEXT = "optax_boost"


class Keyed(NamedTuple):
  """The batch of a step that is called with a key; a full pass has batches without this mark."""

  batch: _types.Tree


def plain_batch(batch: _types.Tree) -> Any:
  """A batch as a loss sees it."""
  batch = batch.batch if isinstance(batch, Keyed) else batch
  return batch.open()[0] if isinstance(batch, ClosedBatch) else batch


def of_plain_batch(function: _types.WeightFn | None) -> _types.WeightFn | None:
  """A function of the user's batch as a function of the batch inside a step; None stays None."""
  return None if function is None else lambda batch: function(plain_batch(batch))


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


def close_batch(batch: _types.Tree) -> Any:
  """Takes the NNX objects in a batch apart; a batch without any is returned as it is."""
  leaves, structure = jax.tree.flatten(batch, is_leaf=_is_graph_node)
  objects = tuple(filter(_is_graph_node, leaves))
  if not objects:
    return batch
  for node in objects:
    if isinstance(node, RNG_TYPES):
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
    return map(close_batch, self._batches)

  def __len__(self) -> int:
    # A TypeError if the batches have no length, as a progress bar expects.
    return len(self._batches)  # type: ignore[arg-type]


def close_batches(batches: Any) -> Any:
  """Batches whose NNX objects are taken apart; what is no iterable of batches is left alone."""
  is_iterable = isinstance(batches, Iterable) and not isinstance(batches, Mapping | str | bytes)
  return ClosedBatches(batches) if is_iterable else batches


def pure_loss(
  loss_fn: _types.LossFn,
  graphdef: nnx.GraphDef,
  wrt: Any,
  *,
  has_key: bool = False,
  may_change: bool = True,
) -> _types.LossFn:
  """From ``loss_fn(model, batch[, rng])`` to the pure loss that returns the new state, too.

  If the forward pass changes the structure, the state holds it for :func:`write`; unless
  it `may_change`, new and removed arrays are refused, and new static attributes dropped.
  """

  # `race` passes a key to losses with a parameter of that name; models have streams of their own.
  def loss(
    params: _types.Tree, model_state: _types.Tree, batch: _types.Tree, *keys: jax.Array
  ) -> Any:
    moves_streams = bool(keys) and not isinstance(batch, Keyed)
    batch = close_batch(batch.batch if isinstance(batch, Keyed) else batch)

    def forward(batch: _types.Tree) -> Any:
      # A model of its own for every call: its changes in the forward pass (statistics, rng counts)
      # are read off afterwards, and a trial point's changes are dropped with it.
      with nnx.update_context(_FORWARD_CONTEXT):
        with nnx.merge_context(_FORWARD_CONTEXT, inner=True) as context:
          roots = context.merge(graphdef, *_states(params, model_state))
        if moves_streams:
          _advance(roots, jax.random.bits(keys[0]))
        output = loss_fn(roots[0], batch, *roots[1:], *(keys if has_key else ()))
        with nnx.split_context(_FORWARD_CONTEXT) as context:
          return output, *_split_in(context, wrt, roots)

    if isinstance(batch, ClosedBatch):
      output, structure, after, new_state = _call_read_only(forward, batch)
    else:
      output, structure, after, new_state = forward(batch)
    _check_trained(params, after)
    if not may_change:
      _check_others(model_state, new_state)
    elif structure.with_no_outer_index() != graphdef:
      new_state = {**new_state, _STRUCTURE: structure}
    return output, _train_step.with_written_params(new_state, params, after)

  return _layer_axes.stateful(loss)


def _call_read_only(function: Callable[[Any], Any], closed: ClosedBatch) -> Any:
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


def split_loss(
  loss_fn: _types.LossFn, model: nnx.Module, *, wrt: Any = nnx.Param
) -> tuple[_types.LossFn, Any, Any]:
  """Makes the loss of a model pure: the form that the package's functions take.

  :func:`optax_boost.make_train_step`, :func:`optax_boost.layer_groups`,
  :func:`optax_boost.layer_axes` and :func:`optax_boost.race` know such a loss. Its train step takes
  the model apart once, so it needs a part of the host's time of :func:`make_train_step`.

  Args:
    loss_fn: ``loss_fn(model, batch)``. Any function of a model: an evaluation, too.
    model: the model; it is not changed.
    wrt: the filter of the trained variables, as in ``nnx.Optimizer``.

  Returns:
    ``(loss, params, model_state)``, with ``loss(params, model_state, batch)`` returning the output
    of `loss_fn` and the new `model_state`, a dict with all variables that are not trained. It takes
    the variables of any model of the same structure. Dropout draws from the model's own streams; a
    key as a fourth argument moves them.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: when traced: the forward pass creates, removes or reshapes variables.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax, optax_boost.nnx
    >>> model, x = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), jnp.eye(3)
    >>> loss, params, model_state = optax_boost.nnx.split_loss(
    ...   lambda model, x: jnp.mean((model(x) - 1) ** 2), model
    ... )
    >>> print(optax_boost.layer_axes(loss, params, model_state, x))
    bias: outputs (0,)
    kernel: fan-in (0,), outputs (1,)
    >>> step = optax_boost.make_train_step(loss, optax.lbfgs())
    >>> state = step.init(params, model_state)
    >>> for _ in range(8):
    ...   state, metrics = step(state, x)
    >>> nnx.update(model, state.params, *state.model_state.values())
    >>> bool(jnp.allclose(model(x), 1, atol=1e-2))
    True
  """
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  check_model(model)
  graphdef, params, model_state = split(wrt, model)
  return pure_loss(loss_fn, graphdef, wrt, may_change=False), params, model_state


def split(wrt: Any, *roots: Any) -> tuple[Any, Any, Any]:
  """The structure, the trained arrays with their paths in the model, and all other arrays."""
  # Unlike `nnx.split` in the graph mode, whatever mode is set.
  with nnx.split_context() as context:
    return _split_in(context, wrt, roots)


def _split_in(context: Any, wrt: Any, roots: tuple[Any, ...]) -> tuple[Any, Any, Any]:
  selects = nnx.filterlib.to_predicate(wrt)
  graphdef, params, untrained = context.split(
    roots, lambda path, value: path[0] == 0 and selects(path[1:], value), ...
  )
  params, untrained = as_pure(params), as_pure(untrained)
  collections = {
    name: untrained[root] for root, name in enumerate(_COLLECTION_OF_ROOT) if root in untrained
  }
  return graphdef, params.get(0, params), collections


def merge(graphdef: nnx.GraphDef, params: _types.Tree, collections: Any) -> tuple[Any, ...]:
  """The inverse of :func:`split`: new roots."""
  return nnx.merge(graphdef, *_states(params, collections))


def write(params: _types.Tree, collections: Any, *roots: Any) -> None:
  """Puts the arrays of :func:`split` into the roots, by their paths.

  A structure that the forward pass has changed is written with them, as ``nnx.jit`` does.
  """
  if _STRUCTURE not in collections:
    nnx.update(roots, *_states(params, collections))
    return
  with nnx.update_context(_FORWARD_CONTEXT):
    with nnx.split_context(_FORWARD_CONTEXT) as context:
      context.split(roots)
    with nnx.merge_context(_FORWARD_CONTEXT, inner=False) as context:
      context.merge(collections[_STRUCTURE], *_states(params, collections))


def _states(params: _types.Tree, collections: Any) -> tuple[nnx.State, nnx.State]:
  untrained = {
    root: _dict(collections[name])
    for root, name in enumerate(_COLLECTION_OF_ROOT)
    if name in collections
  }
  return nnx.State({0: _dict(params)}), nnx.State(untrained)


def _dict(tree: _types.Tree) -> Any:
  """A state's contents: flax before 0.12 takes no state inside a state."""
  return tree.raw_mapping if isinstance(tree, nnx.State) else tree


def _advance(roots: tuple[Any, ...], by: jax.Array) -> None:
  """Moves all rng streams ahead, so that they draw other masks."""
  counts = nnx.state(roots, nnx.RngCount)
  nnx.update(roots, jax.tree.map(lambda count: count + by.astype(count.dtype), counts))


def _check_trained(before: _types.Tree, after: _types.Tree) -> None:
  """Refuses a forward pass that changes more of the trained variables than their values."""
  if _tree_checks.same_shapes(before, after):
    return
  changed = {
    leaf.path for leaf in {*_layer_axes.leaves_of(before)} ^ {*_layer_axes.leaves_of(after)}
  }
  if changed:
    raise ValueError(
      "`loss_fn` must leave the trained variables in the number and shapes that the optimizer was"
      f" made for; the forward pass creates, removes or reshapes"
      f" {_checks.shorten(sorted(changed))}. Create trained variables in the"
      " model's `__init__`, before the optimizer."
    )


def _check_others(before: _types.Tree, after: _types.Tree) -> None:
  """Refuses a forward pass that creates or removes variables."""
  changed = {*_paths.leaf_paths(before)} ^ {*_paths.leaf_paths(after)}
  if changed:
    raise ValueError(
      "`split_loss` needs a model whose forward pass keeps its variables; this one's creates"
      f" or removes {_checks.shorten(sorted(changed))}. Create variables in the model's `__init__`,"
      " and pop intermediates in the loss: nnx.pop(model, nnx.Intermediate)."
    )


def check_model(model: _types.Unchecked, *, tree: bool = False) -> None:
  """Refuses all but NNX modules; with `tree` lets trees of modules and variables pass."""
  nodes = jax.tree.leaves(model, is_leaf=_is_nnx) if tree else []
  if not (isinstance(model, nnx.Module) or any(map(_is_nnx, nodes))):
    raise TypeError(
      f"`model` must be an NNX module; got {_checks.shorten(model)}. For Linen modules there is"
      " `optax_boost.linen`."
    )


def _is_graph_node(node: _types.Tree) -> bool:
  """Whether a node of a batch is an object of NNX: a module, a variable, a metric, an optimizer."""
  return isinstance(node, _GRAPH_NODE)


def _is_nnx(node: _types.Tree) -> bool:
  return isinstance(node, (nnx.Module, nnx.Variable, *RNG_TYPES))
