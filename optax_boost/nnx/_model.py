"""An NNX model taken apart into arrays, and put together again.

`roots` are the model and, after it, the rngs of a call if there are any; they may share streams.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from flax import nnx
import jax
import jax.numpy as jnp

from optax_boost._foundation import _checks, _types

# Before flax 0.12.7 it was called `pure`, a name that warns since.
as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure

# Generators of random numbers, which a step or a loss may take besides its model.
RNG_TYPES = (nnx.Rngs, nnx.RngStream)

# The model, or a tree of models, and the rngs.
Roots: TypeAlias = tuple[Any, ...]
# The arrays of each root that are not trained, by these names. The model's bear the name by which
# `hold_frozen_statistics` knows a collection.
Collections: TypeAlias = dict[str, Any]
_COLLECTION_OF_ROOT = ("batch_stats", "rngs")
# With them, the structure of the roots after a forward pass that has changed it: a tree without
# leaves, so that each compiled program returns its own.
_STRUCTURE = "structure"
# Names the contexts in which Flax finds the roots' objects again after such a pass.
_FORWARD_CONTEXT = "optax_boost"


def split(wrt: nnx.filterlib.Filter, *roots: Any) -> tuple[nnx.GraphDef, Any, Collections]:
  """The structure, the trained arrays with their paths in the model, and all other arrays."""
  # Unlike `nnx.split` in the graph mode, whatever mode is set.
  with nnx.split_context() as context:
    return _split_in(context, wrt, roots)


def _split_in(
  context: Any, wrt: nnx.filterlib.Filter, roots: Roots
) -> tuple[nnx.GraphDef, Any, Collections]:
  selects = nnx.filterlib.to_predicate(wrt)
  graphdef, params, untrained = context.split(
    roots, lambda path, value: path[0] == 0 and selects(path[1:], value), ...
  )
  params, untrained = as_pure(params), as_pure(untrained)
  collections = {
    name: untrained[root] for root, name in enumerate(_COLLECTION_OF_ROOT) if root in untrained
  }
  return graphdef, params.get(0, params), collections


def merge(graphdef: nnx.GraphDef, params: _types.Params, collections: Collections) -> Roots:
  """The inverse of :func:`split`: new roots."""
  return nnx.merge(graphdef, *_states(params, collections))


def call(
  function: Callable[[Roots], Any],
  graphdef: nnx.GraphDef,
  wrt: nnx.filterlib.Filter,
  params: _types.Params,
  collections: Collections,
) -> tuple[Any, nnx.GraphDef, Any, Collections]:
  """Calls a function of new roots; returns its result, and the roots after the call, split."""
  with nnx.update_context(_FORWARD_CONTEXT):
    with nnx.merge_context(_FORWARD_CONTEXT, inner=True) as context:
      roots = context.merge(graphdef, *_states(params, collections))
    output = function(roots)
    with nnx.split_context(_FORWARD_CONTEXT) as context:
      return output, *_split_in(context, wrt, roots)


def with_structure(
  collections: Collections, before: nnx.GraphDef, after: nnx.GraphDef
) -> Collections:
  """Adds the structure after a forward pass for :func:`write`, if the pass has changed it."""
  is_changed = after.with_no_outer_index() != before
  return {**collections, _STRUCTURE: after} if is_changed else collections


def write(params: _types.Params, collections: Collections, *roots: Any) -> None:
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


def _states(params: _types.Params, collections: Collections) -> tuple[nnx.State, nnx.State]:
  untrained = {
    root: _dict(collections[name])
    for root, name in enumerate(_COLLECTION_OF_ROOT)
    if name in collections
  }
  return nnx.State({0: _dict(params)}), nnx.State(untrained)


def _dict(tree: _types.Tree) -> Any:
  """A state's contents: flax before 0.12 takes no state inside a state."""
  return tree.raw_mapping if isinstance(tree, nnx.State) else tree


def advance(roots: Roots, by: jax.Array) -> None:
  """Moves all rng streams ahead, so that they draw other masks."""
  counts = nnx.state(roots, nnx.RngCount)
  nnx.update(roots, jax.tree.map(lambda count: count + by.astype(count.dtype), counts))


def copy(model: nnx.Module) -> Any:
  """Copies a model with its arrays, so that either can be donated."""
  graphdef, state = nnx.split(model)
  copied = jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, state)
  return nnx.merge(graphdef, copied)


def modules(model: nnx.Module, kind: type[nnx.Module] = nnx.Module) -> dict[str, Any]:
  """The modules of a kind in a model, by path."""
  graph = nnx.iter_graph(model)
  return {"/".join(map(str, path)): node for path, node in graph if isinstance(node, kind)}


def check(model: _types.Unchecked, *, tree: bool = False) -> None:
  """Refuses all but NNX modules; with `tree` lets trees of modules and variables pass."""
  nodes = jax.tree.leaves(model, is_leaf=_is_nnx) if tree else []
  if not (isinstance(model, nnx.Module) or any(map(_is_nnx, nodes))):
    raise TypeError(
      f"`model` must be an NNX module; got {_checks.shorten(model)}. For Linen modules there is"
      " `optax_boost.linen`."
    )


def _is_nnx(node: _types.Tree) -> bool:
  return isinstance(node, (nnx.Module, nnx.Variable, *RNG_TYPES))
