"""``full_gradient``: the mean gradient over all of the data, in one pass over its batches."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import math
import numbers
import types
from typing import Any, TypeAlias
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _arrays, _checks, _progress, _tree_checks, _types

_METHOD = "full_gradient"
# The sum of weighted gradients, and the sum of weights.
_Sums: TypeAlias = tuple[_types.Updates, jax.Array]


def full_gradient(
  grad_fn: _types.Closure,
  params: optax.Params,
  batches: Any,
  *,
  stacked: bool = False,
  rng: jax.Array | None = None,
  weight_fn: _types.WeightFn | None = None,
  progress: bool = False,
) -> optax.Updates:
  r"""Computes the mean gradient over all of the data.

  .. math::
    \mu = \frac{\sum_b n_b \, \nabla f_b(s)}{\sum_b n_b}

  for the params :math:`s`, and batches :math:`b` of :math:`n_b` examples with the loss :math:`f_b`.
  A smaller last batch counts less. If a batch is *padded*, its loss must be the mean over the real
  examples, and `weight_fn` must return the number of the real examples.

  Args:
    grad_fn: ``grad_fn(params, batch) -> grads``, the gradient of the mean loss over the batch, as
      ``jax.grad(loss_fn)``. It is jitted. As with ``jax.jit``, another function object is compiled
      again, but redefining a function that `grad_fn` calls has no effect. ``jax.grad`` returns
      conjugated gradients for complex leaves: conjugate them, as the train step does.
    params: the params at which the gradient is computed.
    batches: any iterable of trees whose leaves are arrays or can be made into NumPy arrays (a
      PyTorch loader, Grain, a generator). Two batches are in memory at a time, since the next batch
      is loaded during the computation.
    stacked: whether `batches` is instead one tree of arrays of shapes ``(batches, examples, ...)``.
      A ``lax.scan`` runs over the batches, also under ``jit`` and sharded, as in
      ``make_train_step(..., full_grad_fn=functools.partial(full_gradient, batches=data,
      stacked=True))``. On CPUs gradients of convolutions are slow inside a scan.
    rng: a key, for losses with dropout; ``grad_fn(params, batch, key)`` then gets a different key
      for each batch.
    weight_fn: a function from a batch to the number of its real examples. A batch of weight 0 is
      left out. None: the number is the length of the leaves' first axis.
    progress: whether to show a progress bar, if ``tqdm`` is installed.

  Returns:
    A tree like `params`, in float32 (float64 for float64 leaves), for :func:`refresh_svrg`. If
    `stacked`, and the weights of all batches are 0, the tree is NaN.

  Raises:
    ValueError: there is no batch, or the weights of all batches are 0; batches have different tree
      structures, or gradients other structures than the params; the leaves of a batch have
      different lengths, and there is no `weight_fn`.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost
    >>> gradient = jax.grad(lambda w, batch: jnp.mean((w - batch) ** 2) / 2)
    >>> batches = [jnp.array([1.0, 2.0, 3.0]), jnp.array([6.0])]
    >>> float(optax_boost.full_gradient(gradient, jnp.zeros([]), batches))
    -3.0
  """
  _checks.check_callable("grad_fn", grad_fn, "grad_fn(params, batch)")
  _checks.check_callable("weight_fn", weight_fn, "weight_fn(batch)", optional=True, takes=1)
  _checks.check_bool("stacked", stacked)
  _tree_checks.check_inexact(params, _METHOD, _tree_checks.CLOSE_OVER)
  # A raw key of `jax.random.PRNGKey` is passed to `grad_fn` unchanged.
  raw = getattr(rng, "dtype", None) == jnp.uint32 and getattr(rng, "ndim", 0) == 1
  rng = rng if rng is None or raw else _checks.as_key("rng", rng)
  if stacked:
    return _scan(grad_fn, params, batches, rng, weight_fn)
  if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
    raise ValueError(
      "`full_gradient` streams batches on the host and can't run inside `jit`. Call it between two"
      " steps, or pass `stacked=True` and all batches as one tree of arrays."
    )
  return mean_over_batches(
    grad_fn, params, batches, rng, weight_fn, progress, _METHOD, "full gradient"
  )


def check_batches(name: str, batches: _types.Unchecked) -> None:
  """Raises TypeError unless an argument is an iterable of batches; a single batch is refused."""
  iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
  if not iterable or isinstance(batches, Mapping | str | bytes | type):
    raise TypeError(
      f"`{name}` must be an iterable of batches; got {_checks.shorten(batches)}. A single batch is"
      " passed as `[batch]`."
    )
  if isinstance(batches, jax.Array | np.ndarray):
    raise TypeError(
      f"`{name}` must be an iterable of batches; got an array of shape {batches.shape}, whose rows"
      " would be the batches. A single batch is passed as `[batch]`, a stack of batches as"
      " `list(stack)`."
    )


def mean_over_batches(
  function: _types.Closure,
  params: _types.Params,
  batches: Iterable[_types.Batch],
  rng: jax.Array | None,
  weight_fn: _types.WeightFn | None,
  progress: bool,
  method: str,
  shown_as: str,
  on_batch: Callable[[_types.Batch], None] = lambda batch: None,
  owner: Callable[..., Any] | None = None,
) -> _types.Updates:
  """Computes the mean of ``function(params, batch)`` over batches, weighted by numbers of examples.

  `function` returns a tree like `params`, and so does :func:`mean_over_batches`. The arguments
  `rng`, `weight_fn` and `progress` are as in :func:`full_gradient`. Error messages name
  `method`, and the progress bar shows `shown_as`. `on_batch` is called with the arrays of each
  batch. Compiled programs are freed with `owner`, a function of the user (None: `function`), to
  which `function` may then refer only by :class:`WeakFunction`.
  """
  check_batches("batches", batches)
  # The arrays that a `Partial` binds are arguments of the jitted function, not constants. So a
  # Partial of the same function with other arrays is not compiled again.
  called: Any = function
  arguments: tuple[Any, dict[str, Any]] = (), {}
  if isinstance(function, jax.tree_util.Partial):
    called, arguments = function.func, (function.args, function.keywords)
  if owner is None:
    owner, called = called, WeakFunction.of(called)
  add = _jitted_add(owner)
  bound = jax.tree_util.Partial(called, *arguments[0], **arguments[1])
  carry, structure = (_arrays.zeros_like_wide(params), jnp.zeros([])), None
  shown = _progress.with_progress(batches, progress, shown_as, "batch")
  # XLA 22: a Python loop, not a scan, since gradients of convolutions are slow in a scan on CPUs.
  for index, batch in enumerate(shown):
    arrays = jax.tree_util.tree_map_with_path(functools.partial(_as_array, index), batch)
    if structure is None:
      structure = jax.tree.structure(arrays)
    elif jax.tree.structure(arrays) != structure:
      raise ValueError(
        f"`{method}` needs batches of one tree structure; batch {index} has"
        f" {jax.tree.structure(arrays)}, the first had {structure}."
      )
    # Wait until the device has finished the previous batch, or a loader that is faster than the
    # device would fill the memory with batches.
    jax.block_until_ready(carry[1])
    weight = _weight(arrays, weight_fn, index, method)
    on_batch(arrays)
    carry = add(carry, bound, params, arrays, weight, rng, index)
  if structure is None:
    raise ValueError(
      f"`{method}` needs at least one batch; got none. An iterator that was used up by a"
      " previous pass is empty: pass a new one each time."
    )
  if not carry[1] > 0:
    raise ValueError(
      f"`{method}` needs batches with examples; the weights of all batches sum to {carry[1]}."
    )
  return _mean(carry)


def _scan(
  grad_fn: _types.Closure,
  params: _types.Params,
  batches: _types.Batch,
  rng: jax.Array | None,
  weight_fn: _types.WeightFn | None,
) -> _types.Updates:
  """Computes the mean gradient over batches that are stacked along the first axis."""
  shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batches)]
  lengths = {shape[:1] for shape in shapes}
  if len(lengths) != 1 or not all(n and n[0] for n in lengths):
    raise ValueError(
      "`full_gradient(stacked=True)` needs at least one batch, and arrays whose first axis runs"
      f" over the batches; got shapes {shapes}."
    )
  ((length,),) = lengths

  def body(carry: _Sums, xs: tuple[jax.Array, _types.Batch]) -> tuple[_Sums, None]:
    index, batch = xs
    weight = 1.0 if weight_fn is None else _check_weight(weight_fn(batch))
    return _add(carry, grad_fn, params, batch, weight, rng, index), None

  start = (_arrays.zeros_like_wide(params), jnp.zeros([]))
  carry, _ = jax.lax.scan(body, start, (jnp.arange(length), batches))
  return _mean(carry)


def _mean(carry: _Sums) -> _types.Updates:
  total, weights = carry
  return jax.tree.map(lambda t: t / weights.astype(t.dtype), total)


def _add(
  carry: _Sums,
  grad_fn: _types.Closure,
  params: _types.Params,
  batch: _types.Batch,
  weight: jax.typing.ArrayLike,
  rng: jax.Array | None,
  index: jax.typing.ArrayLike,
) -> _Sums:
  """Adds a batch to the sums of weighted gradients and of weights; returns the new sums.

  `index` is the number of the batch. The key `rng` is folded with this number, so that `grad_fn`
  gets a different key for each batch.
  """
  total, weights = carry
  weight = jnp.asarray(weight, weights.dtype)
  # A negative weight makes the full gradient NaN, which `refresh_svrg` skips and counts.
  weight = jnp.where(weight >= 0, weight, jnp.nan)
  key = () if rng is None else (jax.random.fold_in(rng, index),)
  gradients = grad_fn(params, batch, *key)
  _tree_checks.check_gradients(gradients, params, "grad_fn")

  def add(t: jax.Array, g: jax.Array) -> jax.Array:
    # `where`, not a product, since the gradient of an empty batch may be NaN, and 0 * NaN is NaN.
    return jnp.where(weight == 0, t, t + weight.astype(t.dtype) * g.astype(t.dtype))

  return jax.tree.map(add, total, gradients), weights + weight


@dataclasses.dataclass(frozen=True)
class WeakFunction:
  """A function to which this object refers weakly; equal for equal functions.

  Compiled programs are cached by objects like this, so that no cache keeps alive a user's function,
  nor the arrays over which it closes.
  """

  reference: Callable[[], Callable[..., Any] | None]

  @classmethod
  def of(cls, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `WeakFunction`; `function` itself if there can be no weak references to it."""
    is_method = isinstance(function, types.MethodType)
    try:
      return cls((weakref.WeakMethod if is_method else weakref.ref)(function))
    except TypeError:
      return function

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    function = self.reference()
    assert function is not None  # it is called only while the caller holds the function
    return function(*args, **kwargs)


