"""``apply_gradients``: computes updates and adds them to the params in one call, in place."""

from typing import Any

import optax

from optax_boost._form import _form, _protocol, _state_check
from optax_boost._foundation import _arrays, _checks, _extra_args, _tree_checks, _types
from optax_boost._step import _addition, _nesting, _run


def apply_gradients(
  tx: optax.GradientTransformation,
  grads: optax.Updates,
  opt_state: optax.OptState,
  params: optax.Params,
  **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
  """Makes a step in place: ``tx.update`` and ``optax.apply_updates`` in one call.

  The arithmetic is the same as in ``tx.update``. If `tx` is a wrapper such as :func:`accumulate`,
  :func:`dynamic_loss_scale`, :func:`master_weights`, :func:`stochastic_rounding` or
  :func:`average_params`, or several of these nested directly, a skipped step touches neither params
  nor inner state, and needs no memory for updates. :func:`make_train_step` makes its steps in the
  same way. Call this function under ``jax.jit``, and donate params and state in this order: JAX
  matches donated inputs to outputs by shape, in order. If an input is matched with an output other
  than its own new value, XLA copies the input.

  With :func:`sgperm` and :func:`laperm`, the new params are an exact permutation of earlier params.
  The params that ``optax.apply_updates`` returns may miss the permutation by one rounding.

  Args:
    tx: the transformation, of optax, of this package or your own.
    grads: the gradients, a tree of the params' structure and shapes.
    opt_state: the state of `tx`.
    params: the params.
    **extra_args: extra arguments of ``tx.update``, such as `value`, or the `weight` of
      :func:`accumulate`.

  Returns:
    The new params and the new state.

  Examples:
    >>> import functools, jax, jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.accumulate(optax.sgd(1.0), every=2)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def train(params, opt_state, batch):
    ...   grads = jax.grad(lambda params: jnp.sum(params * batch))(params)
    ...   return optax_boost.apply_gradients(tx, grads, opt_state, params)
    >>> params = jnp.zeros(2)
    >>> opt_state = tx.init(params)
    >>> for batch in (jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0])):
    ...   params, opt_state = train(params, opt_state, batch)
    ...   print(params.tolist())
    [0.0, 0.0]
    [-2.0, -4.0]

  .. note::
    To differentiate through a step in reverse mode, use ``tx.update``.
  """
  # XLA 24: the results are params, then state, to match donated arguments in this order.
  tx = _checks.check_transformation("tx", tx)
  _tree_checks.check_same_tree(grads, _tree_checks.differentiated_params(params), "apply_gradients")
  _state_check.check(tx, opt_state, params)
  _nesting.check(opt_state, tx)
  grads, params = _arrays.as_jax((grads, params))
  return step_in_place(tx, grads, opt_state, params, _extra_args.as_jax_gradients(extra_args))


def step_in_place(
  tx: optax.GradientTransformation,
  grads: optax.Updates,
  opt_state: optax.OptState,
  params: optax.Params,
  extra_args: _types.ExtraArgs,
  added: _addition.Added | None = None,
) -> tuple[optax.Params, optax.OptState]:
  """Makes the step of :func:`apply_gradients`, without its checks and conversions of arguments.

  Returns the new params and the new state. `added` is as for :func:`_run.run`.
  """
  form = _form.form_of(tx.update)
  if form is not None and form.step is not None:
    tx.update.check(grads, opt_state, params)  # type: ignore[attr-defined]
    return _run.run(form.step, grads, opt_state, params, extra_args, in_place=True, added=added)
  updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
  return _protocol.apply_updates(params, updates, opt_state), opt_state
