"""Permutations as what is kept of a training: integers, and the initial params."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _tree
from optax_boost._sgperm import _layout
from optax_boost._sgperm import _sharding
from optax_boost._sgperm import _sorting
from optax_boost._sgperm import _states


def identity(params: Any) -> Any:
  """The permutation that changes nothing.

  Args:
    params: the params.

  Returns:
    A tree of int32.
  """

  def one(p: jax.Array) -> jax.Array:
    if p.size > np.iinfo(np.int32).max:
      raise ValueError(f"A leaf may have 2^31 - 1 entries at most; got one of shape {p.shape}.")
    entries = jnp.arange(p.size, dtype=jnp.int32).reshape(p.shape)
    # Sharded like the param, where that is known.
    return entries + jnp.zeros_like(p, dtype=jnp.int32)

  return jax.tree.map(one, params)


@functools.partial(jax.jit, static_argnums=0)
def take(layout: _layout.Layout, initial: jax.Array, permutation: jax.Array) -> jax.Array:
  """What a leaf holds after a permutation; vectors stay where they are, also sharded.

  Args:
    layout: the leaf's.
    initial: the leaf before.
    permutation: int32 of the leaf's shape, indices into the raveled leaf.

  Returns:
    The leaf after.
  """

  def taken(initial: jax.Array, permutation: jax.Array) -> jax.Array:
    position = layout.position(layout.columns(permutation))
    return layout.leaf(_sorting.gather(layout.columns(initial), position))

  return _sharding.automatic(taken, initial)(initial, permutation)


def mismatch(
  params: Any, initial: Any, permutation: Any, layouts: list[_layout.Layout]
) -> jax.Array:
  """Whether params are something else than the permutation, beyond rounding.

  Args:
    params: the params.
    initial: the initial params.
    permutation: the permutation.
    layouts: of the leaves.

  Returns:
    Scalar bool.

  Raises:
    ValueError: they are, and this is not inside ``jit``.
  """
  found = jnp.zeros([], bool)
  parts = (jax.tree.leaves(tree) for tree in (params, initial, permutation))
  for layout, p, start, flat in zip(layouts, *parts, strict=True):
    if not layout.movable:
      continue
    # With `optax.apply_updates`, rounding moves a weight by less than this.
    slack = 2 * jnp.finfo(p.dtype).eps * jnp.max(jnp.abs(start))
    off = jnp.max(jnp.abs(p - take(layout, start, flat)))
    wrong = jnp.logical_not(off <= slack)
    if not isinstance(wrong, jax.core.Tracer) and wrong:
      raise ValueError(
        f"`sgperm` needs the params to be the permutation that its state holds; the leaf"
        f" '{layout.name}' is off by {float(off):.3g}. Nothing else may change them: no weight"
        " decay, no scaling of the updates, no second optimizer. After a deliberate change, start"
        " from `tx.init(params)`."
      )
    found |= wrong
  return found


def check_indices(index: Any, size: int, argument: str, name: str) -> None:
  """Refuses integers that are no permutations, where their values are known.

  Args:
    index: integers. As (`size`, columns), each column must hold 0 to `size` - 1 once.
    size: the length of a column.
    argument: the argument's name, for the message.
    name: the leaf's name, for the message.

  Raises:
    ValueError: an index is out of range or occurs twice.
  """
  if isinstance(index, jax.core.Tracer) or not size:
    return
  # What lies on other processes is theirs to check.
  if isinstance(index, jax.Array) and not index.is_fully_addressable:
    return
  values = np.asarray(index).reshape(size, -1)
  outside = values[(values < 0) | (values >= size)]
  if outside.size:
    raise ValueError(
      f"`{argument}` must hold indices from 0 to {size - 1} for the leaf '{name}'; got"
      f" {outside[0]}."
    )
  ordered = np.sort(values, axis=0)
  repeated = ordered[1:][ordered[1:] == ordered[:-1]]
  if repeated.size:
    raise ValueError(
      f"`{argument}` must hold each index of the leaf '{name}' once; got {repeated[0]} more than"
      " once, so that weights would be lost."
    )


def permutation(opt_state: optax.OptState) -> Any:
  """The permutation that a training has come to: with the initial params, the whole model.

  Args:
    opt_state: the state of any chain that holds one of ``sgperm`` or ``laperm``.

  Returns:
    A tree of int32 arrays of the params' shapes: for each entry of a leaf, which entry of the
    raveled initial leaf it holds. Leaves that were masked out are ``optax.MaskedNode()``.

  Raises:
    ValueError: the state holds none, or several.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> init = lambda seed: {"kernel": jax.random.normal(jax.random.key(seed), (3, 2))}
    >>> params = init(0)
    >>> tx = optax_boost.sgperm(method="rank")
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> integers = optax_boost.permutation(state)  # with the seed, all there is to save
    >>> trained = optax_boost.apply_permutation(init(0), integers)
    >>> bool(jnp.all(trained["kernel"] == optax_boost.permuted_params(state)["kernel"]))
    True
  """
  return _states.find(opt_state, "permutation").permutation


def apply_permutation(initial: optax.Params, permutation: Any) -> optax.Params:
  """Permutes initial params.

  Args:
    initial: the params that the training started from.
    permutation: as :func:`permutation` gives it; leaves that are ``optax.MaskedNode()`` stay as
      they are.

  Returns:
    The permuted params, exact.

  Raises:
    ValueError: the permutation is none of these params: another tree, shape or dtype; or, where
      its values are known, an index is out of range or occurs twice.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> initial = {"bias": jnp.array([0.5, 0.25, 0.125])}
    >>> optax_boost.apply_permutation(initial, {"bias": jnp.array([2, 0, 1])})["bias"].tolist()
    [0.125, 0.5, 0.25]
  """

  def check(path: Any, start: jax.Array, index: Any) -> jax.Array:
    if isinstance(index, optax.MaskedNode):
      return start
    name = _tree.path_string(path) or "params"
    integers = jnp.issubdtype(jnp.result_type(index), jnp.integer)
    if not integers or jnp.shape(index) != jnp.shape(start):
      raise ValueError(
        f"`apply_permutation` needs integers of the params' shapes; the leaf '{name}' is"
        f" {jnp.result_type(index)} of shape {jnp.shape(index)} for params of shape"
        f" {jnp.shape(start)}. Pass what `permutation` returned for these params."
      )
    check_indices(index, jnp.size(start), "permutation", name)
    return start

  _mapped(check, initial, permutation, "apply_permutation")
  return _permuted(initial, permutation, "apply_permutation")


def _permuted(initial: Any, permutation: Any, function: str) -> Any:
  """Permutes initial params; indices are in range."""

  def one(path: Any, start: jax.Array, index: Any) -> jax.Array:
    del path
    if isinstance(index, optax.MaskedNode):
      return start
    return _sharding.automatic(lambda x, i: jnp.ravel(x)[i], start)(start, index)

  return _mapped(one, initial, permutation, function)


def permuted_params(opt_state: optax.OptState, params: optax.Params | None = None) -> optax.Params:
  """The params as an exact permutation of the initial ones, free of any rounding.

  Args:
    opt_state: the state of any chain that holds one of ``sgperm`` or ``laperm``.
    params: where some leaves were masked out, the params to take those from.

  Returns:
    The params; without `params`, masked leaves are ``optax.MaskedNode()``.

  Raises:
    ValueError: the state holds no permutation, or several; or it is one of other params.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"bias": jnp.array([0.3, 0.2, 0.1])}
    >>> tx = optax_boost.sgperm(alpha=1.0, method="rank")
    >>> wishes = {"bias": jnp.array([1.0, 0.0, -1.0])}
    >>> _, state = tx.update(wishes, tx.init(params), params)
    >>> [round(float(x), 1) for x in optax_boost.permuted_params(state)["bias"]]
    [0.1, 0.2, 0.3]
  """
  state = _states.find(opt_state, "permuted_params")
  exact = _permuted(state.initial, state.permutation, "permuted_params")
  if params is None:
    return exact

  def one(path: Any, current: jax.Array, permuted: Any) -> jax.Array:
    del path
    return current if isinstance(permuted, optax.MaskedNode) else permuted

  return _mapped(one, params, exact, "permuted_params")


def apply_permuted_params(
  params: optax.Params, updates: optax.Updates, opt_state: optax.OptState
) -> optax.Params:
  """Takes a step whose params are exactly a permutation of the initial ones.

  In the place of ``optax.apply_updates``, which adds, and so may end one rounding beside a weight:
  ``p + (q - p)`` is not always ``q``. That rounding does not grow, for each step aims anew at
  the exact weight; with this function there is none. Between two synchronizations of ``laperm``
  params are no permutation, and it is ``optax.apply_updates``.

  Args:
    params: the params before.
    updates: from ``tx.update``; they count for the leaves that are not permuted.
    opt_state: from ``tx.update``, the new one.

  Returns:
    The params after.

  Raises:
    ValueError: the state holds no permutation, or several; or it is one of other params.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"bias": jnp.array([0.3, 0.2, 0.1])}
    >>> tx = optax_boost.sgperm(alpha=1.0, method="rank")
    >>> wishes = {"bias": jnp.array([1.0, 0.0, -1.0])}
    >>> updates, state = tx.update(wishes, tx.init(params), params)
    >>> new = optax_boost.apply_permuted_params(params, updates, state)
    >>> new["bias"].tolist() == params["bias"][::-1].tolist()
    True
  """
  _base.require_params(params, "apply_permuted_params")
  _tree.check_same_tree(updates, params, "apply_permuted_params")
  state = _states.find(opt_state, "apply_permuted_params")
  added = optax.apply_updates(params, updates)
  exact = permuted_params(state, added)
  if isinstance(state, _states.SgpermState):
    return exact
  return jax.tree.map(lambda e, a: jnp.where(state.synced, e, a), exact, added)


def _mapped(
  one: Callable[[Any, jax.Array, Any], Any], params: Any, tree: Any, function: str
) -> Any:
  """Maps over params and a tree of the same structure but for its masked leaves."""

  def masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)

  def with_path(path: Any, p: Any, x: Any) -> Any:
    if not masked(x) and not jax.tree_util.all_leaves([x]):
      raise ValueError("the params have a leaf in place of a subtree")
    return p if masked(p) else one(path, p, x)

  try:
    return jax.tree_util.tree_map_with_path(with_path, params, tree, is_leaf=masked)
  except ValueError as error:
    if str(error).startswith("`"):
      raise
    raise ValueError(
      f"`{function}` needs a permutation of the tree structure of the params; got"
      f" {jax.tree.structure(tree)} for params {jax.tree.structure(params)}. Pass what"
      " `permutation` returned for these params."
    ) from error
