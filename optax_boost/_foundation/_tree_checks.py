"""Checks of trees: gradients, params, and states."""

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _checks, _paths, _trees, _types


def require_params(params: _types.Tree, method: str) -> None:
  """Raises ValueError if ``update`` is called without params."""
  if params is None:
    raise ValueError(
      f"`{method}` needs the current params; got params=None. Call"
      " `tx.update(grads, state, params)`, or let `optax_boost.make_train_step` do it."
    )


_TAKE_OR_MAP = (
  "Take a member with `jax.tree.map(lambda x: x[i], state)`, or map over them with `jax.vmap`."
)


def require_one_run(count: jax.Array, function: str, advice: str = _TAKE_OR_MAP) -> None:
  """Raises ValueError if a state stacks the states of several runs, as under ``jax.vmap``.

  `count` is a counter in the state, which has axes in such a state. The message names `function`,
  which needs the state of one run, and ends with `advice`.
  """
  if jnp.ndim(count):
    raise ValueError(
      f"`{function}` needs the state of one run; got a population's of shape"
      f" {jnp.shape(count)}. {advice}"
    )


def differentiated_params(params: _types.Params) -> _types.Params:
  """Returns the fast params of a pair of ``optax.lookahead``, and other params unchanged."""
  return params.fast if isinstance(params, optax.LookaheadParams) else params


def refuse_pair(params: _types.Tree, method: str) -> None:
  """Raises ValueError if params are the pair of fast and slow params of ``optax.lookahead``."""
  if isinstance(params, optax.LookaheadParams):
    raise ValueError(
      f"`{method}` needs gradients and params of the same tree structure; got the pair of params of"
      " `optax.lookahead`, around which only `average_params` goes. Put a method that only changes"
      " updates inside: `optax.lookahead(optax.chain(...), ...)`."
    )


def check_same_tree(updates: _types.Tree, params: _types.Tree, method: str) -> None:
  """Raises ValueError unless gradients have the tree structure and the shapes of the params."""
  if not isinstance(updates, optax.LookaheadParams):
    refuse_pair(params, method)
  got: _types.TreeDef = jax.tree.structure(updates)
  want: _types.TreeDef = jax.tree.structure(params)
  if got != want:
    update_paths, param_paths = _paths.leaf_paths(updates), _paths.leaf_paths(params)
    lacking = [path for path in param_paths if path not in update_paths]
    surplus = [path for path in update_paths if path not in param_paths]
    clauses = [f"lack {_checks.shorten(lacking)}"] if lacking else []
    clauses += [f"have {_checks.shorten(surplus)}"] if surplus else []
    differ = " and ".join(clauses) or f"have the containers {got} instead of {want}"
    call = "apply_gradients(tx, grads, state, params)"
    order = f": `{call}`" if method == "apply_gradients" else ""
    raise ValueError(
      f"`{method}` needs gradients and params of the same tree structure; got gradients that"
      f" {differ}. Pass the params that the gradients were taken with respect to{order}."
    )
  pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
  for i, (update, param) in enumerate(pairs):
    if jnp.shape(update) != jnp.shape(param):
      raise ValueError(
        f"`{method}` needs gradients of the params' shapes; got {jnp.shape(update)} for the"
        f" leaf '{_paths.leaf_name(_paths.leaf_paths(updates)[i])}' of shape {jnp.shape(param)}."
      )


