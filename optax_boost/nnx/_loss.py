"""The loss of an NNX model as a pure function ``loss(params, model_state, batch, rng)``."""

from typing import Any

from flax import nnx
import jax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _paths, _tree_checks, _types
from optax_boost._trace import _layer_axes, _losses
from optax_boost.nnx import _batch, _model

# Seeds the masks of a full pass. They differ from pass to pass all the same: the key only moves the
# model's own rng streams.
PASS_SEED = 0


def split_loss(
  loss_fn: _types.LossFn, model: nnx.Module, *, wrt: Any = nnx.Param
) -> tuple[_types.LossFn, Any, Any]:
  """Makes the loss of a model pure: the form that the package's functions take.

  :func:`optax_boost.make_train_step`, :func:`optax_boost.layer_groups`,
  :func:`optax_boost.layer_axes` and :func:`optax_boost.race` know such a loss. Its train step takes
  the model apart once, so it needs a part of the host's time of :func:`make_train_step`.

  Args:
    loss_fn: ``loss_fn(model, batch)``. Any function of a model: an evaluation, too.
    model: the model; it is not changed.
    wrt: the filter of the trained variables, as in ``nnx.Optimizer``.

  Returns:
    ``(loss, params, model_state)``, with ``loss(params, model_state, batch)`` returning the output
    of `loss_fn` and the new `model_state`, a dict with all variables that are not trained. It takes
    the variables of any model of the same structure. Dropout draws from the model's own streams; a
    key as a fourth argument moves them.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: when traced: the forward pass creates, removes or reshapes variables.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax, optax_boost.nnx
    >>> model, x = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), jnp.eye(3)
    >>> loss, params, model_state = optax_boost.nnx.split_loss(
    ...   lambda model, x: jnp.mean((model(x) - 1) ** 2), model
    ... )
    >>> print(optax_boost.layer_axes(loss, params, model_state, x))
    bias: outputs (0,)
    kernel: fan-in (0,), outputs (1,)
    >>> step = optax_boost.make_train_step(loss, optax.lbfgs())
    >>> state = step.init(params, model_state)
    >>> for _ in range(8):
    ...   state, metrics = step(state, x)
    >>> nnx.update(model, state.params, *state.model_state.values())
    >>> bool(jnp.allclose(model(x), 1, atol=1e-2))
    True
  """
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  _model.check(model)
  graphdef, params, model_state = _model.split(wrt, model)
  return pure_loss(loss_fn, graphdef, wrt, may_change=False), params, model_state


def pure_loss(
  loss_fn: _types.LossFn,
  graphdef: nnx.GraphDef,
  wrt: Any,
  *,
  has_key: bool = False,
  may_change: bool = True,
) -> _types.LossFn:
  """From ``loss_fn(model, batch[, rng])`` to the pure loss that returns the new state, too.

  If the forward pass changes the structure, the state holds it for :func:`_model.write`; unless
  it `may_change`, new and removed arrays are refused, and new static attributes dropped.
  """

  # `race` passes a key to losses with a parameter of that name; models have streams of their own.
  def loss(
    params: _types.Params, model_state: _model.Collections, batch: _types.Batch, *keys: jax.Array
  ) -> Any:
    moves_streams = bool(keys) and not isinstance(batch, _batch.KeyedBatch)
    batch = _batch.close(batch.batch if isinstance(batch, _batch.KeyedBatch) else batch)

    # Each call makes a new model. What the forward pass changes in it (statistics, rng counts) is
    # read off after the call; the changes of a trial point are dropped with its model.
    def forward(batch: _types.Batch) -> Any:
      def call(roots: _model.Roots) -> Any:
        if moves_streams:
          _model.advance(roots, jax.random.bits(keys[0]))
        return loss_fn(roots[0], batch, *roots[1:], *(keys if has_key else ()))

      return _model.call(call, graphdef, wrt, params, model_state)

    if isinstance(batch, _batch.ClosedBatch):
      output, structure, after, new_state = _batch.call_read_only(forward, batch)
    else:
      output, structure, after, new_state = forward(batch)
    _check_trained(params, after)
    if may_change:
      new_state = _model.with_structure(new_state, graphdef, structure)
    else:
      _check_others(model_state, new_state)
    return output, _train_step.with_written_params(new_state, params, after)

  return _losses.stateful(loss)


def _check_trained(before: _types.Params, after: _types.Params) -> None:
  """Refuses a forward pass that changes more of the trained variables than their values."""
  if _tree_checks.same_shapes(before, after):
    return
  changed = {
    leaf.path for leaf in {*_layer_axes.leaves_of(before)} ^ {*_layer_axes.leaves_of(after)}
  }
  if changed:
    raise ValueError(
      "`loss_fn` must leave the trained variables in the number and shapes that the optimizer was"
      " made for; the forward pass creates, removes or reshapes"
      f" {_checks.shorten(sorted(changed))}. Create trained variables in the model's `__init__`,"
      " before the optimizer."
    )


def _check_others(before: _model.Collections, after: _model.Collections) -> None:
  """Refuses a forward pass that creates or removes variables."""
  changed = {*_paths.leaf_paths(before)} ^ {*_paths.leaf_paths(after)}
  if changed:
    raise ValueError(
      "`split_loss` needs a model whose forward pass keeps its variables; this one's creates"
      f" or removes {_checks.shorten(sorted(changed))}. Create variables in the model's `__init__`,"
      " and pop intermediates in the loss: nnx.pop(model, nnx.Intermediate)."
    )
