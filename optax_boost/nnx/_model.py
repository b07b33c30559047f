"""Splits an NNX model into a structure and arrays, and merges them.

`roots` is a tuple of the model and, if a step is called with ``nnx.Rngs``, of these rngs. They are
split together, since rngs may share streams with the model.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any, TypeAlias, TypeVar

from flax import nnx
import jax
import optax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _placement, _types

# In Flax before 0.12.7, `nnx.as_pure` is called `nnx.pure`; later versions deprecate that name.
as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure

RNG_TYPES = (nnx.Rngs, nnx.RngStream)

# What a step trains: an NNX module, or a tree of modules and variables.
Model: TypeAlias = Any
_Module = TypeVar("_Module", bound=nnx.Module)
# A filter of variables, as ``nnx.state`` takes it.
Filter: TypeAlias = Any
Roots: TypeAlias = tuple[Any, ...]
# The arrays that are not trained: a dict from the name of a root, as in `_ROOT_NAMES`, to the
# root's arrays, and from `REPLACED_VALUES` to those of the model that the gradient replaces.
Collections: TypeAlias = dict[str, Any]

# The first root, the model, is called "batch_stats", since `hold_frozen_statistics` removes this
# name from paths. So the paths of statistics begin like the paths of params.
_ROOT_NAMES = ("batch_stats", "rngs")
# The key in the collections under which `with_structure` stores a changed structure of the model.
# The structure is a pytree without leaves, so `jax.jit` returns it as it was when the program was
# traced.
_STRUCTURE = "structure"
# The name of the Flax contexts that match the objects before and after a forward pass.
_FORWARD_CONTEXT = "optax_boost"
# The path of a variable in the roots, as Flax writes it.
_Path: TypeAlias = tuple[Any, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Structure:
  """The structure of roots.

  Attributes:
    graphdef: Flax's description.
    mappings: the paths of the variables whose value is a mapping, such as
      ``nnx.Param({"w": ..., "b": ...})``. The arrays don't show where a path ends in a variable.
  """

  graphdef: nnx.GraphDef
  mappings: frozenset[_Path]


def split(wrt: Filter, *roots: Any) -> tuple[Structure, _types.Params, Collections]:
  """Returns the structure of roots, the model's trained arrays by path, and all other arrays."""
  # `nnx.split` uses the mode that the user has set, but this context always uses graph mode.
  with nnx.split_context() as context:
    return _split_in(context, wrt, roots)


def _split_in(
  context: Any, wrt: Filter, roots: Roots
) -> tuple[Structure, _types.Params, Collections]:
  """Returns what :func:`split` returns; `context` is an ``nnx.split_context``."""
  selects = nnx.filterlib.to_predicate(wrt)
  graphdef, replaced, params, untrained = context.split(
    roots, _replaced_type(), lambda path, value: path[0] == 0 and selects(path[1:], value), ...
  )
  mappings = frozenset().union(*map(_mappings, (replaced, params, untrained)))
  replaced, params, untrained = map(as_pure, (replaced, params, untrained))
  collections = {
    name: untrained[root] for root, name in enumerate(_ROOT_NAMES) if root in untrained
  }
  if replaced:
    collections[_train_step.REPLACED_VALUES] = replaced[0]
  return Structure(graphdef, mappings), params.get(0, params), collections


def _mappings(state: nnx.State) -> frozenset[_Path]:
  """Returns the paths of the variables in a state whose value is a mapping."""
  variables = nnx.to_flat_state(state)
  return frozenset(path for path, node in variables if isinstance(as_pure(node), Mapping))


def _replaced_type() -> Filter:
  """Returns the type of variables that the gradient replaces, as in modules of ``bridge.ToNNX``."""
  try:
    return nnx.variable_type_from_name(_train_step.REPLACED_VALUES)
  except ValueError:  # no module has made such variables
    return nnx.Nothing()


def merge(structure: Structure, params: _types.Params, collections: Collections) -> Roots:
  """Returns new roots, made from the results of :func:`split`."""
  return nnx.merge(structure.graphdef, _flat_state(structure.mappings, params, collections))


def call(
  function: Callable[[Roots], Any],
  structure: Structure,
  wrt: Filter,
  params: _types.Params,
  collections: Collections,
) -> tuple[Any, Structure, _types.Params, Collections]:
  """Calls ``function(roots)`` with new roots, which are merged from the other arguments.

  Returns the output of `function`, and then the roots after the call, as :func:`split` returns
  them.
  """
  with nnx.update_context(_FORWARD_CONTEXT):
    with nnx.merge_context(_FORWARD_CONTEXT, inner=True) as context:
      # Flax takes a flat state, too, though its annotation does not say so.
      arrays: Any = _flat_state(structure.mappings, params, collections)
      roots = context.merge(structure.graphdef, arrays)
    output = function(roots)
    with nnx.split_context(_FORWARD_CONTEXT) as context:
      return output, *_split_in(context, wrt, roots)


