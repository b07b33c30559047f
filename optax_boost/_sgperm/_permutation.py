"""The states of the two methods, and the permutations in them."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _in_place
from optax_boost import _masking
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _layout


@_protocol.declares(metrics=("sgperm/notfinite_count",), exact=("permuted_params",))
class SgpermState(NamedTuple):
  """State of :func:`sgperm`: four copies of the params, three with ``method="pairs"``.

  Attributes:
    count: scalar int32, the number of steps made.
    alpha: scalar, the last step's alpha.
    lamda: scalar, the last step's lamda.
    key: raw key data, from which each step draws its subsets or pairs.
    momentum: the recommendations, in at least float32.
    permuted_params: the exact params after the last step; they share no memory with the params.
    permutation: int32 of the params' shapes: for each entry of a leaf, which entry of the raveled
      initial leaf it holds now. See :func:`permutation`.
    ranks: int32 of the params' shapes: the weights' ranks in their vectors; ``()`` with
      ``method="pairs"``.
    ranges: per leaf (1, vectors), the weight vectors' initial ranges.
    notfinite_count: scalar int32, the steps with a gradient entry that was not finite.
    mismatch_count: scalar int32, with ``check=True`` the steps whose params were not the
      permutation that this state holds.
  """

  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  alpha: jax.Array
  lamda: jax.Array
  key: jax.Array
  momentum: optax.Updates
  permuted_params: optax.Params
  permutation: Any
  ranks: Any
  ranges: Any
  notfinite_count: jax.Array
  mismatch_count: jax.Array


@_protocol.declares(exact=("permuted_params",))
class LapermState(NamedTuple):
  """State of :func:`laperm`: three copies of the params beside the inner state.

  Leaves that are excluded are ``optax.MaskedNode()`` in the three trees.

  Attributes:
    count: scalar int32, the number of inner steps made.
    synced: scalar bool, whether the last of them ended in a permutation.
    permuted_params: the exact params of the last synchronization.
    permutation: as in :func:`sgperm`'s state, of the last synchronization.
    ranks: the ranks of `permuted_params` in their weight vectors.
    inner_state: the inner optimizer's state.
  """

  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  synced: jax.Array
  permuted_params: optax.Params
  permutation: Any
  ranks: Any
  inner_state: optax.OptState


def find_state(
  opt_state: Any, function: str, *, of_one_run: bool = True
) -> SgpermState | LapermState:
  """The only state of the two methods in an optimizer state, by default of no population."""
  kinds: tuple[Any, ...] = (SgpermState, LapermState)
  states = [state for kind in kinds for state in _tree.find_states(opt_state, kind)]
  if len(states) != 1:
    raise ValueError(
      f"`{function}` needs a state with exactly one of `sgperm` and `laperm` in it; got"
      f" {len(states)}. Pass the part of the optimizer state that belongs to one of them."
    )
  if of_one_run:
    _base.require_one_run(states[0].count, function)
  return states[0]


def _take(initial: jax.Array, index: jax.Array) -> jax.Array:
  """A leaf after a permutation of its entries."""
  if not jnp.size(initial):
    return jnp.array(initial)  # on explicit axes of no set mesh, JAX fails to gather from it
  return _execution.auto_sharded(lambda x, i: jnp.ravel(x)[i], initial)(initial, index)


def mismatch(params: Any, exact: Any, layouts: list[_layout.Layout]) -> jax.Array:
  """Whether params differ from the exact ones by more than rounding; raises outside ``jit``."""
  any_wrong = jnp.zeros([], bool)
  parts = (jax.tree.leaves(tree) for tree in (params, exact))
  for layout, p, x in zip(layouts, *parts, strict=True):
    if not layout.movable:
      continue
    # With `optax.apply_updates`, rounding moves a weight by less than this.
    slack = 2 * jnp.finfo(p.dtype).eps * jnp.max(jnp.abs(x))
    off = jnp.max(jnp.abs(p - x))
    wrong = jnp.logical_not(off <= slack)
    if not isinstance(wrong, jax.core.Tracer) and wrong:
      raise ValueError(
        f"`sgperm` needs the params to be the permutation that its state holds; the leaf"
        f" '{layout.name}' is off by {float(off):.3g}. Nothing else may change them: no weight"
        " decay, no scaling of the updates, no second optimizer. After a deliberate change, start"
        " from `tx.init(params)`."
      )
    any_wrong |= wrong
  return any_wrong


def check_indices(index: Any, size: int, argument: str, name: str) -> None:
  """Refuses integers (`size`, ...) whose columns don't hold 0 to `size` - 1 once, where known."""
  if isinstance(index, jax.core.Tracer) or not size:
    return
  # Shards on other processes are theirs to check.
  if not _arrays.is_whole_here(index):
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