# A jitted `_add` for each owner of programs.
_JITTED = weakref.WeakKeyDictionary[Any, Callable[..., Any]]()


def _jitted_add(owner: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a jitted :func:`_add`, whose compiled programs are freed with `owner`."""
  jitted = jax.jit(lambda *args: _add(*args), donate_argnums=0)
  try:
    return _JITTED.setdefault(getattr(owner, "__self__", owner), jitted)
  except TypeError:  # `owner` has no hash, or there can be no weak references to it
    return jitted


def _weight(
  batch: _types.Batch, weight_fn: _types.WeightFn | None, index: int, method: str
) -> float:
  """Returns the number of examples in a batch, by `weight_fn` or by the shapes of the leaves."""
  if weight_fn is not None:
    weight = float(_check_weight(weight_fn(batch)))
    if not 0 <= weight < math.inf:
      raise ValueError(
        f"`weight_fn` must return a finite number >= 0; it returned {weight:g} for batch {index}."
      )
    return weight
  shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
  lengths = {shape[:1] for shape in shapes}
  if len(lengths) != 1 or () in lengths:
    raise ValueError(
      f"`{method}` can't tell the number of examples from arrays of shapes {shapes}, whose"
      " first axes differ. Pass `weight_fn`, a function from a batch to that number."
    )
  return float(lengths.pop()[0])


def _check_weight(weight: Any) -> _types.FloatScalar:
  """Returns the result of `weight_fn`; raises TypeError unless it is a real number."""
  array = _checks.is_any_array(weight)
  real = isinstance(weight, numbers.Real) or (array and jnp.isrealobj(weight))
  if not real or jnp.shape(weight) != ():
    got = f"an array of shape {jnp.shape(weight)}" if array else _checks.shorten(weight)
    raise TypeError(
      f"`weight_fn` must return a number, how many real examples the batch has; it returned {got}."
    )
  return weight


def _as_array(index: int, path: _types.KeyPath, leaf: Any) -> _types.Leaf:
  """Returns a leaf as a NumPy array, or unchanged if it is a JAX or NumPy array or a number.

  Raises TypeError if the leaf is not numeric; the message names the batch's `index` and the path.
  """
  if isinstance(leaf, jax.Array):
    return leaf
  array = leaf if isinstance(leaf, np.ndarray | np.generic | numbers.Number) else np.asarray(leaf)
  dtype = np.asarray(array).dtype
  if dtype.kind in "OSUMm":
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    raise TypeError(
      f"`batches` must hold trees of numbers; the leaf '{name or 'batch'}' of batch {index} is"
      f" {_checks.shorten(leaf)} of dtype {dtype}. Leave it out of the batches."
    )
  return array
