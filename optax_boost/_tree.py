"""Leaf paths, selecting leaves by pattern, and norms in full precision."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import re
from typing import Any
from typing import NamedTuple
from typing import TypeVar
import warnings

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base

# The projections of Flax's attention layers: (features, heads, head features), of which only the
# first axis is fan-in.
_ATTENTION_INPUT = re.compile(r"(^|/)(query|key|value)/kernel$")


_Plan = TypeVar("_Plan")
_State = TypeVar("_State")


class Leaf(NamedTuple):
  """One leaf of a tree, as the rules of the methods see it.

  Attributes:
    path: the keys joined by ``/``, as in ``block_1/conv/kernel``.
    shape: the leaf's shape.
    stacked: the axes along which layers are stacked, not negative, ascending.
  """

  path: str
  shape: tuple[int, ...]
  stacked: tuple[int, ...]

  @property
  def layer_axes(self) -> tuple[int, ...]:
    """The axes of one layer: all but the stacked ones."""
    return tuple(axis for axis in range(len(self.shape)) if axis not in self.stacked)

  @property
  def layer_shape(self) -> tuple[int, ...]:
    """The shape of one layer."""
    return tuple(self.shape[axis] for axis in self.layer_axes)

  @property
  def stacked_shape(self) -> tuple[int, ...]:
    """The sizes of the stacked axes, ``()`` for a leaf that is one layer."""
    return tuple(self.shape[axis] for axis in self.stacked)

  @property
  def layers(self) -> int:
    """How many layers the leaf holds."""
    return math.prod(self.stacked_shape)


def path_string(key_path: Sequence[Any]) -> str:
  """Joins a JAX key path with ``/``.

  A trailing ``.value`` is dropped: it is the inside of a Flax NNX variable, and a rule for
  ``conv/kernel`` must not depend on whether the tree holds variables or arrays.

  Args:
    key_path: a key path of ``jax.tree_util``.

  Returns:
    The path, ``""`` for a tree that is a single leaf.
  """
  keys = list(key_path)
  last = keys[-1] if keys else None
  if isinstance(last, jax.tree_util.GetAttrKey) and last.name in ("value", "raw_value"):
    keys.pop()
  return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def leaf_name(path: str) -> str:
  """A leaf's path for a message; the only leaf of a bare array is called "params"."""
  return path or "params"


