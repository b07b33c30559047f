"""A Linen module as a pure loss ``loss(params, model_state, batch, rng)`` with its arrays.

All of the package's functions of a loss take it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import core, linen as nn
import jax

from optax_boost._foundation import _checks, _types
from optax_boost._trace import _layer_axes


class BoundModel:
  """A Linen module with its variables, as the loss sees it.

  Calls are ``module.apply`` with the params, statistics and rngs of this step. Statistics that a
  call changes are seen by the next call.

  Attributes:
    collections: the variables other than params, after the calls so far. A tuple that ``sow``
      extends holds the values of this step's calls alone.
  """

  def __init__(self, module: nn.Module, params: Any, collections: Any, rngs: dict[str, jax.Array]):
    check_module(module)
    for name, value in (("collections", collections), ("rngs", rngs)):
      _checks.check_type(name, value, Mapping, "a dict by name")
    self._module = module
    self._params = params
    self._rngs = rngs
    self._calls = 0
    self.collections = dict(collections)
    # The lengths of tuples that no call has extended, by path.
    self._lengths = {
      path: len(value)
      for path, value in jax.tree.leaves_with_path(self.collections, is_leaf=_is_tuple)
      if _is_tuple(value)
    }

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Applies the module to its own arguments; `method` among them names another method."""
    # Two calls within one loss draw different masks.
    rngs = {name: jax.random.fold_in(rng, self._calls) for name, rng in self._rngs.items()}
    self._calls += 1
    output, changed = self._module.apply(
      {"params": self._params, **self.collections},
      *args,
      rngs=rngs,
      mutable=list(self.collections),
      **kwargs,
    )
    changed = core.unfreeze(changed)
    if self._lengths:
      changed = jax.tree.map_with_path(self._drop_sown_before, changed, is_leaf=_is_tuple)
    self.collections |= changed
    return output

  def _drop_sown_before(self, path: Any, value: Any) -> Any:
    """Drops the values of earlier steps from a tuple that ``sow`` has extended.

    Other tuples, as the carry of a recurrent cell, keep their length and stay as they are.
    """
    length = self._lengths.get(path)
    if length is None or not _is_tuple(value) or len(value) <= length:
      return value
    del self._lengths[path]
    return value[length:]


def _is_tuple(value: _types.Unchecked) -> bool:
  return type(value) is tuple


def split_loss(
  loss_fn: _types.LossFn,
  module: nn.Module,
  variables: Any,
  *,
  rngs: Sequence[str] = ("dropout",),
) -> tuple[_types.LossFn, Any, dict[str, Any]]:
  """Makes the loss of a module pure: the form that the package's functions take.

  :func:`optax_boost.make_train_step`, :func:`optax_boost.layer_groups`,
  :func:`optax_boost.layer_axes` and :func:`optax_boost.race` know such a loss.

  A loss reads the module's other variables in ``model.collections``, after it has called the model:
  ``sum(jax.tree.leaves(model.collections["losses"]))`` adds the values that
  ``self.sow("losses", ...)`` stored in this step. Collections that ``module.init`` did not return
  are not kept. Values that ``sow`` combines with a `reduce_fn` of its own are carried from step to
  step, like other variables.

  Args:
    loss_fn: ``loss_fn(model, batch)``, where ``model(x, ...)`` applies the module; returns the
      scalar loss, or ``(loss, aux)``.
    module: the Linen module.
    variables: the output of ``module.init``.
    rngs: the names of the module's rng streams.

  Returns:
    ``(loss, params, model_state)``, with ``loss(params, model_state, batch, rng)`` returning the
    output of `loss_fn` and the new `model_state`, the collections other than ``params``. The rng
    streams are made from the key `rng`.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: `variables` has no collection ``params``.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax, optax_boost.linen
    >>> module, x = nn.Dense(1), jnp.eye(3)
    >>> loss, params, model_state = optax_boost.linen.split_loss(
    ...   lambda model, x: jnp.mean((model(x) - 1) ** 2), module, module.init(jax.random.key(0), x)
    ... )
    >>> print(optax_boost.layer_axes(loss, params, model_state, x))
    bias: outputs (0,)
    kernel: fan-in (0,), outputs (1,)
    >>> step = optax_boost.make_train_step(loss, optax.lbfgs())
    >>> state = step.init(params, model_state)
    >>> for _ in range(8):
    ...   state, metrics = step(state, x)
    >>> y = module.apply({"params": state.params, **state.model_state}, x)
    >>> bool(jnp.allclose(y, 1, atol=1e-2))
    True
  """
  check_module(module)
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  sequence = isinstance(rngs, Sequence) and not isinstance(rngs, str)
  if not (sequence and all(isinstance(name, str) for name in rngs)):
    raise TypeError(
      "`rngs` must be a sequence of names of rng streams, as ('dropout',); got"
      f" {_checks.shorten(rngs)}."
    )

  def loss(
    params: _types.Tree, model_state: _types.Tree, batch: _types.Tree, rng: jax.Array | None = None
  ) -> Any:
    if not isinstance(model_state, Mapping):
      raise TypeError(
        "`model_state` must be a dict of the module's collections; got"
        f" {_checks.shorten(model_state)}. Pass the one that `split_loss` returned:"
        " step.init(params, model_state)."
      )
    _checks.check_key("rng", rng)
    keys = {} if rng is None else dict(zip(rngs, jax.random.split(rng, len(rngs)), strict=True))
    model = BoundModel(module, params, model_state, keys)
    output = loss_fn(model, batch)
    return output, model.collections

  return _layer_axes.stateful(loss), *split_variables(variables)


def split_variables(variables: Any) -> tuple[Any, dict[str, Any]]:
  """The params, and the other collections in plain dicts, as ``apply`` returns them."""
  if not isinstance(variables, Mapping):
    raise TypeError(
      f"`variables` must be a dict of collections; got {_checks.shorten(variables)}. Pass the"
      " variables that `module.init` returned."
    )
  if not isinstance(variables.get("params"), Mapping):
    raise ValueError(
      "`variables` must be what `module.init` returned, with a collection 'params'; got the keys"
      f" {sorted(map(str, variables))}."
    )
  collections = {key: value for key, value in variables.items() if key != "params"}
  return variables["params"], core.unfreeze(collections)


def check_module(module: _types.Unchecked) -> None:
  """Refuses all but Linen modules."""
  if not isinstance(module, nn.Module):
    raise TypeError(
      f"`module` must be a Linen module; got {_checks.shorten(module)}. For NNX modules there is"
      " `optax_boost.nnx`."
    )