def with_structure(collections: Collections, before: Structure, after: Structure) -> Collections:
  """Returns the collections; adds the new structure if a forward pass changed the structure.

  `before` and `after` are the structure of the roots before and after the pass.
  """
  is_changed = after.graphdef.with_no_outer_index() != before.graphdef
  return {**collections, _STRUCTURE: after} if is_changed else collections


def write(params: _types.Params, collections: Collections, *roots: Any) -> None:
  """Writes arrays into the roots in place.

  If :func:`with_structure` has stored a new structure in `collections`, the roots also get this
  structure.
  """
  if _STRUCTURE not in collections:
    state = nnx.state(roots)
    mappings = _mappings(state)
    arrays = dict(_flat_state(mappings, params, collections))
    # Flax would write a mapping as an `nnx.State`, unless it comes in a variable.
    variables = {path: node for path, node in nnx.to_flat_state(state) if path in mappings}
    arrays |= {path: node.replace(arrays[path]) for path, node in variables.items()}
    nnx.update(roots, nnx.from_flat_state(arrays))
    return
  with nnx.update_context(_FORWARD_CONTEXT):
    with nnx.split_context(_FORWARD_CONTEXT) as context:
      context.split(roots)
    with nnx.merge_context(_FORWARD_CONTEXT, inner=False) as context:
      structure = collections[_STRUCTURE]
      flat: Any = _flat_state(structure.mappings, params, collections)
      context.merge(structure.graphdef, flat)


def _flat_state(
  mappings: frozenset[_Path], params: _types.Params, collections: Collections
) -> nnx.statelib.FlatState:
  """Returns the values of all variables by path, where those at `mappings` are mappings."""
  roots = [(0, params), (0, collections.get(_train_step.REPLACED_VALUES, {}))]
  roots += [(i, collections[name]) for i, name in enumerate(_ROOT_NAMES) if name in collections]
  # An empty mapping has no arrays.
  values: dict[_Path, Any] = {path: {} for path in mappings}
  for root, tree in roots:
    values |= _values(mappings, (root,), tree)
  return nnx.statelib.FlatState(values.items(), sort=False)


def _values(
  mappings: frozenset[_Path], path: _Path, tree: _types.Tree
) -> Iterator[tuple[_Path, Any]]:
  """Returns the values of the variables in a tree of arrays, each with its path."""
  if path in mappings or not isinstance(tree, Mapping):
    # A child of a State that is a dict is read as another State.
    yield path, tree.raw_mapping if isinstance(tree, nnx.State) else tree
    return
  for key, child in tree.items():
    yield from _values(mappings, (*path, key), child)


def write_opt_state(new: optax.OptState, optimizer: nnx.Optimizer) -> None:
  """Writes the arrays of a new optimizer state into the variables of an optimizer."""
  structure: Any
  variables, structure = jax.tree.flatten(
    optimizer.opt_state, is_leaf=lambda node: isinstance(node, nnx.Variable)
  )
  pure: _types.TreeDef = jax.tree.structure(as_pure(optimizer.opt_state))
  values = structure.flatten_up_to(jax.tree.unflatten(pure, jax.tree.leaves(new)))
  # Flax keeps a value that is a tree as it is only if the value comes in a variable.
  filled = [node.replace(value) for node, value in zip(variables, values, strict=True)]
  nnx.update(optimizer.opt_state, nnx.state(jax.tree.unflatten(structure, filled)))


def advance(roots: Roots, by: jax.Array) -> None:
  """Adds `by` to the counts of all rng streams in place; the streams then draw other numbers."""
  counts = nnx.state(roots, nnx.RngCount)
  nnx.update(roots, jax.tree.map(lambda count: count + by.astype(count.dtype), counts))


def copy(model: _Module) -> _Module:
  """Copies a model and its arrays; a step can then donate the arrays of one of the two models."""
  graphdef, state = nnx.split(model)
  copied = jax.tree.map(lambda x: _placement.copy(x) if isinstance(x, jax.Array) else x, state)
  return nnx.merge(graphdef, copied)


def modules(model: nnx.Module, kind: type[nnx.Module] = nnx.Module) -> dict[str, Any]:
  """Returns the modules of class `kind` in a model, by path."""
  graph = nnx.iter_graph(model)
  return {"/".join(map(str, path)): node for path, node in graph if isinstance(node, kind)}


def check(model: _types.Unchecked, *, tree: bool = False) -> None:
  """Raises TypeError unless `model` is an NNX module or, with `tree`, a tree of NNX nodes."""
  nodes = jax.tree.leaves(model, is_leaf=_is_nnx) if tree else []
  if not (isinstance(model, nnx.Module) or any(map(_is_nnx, nodes))):
    raise TypeError(
      f"`model` must be an NNX module; got {_checks.shorten(model)}. For Linen modules there is"
      " `optax_boost.linen`."
    )


def _is_nnx(node: _types.Tree) -> bool:
  return isinstance(node, (nnx.Module, nnx.Variable, *RNG_TYPES))