def leaf_paths(tree: Any) -> list[str]:
  """The path of every leaf, in the order of ``jax.tree.leaves``.

  Args:
    tree: any tree; ``None`` and ``optax.MaskedNode`` are no leaves.

  Returns:
    The paths.
  """
  return [path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def describe(tree: Any, stacked_axes: _base.AxesByPattern | None = None) -> list[Leaf]:
  """Describes every leaf, in the order of ``jax.tree.leaves``.

  Args:
    tree: a tree of arrays or abstract values.
    stacked_axes: by pattern, the axes along which the leaves of several layers are stacked.

  Returns:
    One :class:`Leaf` each.

  Raises:
    ValueError: a leaf lacks an axis that a pattern names.
  """
  paths = leaf_paths(tree)
  shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
  axes = axes_by_pattern(paths, shapes, stacked_axes, "stacked_axes")
  return [Leaf(*leaf) for leaf in zip(paths, shapes, (a or () for a in axes), strict=True)]


def fan_in_axes(leaf: Leaf, layout: str) -> tuple[int, ...]:
  """The axes of a leaf over which one output's incoming weights run.

  Args:
    leaf: the leaf.
    layout: ``"flax"`` (output axis last) or ``"torch"`` (output axis first).

  Returns:
    The axes; stacked axes are not among them.
  """
  axes = leaf.layer_axes
  if layout == "torch":
    return axes[1:]
  if len(axes) == 3 and _ATTENTION_INPUT.search(leaf.path):
    return axes[:1]
  return axes[:-1]


def axes_by_pattern(
  paths: Sequence[str],
  shapes: Sequence[tuple[int, ...]],
  patterns: _base.AxesByPattern | None,
  argument: str,
) -> list[tuple[int, ...] | None]:
  """Looks up the axes of each leaf.

  Args:
    paths: the leaves' paths.
    shapes: the leaves' shapes.
    patterns: axes by regular expression, searched in the path; the first that matches counts.
    argument: the argument's name, for messages.

  Returns:
    For each leaf its axes, not negative and ascending, or None where no pattern matches.

  Raises:
    ValueError: a leaf lacks an axis that a pattern names.
  """
  if patterns is None:
    return [None] * len(paths)
  check_axes_by_pattern(argument, patterns)
  axes_of_leaves: list[tuple[int, ...] | None] = []
  keys = list(patterns)
  for path, shape, index in zip(paths, shapes, first_match(argument, keys, paths), strict=True):
    if index is None:
      axes_of_leaves.append(None)
      continue
    axes = _as_axes(patterns[keys[index]])
    if any(not -len(shape) <= axis < len(shape) for axis in axes):
      raise ValueError(
        f"`{argument}` names the axes {axes} for {keys[index]!r}, but the leaf"
        f" '{leaf_name(path)}' has shape {shape}. Narrow the pattern, or name axes that the leaf"
        " has."
      )
    axes_of_leaves.append(tuple(sorted({axis % len(shape) for axis in axes})))
  return axes_of_leaves


def check_axes_by_pattern(argument: str, patterns: _base.AxesByPattern | None) -> None:
  """Checks an argument that maps regular expressions to axes, or is None.

  Raises:
    TypeError: it is no such mapping.
    ValueError: a regular expression does not compile.
  """
  if patterns is None:
    return
  if not isinstance(patterns, Mapping):
    raise TypeError(
      f"`{argument}` must map regular expressions to axes, as in {{'layers/': 0}}; got"
      f" {_base.shorten(patterns)}."
    )
  for pattern, axes in patterns.items():
    _base.compile_pattern(argument, pattern)
    if not all(isinstance(a, int) and not isinstance(a, bool) for a in _as_axes(axes)):
      raise TypeError(
        f"`{argument}` must name axes by integers; got {_base.shorten(axes)} for {pattern!r}."
      )


def _as_axes(axes: Any) -> tuple[Any, ...]:
  return tuple(axes) if isinstance(axes, list | tuple) else (axes,)


def first_match(argument: str, patterns: Sequence[str], paths: Sequence[str]) -> list[int | None]:
  """For each path, the number of the first pattern that is found in it.

  Args:
    argument: the argument's name, for messages.
    patterns: regular expressions. One that is found in no path at all is warned of.
    paths: paths of leaves.

  Returns:
    A number per path, None where no pattern is found.

  Raises:
    TypeError: a pattern is no string.
    ValueError: a pattern does not compile.
  """
  compiled = [_base.compile_pattern(argument, pattern) for pattern in patterns]
  idle = [p.pattern for p in compiled if not any(p.search(path) for path in paths)]
  if idle and paths:
    warn_no_effect(f"`{argument}` has patterns that match no leaf: {idle}.", paths)
  return [next((i for i, p in enumerate(compiled) if p.search(path)), None) for path in paths]


def select(
  tree: Any,
  selector: _base.LeafSelector,
  argument: str,
  auto: Callable[[list[Leaf]], list[bool]] | None = None,
  stacked_axes: _base.AxesByPattern | None = None,
) -> list[bool]:
  """Says of each leaf whether a selector selects it.

  Args:
    tree: the params or the gradients.
    selector: regular expressions (searched in the leaves' paths), a tree of bools or a prefix of
      one, a callable from `tree` to such a tree, ``"auto"``, or None.
    argument: the argument's name, for messages.
    auto: the method's own rule, meant by ``"auto"``.
    stacked_axes: passed on to the rule.

  Returns:
    A bool per leaf, in the order of ``jax.tree.leaves``.

  Raises:
    TypeError: `selector` is none of these.
    ValueError: the tree of bools does not fit `tree`.
  """
  paths = leaf_paths(tree)
  if selector is None:
    return [False] * len(paths)
  if selector == "auto" and auto is not None:
    return auto(describe(tree, stacked_axes))
  patterns = (selector,) if isinstance(selector, str) else selector
  if isinstance(patterns, list | tuple) and all(isinstance(p, str) for p in patterns):
    return [index is not None for index in first_match(argument, patterns, paths)]
  if isinstance(selector, bool) and not jax.tree_util.all_leaves([tree]):
    # What is left of a callable that `inject_hyperparams` called as a schedule.
    raise _not_a_selector(argument, selector)
  mask = selector(tree) if callable(selector) else selector
  return _broadcast_mask(mask, tree, argument)


def _not_a_selector(argument: str, got: Any) -> TypeError:
  return TypeError(
    f"`{argument}` must be regular expressions, a tree of bools, a callable that returns one, or"
    f" None; got {_base.shorten(got)}. Under `optax.inject_hyperparams` a callable must be named in"
    " `static_args`, or it is taken for a schedule."
  )


def _broadcast_mask(mask: Any, tree: Any, argument: str) -> list[bool]:
  flags = jax.tree.leaves(mask)
  if not all(isinstance(flag, bool) for flag in flags):
    raise _not_a_selector(argument, mask)
  try:
    full = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), mask, tree)
  except ValueError as error:
    raise ValueError(
      f"`{argument}` must be a tree of bools with the structure of the params, or a prefix of"
      f" it; got {jax.tree.structure(mask)} for params {jax.tree.structure(tree)}."
    ) from error
  return jax.tree.leaves(full)


