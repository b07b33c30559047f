"""A Linen module as a pure loss ``loss(params, model_state, batch, rng)`` with its arrays.

The train step, groups of layers and stacked axes stand on it.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from flax import core
from flax import linen as nn
import jax

from optax_boost import _base
from optax_boost import _train_step


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
      _base.check_type(name, value, Mapping, "a dict by name")
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


def _is_tuple(value: Any) -> bool:
  return type(value) is tuple


def pure_loss(
  module: nn.Module, loss_fn: Callable[..., Any], rngs: Any, has_aux: bool = False
) -> Callable[..., Any]:
  """From ``loss_fn(model, batch)`` to the pure loss that returns the new collections, too."""
  check_module(module)
  _base.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  sequence = isinstance(rngs, Sequence) and not isinstance(rngs, str)
  if not (sequence and all(isinstance(name, str) for name in rngs)):
    raise TypeError(
      "`rngs` must be a sequence of names of rng streams, as ('dropout',); got"
      f" {_base.shorten(rngs)}."
    )

  def loss(params: Any, collections: Any, batch: Any, rng: jax.Array | None = None) -> Any:
    check_model_state(collections)
    keys = {} if rng is None else dict(zip(rngs, jax.random.split(rng, len(rngs)), strict=True))
    model = BoundModel(module, params, collections, keys)
    output = loss_fn(model, batch)
    return _train_step.with_model_state(output, model.collections, has_aux)

  return loss


def adapt(
  module: Any, loss_fn: Any, variables: Any, rng: Any, rngs: Any
) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
  """The pure loss, the params and the other collections, after checks of the arguments."""
  loss = pure_loss(module, loss_fn, rngs)
  params, collections = split_variables(variables)
  _base.check_key("rng", rng)
  return loss, params, collections


def split_loss(
  loss_fn: Callable[..., Any],
  module: nn.Module,
  variables: Any,
  *,
  rngs: Sequence[str] = ("dropout",),
) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
  """Makes the loss of a module pure: the form that :func:`optax_boost.race` takes.

  Args:
    loss_fn: ``loss_fn(model, batch)``, as for :func:`make_train_step`.
    module: the Linen module.
    variables: the output of ``module.init``.
    rngs: the names of the module's rng streams.

  Returns:
    ``(loss, params, model_state)``, with ``loss(params, model_state, batch, rng)`` returning the
    output of `loss_fn` and the new `model_state`, the collections other than ``params``.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> module, x = nn.Dense(1), jnp.zeros((2, 3))
    >>> loss, params, model_state = optax_boost.linen.split_loss(
    ...   lambda model, x: jnp.mean(model(x)), module, module.init(jax.random.key(0), x)
    ... )
    >>> value, model_state = loss(params, model_state, x, jax.random.key(1))
    >>> float(value), sorted(params)
    (0.0, ['bias', 'kernel'])
  """
  loss = pure_loss(module, loss_fn, rngs)
  return loss, *split_variables(variables)


def split_variables(variables: Any, name: str = "variables") -> tuple[Any, dict[str, Any]]:
  """The params, and the other collections in plain dicts, as ``apply`` returns them."""
  check_collections(name, variables)
  if not are_variables(variables):
    raise ValueError(
      f"`{name}` must be what `module.init` returned, with a collection 'params'; got the keys"
      f" {sorted(map(str, variables))}."
    )
  collections = {key: value for key, value in variables.items() if key != "params"}
  return variables["params"], core.unfreeze(collections)


def are_variables(value: Any) -> bool:
  """Whether a value is a dict of collections with a collection ``params``."""
  return isinstance(value, Mapping) and isinstance(value.get("params"), Mapping)


def check_collections(name: str, value: Any) -> None:
  """Refuses all but dicts."""
  if not isinstance(value, Mapping):
    raise TypeError(
      f"`{name}` must be a dict of collections; got {_base.shorten(value)}. Pass the variables that"
      " `module.init` returned."
    )


def check_model_state(model_state: Any) -> None:
  """Refuses the statistics of a state that another train step's ``init`` made."""
  if not isinstance(model_state, Mapping):
    raise TypeError(
      "`state` must have the module's collections in its `model_state`; got"
      f" {_base.shorten(model_state)}. Make it with the `init` of Linen's train step, from the"
      " variables that `module.init` returned."
    )


def check_module(module: Any) -> None:
  """Refuses all but Linen modules."""
  if not isinstance(module, nn.Module):
    raise TypeError(
      f"`module` must be a Linen module; got {_base.shorten(module)}. For NNX modules there is"
      " `optax_boost.nnx`."
    )
