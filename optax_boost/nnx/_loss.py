"""``split_loss``: the loss of an NNX model as a pure function of params, model state and batch."""

from collections.abc import Iterator
import contextlib
from typing import Any, NamedTuple

from flax import errors, nnx
import jax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _paths, _tree_checks, _types
from optax_boost._trace import _layer_axes, _losses
from optax_boost.nnx import _model

# The seed of the key for a pass over all data, if the user gives no key. A pass only adds numbers
# drawn from this key to the counts of the model's rng streams. The steps between two passes change
# the counts, so the passes have different dropout masks.
PASS_SEED = 0


class KeyedBatch(NamedTuple):
  """Marks the batch of a step that is called with a key.

  The loss passes this key only to the user's `loss_fn`. With other batches, a key of the loss also
  advances the model's own rng streams.
  """

  batch: _types.Batch

  def __repr__(self) -> str:
    return repr(self.batch)  # as error messages show it


def split_loss(
  loss_fn: _types.LossFn, model: nnx.Module, *, wrt: _model.Filter = nnx.Param
) -> tuple[_types.LossFn, _types.Params, _model.Collections]:
  """Turns the loss of a model into a pure function of arrays.

  :func:`optax_boost.make_train_step`, :func:`optax_boost.layer_groups`,
  :func:`optax_boost.layer_axes` and :func:`optax_boost.race` take the result. A train step of the
  pure loss needs less time on the host than :func:`make_train_step`, which takes the model apart in
  each step.

  Args:
    loss_fn: ``loss_fn(model, batch)``, or any function of a model and a batch, as for evaluation.
    model: the model; it is not changed.
    wrt: the filter of the trained variables, as in ``nnx.Optimizer``.

  Returns:
    ``(loss, params, model_state)``. ``loss(params, model_state, batch)`` returns the output of
    `loss_fn` and the new `model_state`, a dict of all variables that are not trained. The loss
    accepts the variables of any model of the same structure. Dropout draws from the model's own rng
    streams; with a key as fourth argument of the loss, the streams draw other numbers.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: when the loss is traced, if the forward pass creates, removes or reshapes variables.

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
  structure, params, model_state = _model.split(wrt, model)
  return pure_loss(loss_fn, structure, wrt, may_change=False), params, model_state


def pure_loss(
  loss_fn: _types.LossFn,
  structure: _model.Structure,
  wrt: _model.Filter,
  *,
  has_key: bool = False,
  may_change: bool = True,
) -> _types.LossFn:
  """Turns ``loss_fn(model, batch[, rng])`` into a pure loss that also returns the model state.

  `structure` is the model's structure, and `wrt` is the filter of the trained variables. If
  `has_key`, the pure loss passes its key to `loss_fn`.

  If `may_change`, the forward pass may change the model's structure; the returned model state then
  holds the new structure, which :func:`_model.write` gives to the model. If not `may_change`, new
  and removed variables raise ValueError, and new attributes are dropped.
  """

  # `race` passes a key only to losses with a parameter called `rng` or `key`. This loss has none,
  # since the model has its own rng streams.
  def loss(
    params: _types.Params, model_state: _model.Collections, batch: _types.Batch, *keys: jax.Array
  ) -> tuple[Any, Any]:
    is_keyed = isinstance(batch, KeyedBatch)

    def call(roots: _model.Roots) -> Any:
      if keys and not is_keyed:
        _model.advance(roots, jax.random.bits(keys[0]))
      with _explain_changes():
        return loss_fn(roots[0], user_batch(batch), *roots[1:], *(keys if has_key else ()))

    # Each call makes a new model. The forward pass changes statistics and rng counts of this model
    # only, so a trial point of a line search has no lasting effect.
    output, new_structure, after, new_state = _model.call(call, structure, wrt, params, model_state)
    _check_trained(params, after)
    if may_change:
      new_state = _model.with_structure(new_state, structure, new_structure)
    else:
      _check_untrained(model_state, new_state)
    return output, _train_step.with_written_params(new_state, params, after)

  return _losses.stateful(loss)


def user_batch(batch: _types.Batch) -> _types.Batch:
  """Returns the user's batch from a :class:`KeyedBatch`, or the batch as it is."""
  return batch.batch if isinstance(batch, KeyedBatch) else batch


@contextlib.contextmanager
def _explain_changes() -> Iterator[None]:
  """Raises ValueError for Flax's error that a loss changes other modules than its model."""
  try:
    yield
  except errors.TraceContextError as error:
    raise ValueError(
      "`loss_fn` must change no NNX object but its model, and its model in no transform of JAX;"
      f" Flax says: {str(error).partition(' (')[0]}. Put a second model, in the batch or of an"
      " outer scope, into evaluation mode before the step, `teacher.eval()`, and pass an `nnx.Rngs`"
      " as the step's argument `rng`. If the second model uses `nnx.jit`, `nnx.remat` or"
      " `nnx.scan`, which write all variables, call a copy of it in the loss:"
      " `nnx.clone(batch['teacher'])`."
    ) from error


def _check_trained(before: _types.Params, after: _types.Params) -> None:
  if _tree_checks.same_shapes(before, after):
    return
  changed = {
    leaf.path for leaf in {*_layer_axes.leaves_of(before)} ^ {*_layer_axes.leaves_of(after)}
  }
  if changed:
    raise ValueError(
      "`loss_fn` must keep the number and the shapes of the trained variables, for which the"
      " optimizer was made; the forward pass creates, removes or reshapes"
      f" {_checks.shorten(sorted(changed))}. Create trained variables in the model's `__init__`,"
      " before the optimizer."
    )


def _check_untrained(before: _model.Collections, after: _model.Collections) -> None:
  changed = {*_paths.leaf_paths(before)} ^ {*_paths.leaf_paths(after)}
  if changed:
    raise ValueError(
      "`split_loss` needs a model whose forward pass keeps its variables; this one's creates"
      f" or removes {_checks.shorten(sorted(changed))}. Create variables in the model's `__init__`,"
      " and pop intermediates in the loss: nnx.pop(model, nnx.Intermediate)."
    )