def check_selector(argument: str, selector: _base.LeafSelector) -> None:
  """Checks an argument that selects leaves, as far as that is possible without the tree.

  Raises:
    TypeError: it is a number, or a sequence of anything but regular expressions.
    ValueError: a regular expression does not compile.
  """
  if selector is None or selector == "auto" or callable(selector):
    return
  if isinstance(selector, str):
    _base.compile_pattern(argument, selector)
  elif isinstance(selector, list | tuple) and any(isinstance(p, str) for p in selector):
    for pattern in selector:
      _base.compile_pattern(argument, pattern)
  elif not all(isinstance(flag, bool) for flag in jax.tree.leaves(selector)):
    raise _not_a_selector(argument, selector)


def once_per_tree(plan: Callable[[Any], _Plan]) -> Callable[[Any], _Plan]:
  """Makes a function of a tree's paths and shapes run once for each; it warns only then.

  ``init`` and every trace of ``update`` need the same plan.
  """
  plans: dict[Any, _Plan] = {}

  def cached(tree: Any) -> _Plan:
    leaves, structure = jax.tree.flatten(tree)
    key = (structure, tuple(jnp.shape(leaf) for leaf in leaves))
    if key not in plans:
      if len(plans) >= 64:
        plans.clear()
      plans[key] = plan(tree)
    return plans[key]

  return cached


def increment_if(flag: jax.Array, count: jax.Array) -> jax.Array:
  """A counter after one more event, if there was one; it saturates."""
  return jnp.where(flag, optax.safe_increment(count), count)


def find_states(opt_state: Any, state_type: type[_State]) -> list[_State]:
  """All states of a type in an optimizer state, wherever they stand in it."""

  def matches(node: Any) -> bool:
    return isinstance(node, state_type)

  return [node for node in jax.tree.leaves(opt_state, is_leaf=matches) if matches(node)]


def path_mask(*patterns: str) -> Callable[[Any], Any]:
  """A mask for ``optax.masked`` that selects leaves by their path.

  Args:
    *patterns: regular expressions, searched in the leaves' paths (keys joined by ``/``).

  Returns:
    A function from params to a tree of bools of the same structure: True where a pattern is
    found. It raises :class:`NoEffectWarning` where a pattern matches nothing.

  Raises:
    TypeError: a pattern is no string.
    ValueError: a pattern is no regular expression.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"conv": {"kernel": jnp.ones((3, 3, 1, 8)), "bias": jnp.ones(8)}}
    >>> kernels = optax_boost.path_mask("kernel$")
    >>> kernels(params)
    {'conv': {'bias': False, 'kernel': True}}
    >>> decay = optax.masked(optax.add_decayed_weights(1e-4), kernels)
  """
  for pattern in patterns:
    _base.compile_pattern("patterns", pattern)

  def mask(params: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(params), select(params, patterns, "patterns"))

  return mask


