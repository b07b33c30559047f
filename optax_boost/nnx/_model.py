"""Splits an NNX model into a structure and arrays, and merges them.

`roots` is a tuple of the model and, if a step is called with ``nnx.Rngs``, of these rngs. They are
split together, since rngs may share streams with the model.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from flax import nnx
import jax
import jax.numpy as jnp

from optax_boost import _train_step
from optax_boost._foundation import _checks, _types

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


def split(wrt: Filter, *roots: Any) -> tuple[nnx.GraphDef, _types.Params, Collections]:
  """Returns the structure of roots, the model's trained arrays by path, and all other arrays."""
  # `nnx.split` uses the mode that the user has set, but this context always uses graph mode.
  with nnx.split_context() as context:
    return _split_in(context, wrt, roots)


def _split_in(
  context: Any, wrt: Filter, roots: Roots
) -> tuple[nnx.GraphDef, _types.Params, Collections]:
  """Returns what :func:`split` returns; `context` is an ``nnx.split_context``."""
  selects = nnx.filterlib.to_predicate(wrt)
  graphdef, replaced, params, untrained = context.split(
    roots, _replaced_type(), lambda path, value: path[0] == 0 and selects(path[1:], value), ...
  )
  replaced, params, untrained = map(as_pure, (replaced, params, untrained))
  collections = {
    name: untrained[root] for root, name in enumerate(_ROOT_NAMES) if root in untrained
  }
  if replaced:
    collections[_train_step.REPLACED_VALUES] = replaced[0]
  return graphdef, params.get(0, params), collections


def _replaced_type() -> Filter:
  """Returns the type of variables that the gradient replaces, as in modules of ``bridge.ToNNX``."""
  try:
    return nnx.variable_type_from_name(_train_step.REPLACED_VALUES)
  except ValueError:  # no module has made such variables
    return nnx.Nothing()


def merge(graphdef: nnx.GraphDef, params: _types.Params, collections: Collections) -> Roots:
  """Returns new roots, made from the results of :func:`split`."""
  return nnx.merge(graphdef, *_states(params, collections))


def call(
  function: Callable[[Roots], Any],
  graphdef: nnx.GraphDef,
  wrt: Filter,
  params: _types.Params,
  collections: Collections,
) -> tuple[Any, nnx.GraphDef, _types.Params, Collections]:
  """Calls ``function(roots)`` with new roots, which are merged from the other arguments.

  Returns the output of `function`, and then the roots after the call, as :func:`split` returns
  them.
  """
  with nnx.update_context(_FORWARD_CONTEXT):
    with nnx.merge_context(_FORWARD_CONTEXT, inner=True) as context:
      roots = context.merge(graphdef, *_states(params, collections))
    output = function(roots)
    with nnx.split_context(_FORWARD_CONTEXT) as context:
      return output, *_split_in(context, wrt, roots)


def with_structure(
  collections: Collections, before: nnx.GraphDef, after: nnx.GraphDef
) -> Collections:
  """Returns the collections; adds the new structure if a forward pass changed the structure.

  `before` and `after` are the ``GraphDef`` of the roots before and after the pass.
  """
  is_changed = after.with_no_outer_index() != before
  return {**collections, _STRUCTURE: after} if is_changed else collections


def write(params: _types.Params, collections: Collections, *roots: Any) -> None:
  """Writes arrays into the roots in place.

  If :func:`with_structure` has stored a new structure in `collections`, the roots also get this
  structure.
  """
  if _STRUCTURE not in collections:
    nnx.update(roots, *_states(params, collections))
    return
  with nnx.update_context(_FORWARD_CONTEXT):
    with nnx.split_context(_FORWARD_CONTEXT) as context:
      context.split(roots)
    with nnx.merge_context(_FORWARD_CONTEXT, inner=False) as context:
      context.merge(collections[_STRUCTURE], *_states(params, collections))


def _states(
  params: _types.Params, collections: Collections
) -> tuple[nnx.State, nnx.State, nnx.State]:
  untrained = {
    root: _as_dict(collections[name])
    for root, name in enumerate(_ROOT_NAMES)
    if name in collections
  }
  replaced = _as_dict(collections.get(_train_step.REPLACED_VALUES, {}))
  return nnx.State({0: _as_dict(params)}), nnx.State(untrained), nnx.State({0: replaced})


def _as_dict(tree: _types.Tree) -> _types.Tree:
  """Returns the dict that an ``nnx.State`` holds; returns other trees unchanged.

  The result is put into an ``nnx.State``, which can't hold another state in Flax before 0.12.
  """
  return tree.raw_mapping if isinstance(tree, nnx.State) else tree


def advance(roots: Roots, by: jax.Array) -> None:
  """Adds `by` to the counts of all rng streams in place; the streams then draw other numbers."""
  counts = nnx.state(roots, nnx.RngCount)
  nnx.update(roots, jax.tree.map(lambda count: count + by.astype(count.dtype), counts))


def copy(model: _Module) -> _Module:
  """Copies a model and its arrays; a step can then donate the arrays of one of the two models."""
  graphdef, state = nnx.split(model)
  copied = jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, state)
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