def same_shapes(first: _types.Tree, second: _types.Tree) -> bool:
  """Returns whether two trees have the same structure and shapes."""

  def shapes(tree: _types.Tree) -> tuple[_types.TreeDef, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, list(map(jnp.shape, leaves))

  return shapes(first) == shapes(second)


# Advice for a leaf of the params that can't be differentiated: `CLOSE_OVER` if the loss has no
# model state, `KEEP_OUT` if it may have one. `optax.masked` would not help, since the loss is
# differentiated by masked leaves, too.
CLOSE_OVER = "Keep it out of the params: close over it."
KEEP_OUT = (
  "Keep it out of the params: close over it, or keep it in `model_state` (with Flax: in another"
  " collection or type of variable)."
)


def check_floating(tree: _types.Tree, method: str, advice: str | None = None) -> None:
  """Raises TypeError unless all leaves are real floating-point arrays.

  The message about a leaf of another dtype ends with `advice`. None: it advises a mask around
  `method`.
  """
  _check_dtype(tree, method, advice, jnp.floating, "real floating-point")


def check_inexact(tree: _types.Tree, method: str, advice: str | None = None) -> None:
  """Raises TypeError unless all leaves are floating-point arrays, real or complex.

  The message about a leaf of another dtype ends with `advice`, as in :func:`check_floating`.
  """
  _check_dtype(tree, method, advice, jnp.inexact, "floating-point")


def check_gradients(gradients: _types.Updates, params: _types.Params, source: str) -> None:
  """Raises unless `gradients` fit `params`; the message names `source`, which returned them."""
  got: _types.TreeDef = jax.tree.structure(gradients)
  want: _types.TreeDef = jax.tree.structure(params)
  if got == want:
    real_gradients = jax.tree.map(
      lambda g, p: None if jnp.iscomplexobj(p) else g, gradients, params
    )
    check_floating(real_gradients, source, "Give gradients as `jax.grad` does.")
  shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(gradients)]
  if got != want or shapes != [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]:
    raise ValueError(
      f"`{source}` must give gradients of the params' tree structure and shapes; got {got} with"
      f" shapes {shapes} for params {want}. Return the gradients alone, without aux."
    )


def _check_dtype(
  tree: _types.Tree, method: str, advice: str | None, dtype: jax.typing.DTypeLike, required: str
) -> None:
  for i, leaf in enumerate(jax.tree.leaves(tree)):
    # Python floats are refused, as by optax's optimizers: they have no shape, dtype or sharding.
    if not hasattr(leaf, "dtype"):
      described = _describe("params", _paths.leaf_paths(tree)[i], leaf)
      raise TypeError(f"`{method}` needs arrays as leaves; {described}")
    if not jnp.issubdtype(leaf.dtype, dtype):
      name = _paths.leaf_name(_paths.leaf_paths(tree)[i])
      raise TypeError(
        f"`{method}` needs {required} leaves; the leaf '{name}' is {leaf.dtype}. "
        + (advice or f"Leave it out with `optax.masked` or `optax.partition` around `{method}`.")
      )


def check_traceable(name: str, tree: _types.Tree) -> None:
  """Raises TypeError unless each leaf is a number, an array, or a ``jax.ShapeDtypeStruct``."""
  for index, leaf in enumerate(jax.tree.leaves(tree)):
    if isinstance(leaf, jax.Array):
      continue
    try:
      jax.eval_shape(_identity, leaf)
    except (TypeError, ValueError, OverflowError) as error:
      described = _describe(name, _paths.leaf_paths(tree)[index], leaf)
      raise TypeError(
        f"`{name}` must hold arrays, abstract or not, or numbers; {described}"
      ) from error


# A function of the module, since JAX traces each function once for each type of an argument.
def _identity(value: _types.Unchecked) -> _types.Unchecked:
  return value


def refuse_other_variables(params: optax.Params) -> None:
  """Raises TypeError for NNX variables other than params; does not import Flax."""
  for node in _trees.nodes(params):
    bases = [base for base in type(node).__mro__ if base.__module__.startswith("flax.nnx")]
    names = {base.__name__ for base in bases}
    if "Variable" in names and "Param" not in names:
      raise TypeError(
        "`params` must be the arrays that are trained; got an NNX model with a"
        f" {bases[0].__name__}, too. Use `optax_boost.nnx.make_train_step` or"
        " `optax_boost.nnx.split_loss`."
      )


def _describe(name: str, path: str, leaf: _types.Unchecked) -> str:
  """Returns the end of a message about a leaf that is not an array: its type, and what to do."""
  advice = f"Keep it out of `{name}`, as `equinox.filter(model, equinox.is_inexact_array)` does."
  if name == "batch":
    advice = "Leave it out of the batch, or pass its number in place of a text."
  if isinstance(leaf, int | float | complex):
    advice = f"Convert it with `jax.tree.map(jnp.asarray, {name})`."
  got = f"is {_checks.shorten(leaf)} of type {type(leaf).__name__}"
  return f"the leaf '{path or name}' {got}. {advice}"
