r"""Gradient accumulation: k micro-steps, one step of the inner optimizer.

With gradients g_1 ... g_k of k micro-batches, and their weights n_i (examples, tokens):

  G = (n_1 g_1 + ... + n_k g_k) / (n_1 + ... + n_k)

  g_i, G   the params' shapes; the sum in `accumulator_dtype`
  n_i      scalars, 1 unless given; a micro-batch that is dropped has n_i = 0

The inner optimizer sees G, once per k. In between the updates are exactly zero.
"""

from collections.abc import Callable
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree


@_protocol.declares(metrics=("accumulate/notfinite_count",))
class AccumulateState(NamedTuple):
  """State of :func:`accumulate`.

  Attributes:
    count: scalar int32, micro-steps in the current window; 0 right after an inner step.
    inner_count: scalar int32, inner steps made.
    weight_sum: scalar float32, the weights in the current window.
    accumulator: tree of the params' structure, the weighted sum of the gradients in the window.
    notfinite_count: scalar int32, micro-batches whose gradient was not finite.
    inner_state: the inner optimizer's state.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  inner_count: jax.Array
  weight_sum: jax.Array
  accumulator: optax.Updates
  notfinite_count: jax.Array
  inner_state: optax.OptState


def accumulate(
  inner: optax.GradientTransformation,
  every: int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike],
  *,
  not_finite: Literal["drop", "keep"] = "drop",
  accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Averages the gradients of `every` micro-steps before one step of `inner`.

  .. math::
    G = \frac{\sum_i n_i g_i}{\sum_i n_i}

  For batches larger than memory. The inner optimizer really runs once per window, under
  ``lax.cond``: its state, weight decay and schedules count inner steps.

  Args:
    inner: the optimizer that sees the mean gradient.
    every: micro-steps per inner step, at least 1; or a function of the number of inner steps made.
      Raising it makes larger batches of the same memory, and fewer steps.
    not_finite: what becomes of a micro-batch whose gradient has a NaN or an infinity. ``"drop"``:
      it is left out of the mean, and a window of nothing else makes no inner step. ``"keep"``: it
      spoils the mean of its own window, for `inner` to see (``optax.apply_if_finite``), and the
      next window starts clean.
    accumulator_dtype: dtype of the sum; None: at least float32.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Its ``update`` takes an optional `weight`,
    the number of examples or tokens behind a micro-batch's mean gradient, so that micro-batches
    of unequal size give the true mean. Of other extra arguments, `inner` sees those of the
    window's last micro-step, and as `grad` the mean gradient. Updates have the gradients' dtype.

  Raises:
    ValueError: `every` is below 1, or `not_finite` unknown.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.accumulate(optax.sgd(1.0), every=2)
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jnp.array([1.0, 2.0]), state, params)
    >>> updates.tolist()
    [0.0, 0.0]
    >>> updates, state = tx.update(jnp.array([3.0, 6.0]), state, params)
    >>> updates.tolist(), int(state.inner_count)
    ([-2.0, -4.0], 1)

  .. note::
    Where all micro-batches of a step are at hand at once, ``optax.microbatching`` sums their
    gradients inside the step, without a buffer between steps. ``optax.MultiSteps`` runs its inner
    optimizer at every micro-step, and a NaN stays in its accumulator.
  """
  if not callable(every):
    _base.check_whole_number("every", every)
  if not_finite not in ("drop", "keep"):
    raise ValueError(f"`not_finite` must be 'drop' or 'keep'; got {not_finite!r}.")
  inner = optax.with_extra_args_support(inner)

  def wide(x: jax.Array) -> Any:
    return accumulator_dtype or _tree.accumulator_dtype(x.dtype)

  def init_fn(params: optax.Params) -> AccumulateState:
    _tree.check_floating(params, "accumulate")
    zero = jnp.zeros([], jnp.int32)
    return AccumulateState(
      count=zero,
      inner_count=jnp.zeros([], jnp.int32),
      weight_sum=jnp.zeros([], jnp.float32),
      accumulator=jax.tree.map(lambda p: jnp.zeros_like(p, wide(p)), params),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner.init(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    *,
    weight: jax.typing.ArrayLike = 1.0,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    _tree.check_same_tree(updates, state.accumulator, "accumulate")
    if jnp.ndim(weight) != 0:
      raise ValueError(
        "`weight` must be a scalar, the number of examples or tokens in the micro-batch; got an"
        f" array of shape {jnp.shape(weight)}."
      )
    weight = jnp.asarray(weight, jnp.float32)
    finite = _tree.all_finite(updates)
    used = jnp.asarray(True) if not_finite == "keep" else finite

    def add(total: jax.Array, g: jax.Array) -> jax.Array:
      return jnp.where(used, total + (weight * g.astype(total.dtype)).astype(total.dtype), total)

    total = jax.tree.map(add, state.accumulator, updates)
    weight_sum = state.weight_sum + jnp.where(used, weight, 0.0)
    length = every(state.inner_count) if callable(every) else every
    full = state.count + 1 >= length

    def step(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      mean = jax.tree.map(
        lambda t, g: (t / weight_sum.astype(t.dtype)).astype(g.dtype), total, updates
      )
      extra = extra_args | ({"grad": mean} if "grad" in extra_args else {})
      out, inner_state = inner.update(mean, inner_state, params, **extra)
      return jax.tree.map(lambda u, g: u.astype(g.dtype), out, updates), inner_state

    def wait(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return jax.tree.map(jnp.zeros_like, updates), inner_state

    stepping = full & (weight_sum > 0)
    out, inner_state = jax.lax.cond(stepping, step, wait, state.inner_state)
    return out, AccumulateState(
      count=jnp.where(full, 0, state.count + 1),
      inner_count=state.inner_count + stepping,
      weight_sum=jnp.where(full, 0.0, weight_sum),
      accumulator=jax.tree.map(lambda t: jnp.where(full, jnp.zeros_like(t), t), total),
      notfinite_count=state.notfinite_count + jnp.logical_not(finite),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