def _mapped(
  one: Callable[[str, jax.Array, Any], Any], params: Any, tree: Any, function: str
) -> Any:
  """Maps over params and a tree like them; leaves that are masked in either stay the params'."""
  structure: Any
  leaves, structure = jax.tree.flatten(params, is_leaf=_tree.is_masked)
  others = _masking.leaves_like(tree, params)
  if others is None:
    raise ValueError(
      f"`{function}` needs a permutation of the tree structure of the params; got"
      f" {jax.tree.structure(tree)} for params {jax.tree.structure(params)}. Pass what"
      " `permutation` returned for these params."
    )
  paths = _tree.leaf_paths(params, _tree.is_masked)
  results = [
    p if _tree.is_masked(p) or _tree.is_masked(x) else one(path, p, x)
    for path, p, x in zip(paths, leaves, others, strict=True)
  ]
  return jax.tree.unflatten(structure, results)


def permutation(opt_state: optax.OptState) -> Any:
  """The permutation in an optimizer state: with the initial params, the whole model.

  Args:
    opt_state: the state of any chain that holds one of ``sgperm`` and ``laperm``.

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
    >>> integers = optax_boost.permutation(state)  # with the seed, the whole model
    >>> trained = optax_boost.apply_permutation(init(0), integers)
    >>> bool(jnp.all(trained["kernel"] == optax_boost.permuted_params(state)["kernel"]))
    True
  """
  return find_state(opt_state, "permutation", of_one_run=False).permutation


def apply_permutation(initial: optax.Params, permutation: Any) -> optax.Params:
  """Permutes initial params.

  Args:
    initial: the params that the training started from.
    permutation: from :func:`permutation`; ``optax.MaskedNode()`` leaves a leaf as it is.

  Returns:
    The permuted params, exact.

  Raises:
    ValueError: the permutation is none of these params: another tree, shape or dtype; or an index
      is out of range or occurs twice (checked outside ``jit``).

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> initial = {"bias": jnp.array([0.5, 0.25, 0.125])}
    >>> optax_boost.apply_permutation(initial, {"bias": jnp.array([2, 0, 1])})["bias"].tolist()
    [0.125, 0.5, 0.25]
  """

  def checked(path: str, start: jax.Array, index: Any) -> jax.Array:
    name = _tree.leaf_name(path)
    integers = jnp.issubdtype(jnp.result_type(index), jnp.integer)
    if not integers or jnp.shape(index) != jnp.shape(start):
      raise ValueError(
        f"`apply_permutation` needs integers of the params' shapes; the leaf '{name}' is"
        f" {jnp.result_type(index)} of shape {jnp.shape(index)} for params of shape"
        f" {jnp.shape(start)}. Pass what `permutation` returned for these params."
      )
    check_indices(index, jnp.size(start), "permutation", name)
    return _take(start, index)

  return _mapped(checked, initial, permutation, "apply_permutation")


def permuted_params(opt_state: optax.OptState, params: optax.Params | None = None) -> optax.Params:
  """The params as an exact permutation of the initial ones.

  Args:
    opt_state: the state of any chain that holds one of ``sgperm`` and ``laperm``.
    params: the params to take masked leaves from.

  Returns:
    The params; without `params`, masked leaves are ``optax.MaskedNode()``. Permuted leaves have the
    dtype that the method trained, with `params`, too: under ``master_weights`` that of the masters.

  Raises:
    ValueError: the state holds no permutation, or several; or it is one of other params, or of a
      population (map over it with ``jax.vmap``).

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"bias": jnp.array([0.3, 0.2, 0.1])}
    >>> tx = optax_boost.sgperm(alpha=1.0, method="rank")
    >>> grads = {"bias": jnp.array([1.0, 0.0, -1.0])}
    >>> _, state = tx.update(grads, tx.init(params), params)
    >>> [round(float(x), 1) for x in optax_boost.permuted_params(state)["bias"]]
    [0.1, 0.2, 0.3]
  """
  name = "permuted_params"
  state = find_state(opt_state, name)
  # Copied: a train step that donates its state would take the params with it.
  exact = _arrays.copy_arrays(state.permuted_params)
  return exact if params is None else _mapped(lambda _, p, permuted: permuted, params, exact, name)


def apply_permuted_params(
  params: optax.Params, updates: optax.Updates, opt_state: optax.OptState
) -> optax.Params:
  """Like ``optax.apply_updates``, but makes params exactly a permutation of the initial ones.

  ``optax.apply_updates`` may end one rounding beside a weight: ``p + (q - p)`` is not always ``q``.
  Updates that lead elsewhere are added: those between two synchronizations of ``laperm``, of a
  frozen leaf, and of another optimizer after ``switch_after``.

  Args:
    params: the params before.
    updates: from ``tx.update``.
    opt_state: the new state from ``tx.update``.

  Returns:
    The params after, in the dtypes of `params`.

  Raises:
    ValueError: the state holds no permutation, or several; or it is one of other params, or of a
      population (map over it with ``jax.vmap``).

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"bias": jnp.array([0.3, 0.2, 0.1])}
    >>> tx = optax_boost.sgperm(alpha=1.0, method="rank")
    >>> grads = {"bias": jnp.array([1.0, 0.0, -1.0])}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> new = optax_boost.apply_permuted_params(params, updates, state)
    >>> new["bias"].tolist() == params["bias"][::-1].tolist()
    True
  """
  _base.require_params(params, "apply_permuted_params")
  _tree.check_same_tree(updates, params, "apply_permuted_params")
  find_state(opt_state, "apply_permuted_params")
  return _in_place.add_updates(params, updates, opt_state)
