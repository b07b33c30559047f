"""A Linen module with its variables."""

from collections.abc import Mapping
import functools
import inspect
from typing import Any, TypeAlias

from flax import core, linen as nn
import jax

from optax_boost._foundation import _checks, _types

# The variables other than params, as ``apply`` takes and returns them.
Collections: TypeAlias = dict[str, Any]


class BoundModel:
  """A Linen module with its variables, which a loss calls like a function.

  A call is ``module.apply`` with the params, statistics and rngs of this step. If it changes the
  statistics, the next call uses the new ones. Methods of the module's class are called in the same
  way, and its fields are attributes.

  Attributes:
    collections: the variables other than params, after the calls so far. A tuple that ``sow``
      extends holds only the values of this step's calls.
  """

  def __init__(
    self,
    module: nn.Module,
    params: _types.Params,
    collections: Mapping[str, Any],
    rngs: dict[str, jax.Array],
  ):
    self._module = module
    self._params = params
    self._rngs = rngs
    self._calls = 0
    self.collections = dict(collections)
    # The length of each tuple in `collections`, by path. Once a call has extended a tuple, the
    # tuple's entry is deleted.
    self._lengths = {
      path: len(value)
      for path, value in jax.tree.leaves_with_path(self.collections, is_leaf=_is_tuple)
      if _is_tuple(value)
    }

  def __getattr__(self, name: str) -> Any:
    """Returns a field of the module, or a method of its class, which is called as the module is."""
    if name.startswith("_") or hasattr(nn.Module, name) or not hasattr(self._module, name):
      raise AttributeError(
        f"The model of a Linen loss has no `{name}`. It has the module's fields and the methods of"
        " its class, as in `model(x)` or `model.encode(x)`; `model.collections` has its variables"
        " other than params. Call submodules, `apply` and `sow` inside of the module's methods."
      )
    value = getattr(self._module, name)
    return functools.partial(self, method=name) if inspect.ismethod(value) else value

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Applies the module to the arguments; the keyword `method` names another method to call."""
    # The number of the call is folded in, so that two calls in one loss draw different masks.
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

  def _drop_sown_before(self, path: _types.KeyPath, value: Any) -> Any:
    """Returns an entry of the collections, without values that ``sow`` stored in earlier steps.

    `value` is the entry at `path` after a call. A tuple that this call is the first to extend loses
    the values from before the call; any other `value` is returned unchanged.
    """
    # Only `sow` extends tuples. An RNN's carry, for example, keeps its length.
    length = self._lengths.get(path)
    if length is None or not _is_tuple(value) or len(value) <= length:
      return value
    del self._lengths[path]
    return value[length:]


def _is_tuple(value: _types.Unchecked) -> bool:
  return type(value) is tuple


def split_variables(variables: Any) -> tuple[_types.Params, Collections]:
  """Splits the output of ``module.init`` into the params and the other collections."""
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


def check(module: _types.Unchecked) -> None:
  if not isinstance(module, nn.Module):
    raise TypeError(
      f"`module` must be a Linen module; got {_checks.shorten(module)}. For NNX modules there is"
      " `optax_boost.nnx`."
    )