def warn_no_effect(message: str, paths: Sequence[str]) -> None:
  """Issues a :class:`NoEffectWarning` that shows what there was to match.

  Args:
    message: what had no effect.
    paths: the paths that the tree has.
  """
  shown = ", ".join(map(leaf_name, paths[:6])) + (", ..." if len(paths) > 6 else "")
  warnings.warn(f"{message} The leaves are: {shown}.", _base.NoEffectWarning, stacklevel=3)


def check_same_tree(updates: Any, params: Any, method: str) -> None:
  """Refuses gradients that do not fit the params.

  Args:
    updates: the gradients.
    params: the params.
    method: the method's name, for the message.

  Raises:
    ValueError: structure or shapes differ.
  """
  got: Any = jax.tree.structure(updates)
  want: Any = jax.tree.structure(params)
  if got != want:
    raise ValueError(
      f"`{method}` needs gradients and params of the same tree structure; got gradients"
      f" {got} for params {want}. Pass the params that the gradients were taken with respect to."
    )
  shapes = zip(leaf_paths(updates), jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
  for path, update, param in shapes:
    if jnp.shape(update) != jnp.shape(param):
      raise ValueError(
        f"`{method}` needs gradients of the params' shapes; got {jnp.shape(update)} for the"
        f" leaf '{leaf_name(path)}' of shape {jnp.shape(param)}."
      )


def check_floating(tree: Any, method: str) -> None:
  """Refuses leaves that are not real floating-point numbers.

  Args:
    tree: params or gradients.
    method: the method's name, for the message.

  Raises:
    TypeError: a leaf is of another kind.
  """
  _check_dtype(tree, method, jnp.floating, "real floating-point")


def check_inexact(tree: Any, method: str) -> None:
  """Refuses leaves that are neither real nor complex floating-point numbers.

  Args:
    tree: params or gradients.
    method: the method's name, for the message.

  Raises:
    TypeError: a leaf is of another kind.
  """
  _check_dtype(tree, method, jnp.inexact, "floating-point")


def _check_dtype(tree: Any, method: str, kind: Any, required: str) -> None:
  for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
    # A Python float has no shape, dtype or sharding, and optax's optimizers refuse it, too.
    if not hasattr(leaf, "dtype"):
      raise TypeError(
        f"`{method}` needs arrays as leaves; the leaf '{leaf_name(path)}' is {_base.shorten(leaf)}"
        f" of type {type(leaf).__name__}. Convert them with `jax.tree.map(jnp.asarray, params)`."
      )
    if not jnp.issubdtype(leaf.dtype, kind):
      raise TypeError(
        f"`{method}` needs {required} leaves; the leaf '{leaf_name(path)}' is"
        f" {leaf.dtype}. Leave it out with `optax.masked` or `optax.partition`."
      )


def check_traceable(name: str, tree: Any) -> None:
  """Refuses leaves that can't be traced.

  Args:
    name: the argument's name, for the message.
    tree: the argument.

  Raises:
    TypeError: a leaf is neither an array, abstract or not, nor a number.
  """
  for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
    try:
      jax.eval_shape(lambda value: value, leaf)
    except (TypeError, ValueError, OverflowError) as error:
      raise TypeError(
        f"`{name}` must hold arrays, abstract or not, or numbers; the leaf '{leaf_name(path)}' is"
        f" {_base.shorten(leaf)} of type {type(leaf).__name__}."
      ) from error


def is_masked(value: Any) -> bool:
  """Whether a value stands for leaves that ``optax.masked`` or ``optax.partition`` hid."""
  return isinstance(value, optax.MaskedNode)


def mask_like(tree: Any, masked: Any) -> Any:
  """Hides from a tree the leaves that are hidden in another.

  optax masks params, state and `updates`, but hands extra arguments on as they are.

  Args:
    tree: a tree, `masked` as it was before it was masked; or one masked already.
    masked: a tree in which ``optax.MaskedNode`` stands for some leaves or subtrees.

  Returns:
    `tree`, with ``optax.MaskedNode`` where `masked` has it.
  """
  return jax.tree.map(lambda m, t: m if is_masked(m) else t, masked, tree, is_leaf=is_masked)


def fill_masked(tree: Any, full: Any) -> Any:
  """Puts the leaves of another tree where ``optax.MaskedNode`` hides them.

  Args:
    tree: a tree, some of whose leaves or subtrees may be hidden.
    full: a tree with all leaves.

  Returns:
    `tree` with the hidden leaves of `full`.
  """
  return jax.tree.map(lambda t, f: f if is_masked(t) else t, tree, full, is_leaf=is_masked)


def as_value_fn(function: Callable[[Any], Any]) -> Callable[..., Any]:
  """Makes of a function of params a `value_fn` that optax's line searches can call.

  They refuse extra arguments that are neither their own nor named by `value_fn`.

  Args:
    function: from params to the loss.

  Returns:
    The same function, which swallows the other closures that the train step hands out.
  """

  def value_fn(
    params: Any, grad_fn: Any = None, full_grad_fn: Any = None, obj_fn: Any = None
  ) -> Any:
    del grad_fn, full_grad_fn, obj_fn
    return function(params)

  return value_fn


def map_gradients(
  function: Callable[[Any], Any], updates: Any, extra_args: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
  """Applies a function to all gradients that reach ``update``, as `updates` and as extra arguments.

  Args:
    function: from a tree of gradients, masked as `updates` are, to another.
    updates: the gradients.
    extra_args: the extra arguments, of which `grad` is a tree of gradients and `grad_fn` a function
      that returns one.

  Returns:
    The new `updates` and extra arguments.
  """
  extra = dict(extra_args)
  if extra.get("grad") is not None:
    extra["grad"] = function(mask_like(extra["grad"], updates))
  if extra.get("grad_fn") is not None:
    grad_fn = extra["grad_fn"]
    extra["grad_fn"] = lambda *args, **kwargs: function(
      mask_like(grad_fn(*args, **kwargs), updates)
    )
  return function(updates), extra


def copy_arrays(tree: Any, dtype_of: Callable[[Any], Any] = lambda dtype: dtype) -> Any:
  """Copies arrays into buffers of their own, so that params and state can both be donated.

  Args:
    tree: params. Leaves may be ``jax.ShapeDtypeStruct``, as optax's ``init`` allows. Their copies
      are, too: zeros in place of values would train from zero without an error.
    dtype_of: from a leaf's dtype to its copy's, such as :func:`accumulator_dtype`.

  Returns:
    The copies, sharded like the leaves.
  """

  def copy(leaf: Any) -> Any:
    dtype = dtype_of(leaf.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf.update(dtype=dtype)
    # Given its own dtype, a weakly typed leaf would lose its weak type.
    return jnp.array(leaf) if dtype == leaf.dtype else jnp.array(leaf, dtype)

  return jax.tree.map(copy, tree)


def accumulator_dtype(dtype: Any) -> Any:
  """The dtype for reductions over values of `dtype`: at least float32.

  Args:
    dtype: a floating dtype.

  Returns:
    float32, or float64 for float64.
  """
  return jnp.promote_types(dtype, jnp.float32)


def sum_squares(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
  """Sum of squares over `axes` (None: all), squared and summed in at least float32.

  Args:
    x: an array of any floating dtype.
    axes: the axes to sum over.

  Returns:
    The sums, in :func:`accumulator_dtype`.
  """
  wide = x.astype(accumulator_dtype(x.dtype))
  return jnp.sum(wide * wide, axis=axes)


def keep_dims(x: jax.Array, leaf: Leaf) -> jax.Array:
  """Gives per-layer values of a leaf the leaf's rank, so that they broadcast against it.

  Args:
    x: an array of the sizes of ``leaf.stacked``.
    leaf: the leaf.

  Returns:
    `x` with axes of length 1 inserted at ``leaf.layer_axes``.
  """
  return jnp.expand_dims(x, leaf.layer_axes)


def all_finite(tree: Any) -> jax.Array:
  """Whether every entry of every leaf is finite.

  Args:
    tree: a tree of floating-point arrays.

  Returns:
    A scalar bool.
  """
  leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  if not leaves:
    return jnp.asarray(True)
  bad = jnp.logical_not(jnp.stack(leaves)).astype(jnp.float32)
  # A product, as XLA would fuse `jnp.all` over the leaves into each loop that selects by it: the
  # program, and the time to compile it, would grow with the square of the number of leaves.
  return jnp.dot(bad, bad) == 0
