"""The variables that hold a model's and an optimizer's arrays, while neither changes its structure.

A binding remembers every container of the last call with its contents, and compares them object by
object. A replaced or added layer, a set attribute (``model.eval()``), another ``Variable`` or other
metadata show as another object. Models with contents that can't be compared so (raw arrays as
attributes, containers of unknown kinds, static attributes that changed inside) are split again.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import operator
from typing import Any
import weakref

import flax
from flax import nnx
import jax

# Containers are read by `vars`, Flax's private attributes included, since its public API saves
# nothing: a call on a ResNet-11 takes 4.5 ms of Python with `nnx.split` and `nnx.update`, 3.0 ms
# with `nnx.jit`, 0.61 ms with a binding (docs/cards/train_step.md). `nnx.cached_partial` is as fast
# but misses changes.
# Older flax has other names for these; there, nothing is bound.
_CAN_BIND = hasattr(nnx.Variable, "get_raw_value") and hasattr(nnx, "Pytree")
_IMMUTABLE = (str, int, float, complex, bytes, type(None))
# Flax's own entries in each module; they are replaced, not changed.
_FLAX_OWN = tuple(type(v) for k, v in vars(nnx.Module()).items() if k.startswith("_pytree__"))


class _CannotBindError(Exception):
  pass


class Binding:
  """The variables that hold a state, in its order, and all contents to compare.

  `on_free` is called when model or optimizer is freed; it must hold neither. `rngs` are kept alive.
  """

  def __init__(
    self,
    model: Any,
    optimizer: Any,
    rngs: tuple[Any, ...],
    state: Any,
    on_free: Callable[[Any], Any],
  ):
    leaves, structure = jax.tree.flatten(state)
    self._structure: Any = structure
    # Inside a trace there is no next call.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if not _CAN_BIND or traced or not isinstance(model, nnx.Pytree):
      raise _CannotBindError
    # Only the contents of the roots are kept, so that the roots can be freed.
    self._roots = [
      (weakref.ref(r, on_free), type(r), _entries(vars(r))) for r in (model, optimizer)
    ]
    self._rngs = rngs
    self._containers: list[tuple[Any, type, Callable[[Any], list[Any]], list[Any]]] = []
    self._hashes: list[tuple[Any, int]] = []
    # Without an array: the state of a leaf that `optax.masked` or `optax.partition` hides.
    self._empty: list[tuple[Any, Any]] = []
    variables = []
    start = [value for _, _, contents in self._roots for value in contents]
    for value, read, contents in _reachable([*start, *rngs], (model, optimizer)):
      if isinstance(value, nnx.Variable):
        content = value.get_raw_value()
        if jax.tree.leaves(content):
          variables.append(value)
        else:
          self._empty.append((value, content))
      if read is not None:
        self._containers.append((value, type(value), read, contents))
      elif not jax.tree_util.all_leaves([value]):
        raise _CannotBindError
      elif type(value).__hash__ is not object.__hash__:
        # Objects that compare by value may change inside.
        try:
          self._hashes.append((value, hash(value)))
        except TypeError as error:
          raise _CannotBindError from error
    by_array = {id(variable.get_raw_value()): variable for variable in variables}
    # Each array in a variable of its own, and no variable left over: nothing was overlooked.
    if not by_array.keys() == set(map(id, leaves)) or not len(leaves) == len(variables) == len(
      by_array
    ):
      raise _CannotBindError
    self._variables = [by_array[id(leaf)] for leaf in leaves]
    self._written = list(map(id, leaves))

  def holds(self, model: Any, optimizer: Any, rngs: tuple[Any, ...]) -> bool:
    """Whether these are the bound ones, with the contents that they had."""
    for root, (ref, kind, contents) in zip((model, optimizer), self._roots, strict=True):
      if ref() is not root or type(root) is not kind or not _same(_entries(vars(root)), contents):
        return False
    for container, kind, read, contents in self._containers:
      if type(container) is not kind or not _same(read(container), contents):
        return False
    if not all(variable.get_raw_value() is content for variable, content in self._empty):
      return False
    return _same(rngs, self._rngs) and all(hash(value) == known for value, known in self._hashes)

  def read(self) -> tuple[Any, bool]:
    """The bound state with its present arrays, and whether they are those of the last step."""
    leaves = [variable.get_raw_value() for variable in self._variables]
    return jax.tree.unflatten(self._structure, leaves), list(map(id, leaves)) == self._written

  def write(self, state: Any) -> bool:
    """Puts arrays into their places; if the state has another structure, none, and says so."""
    leaves, structure = jax.tree.flatten(state)
    if structure != self._structure:
      return False
    for variable, leaf in zip(self._variables, leaves, strict=True):
      variable.set_raw_value(leaf)
    # Not the arrays, which would live on after the model has others.
    self._written = list(map(id, leaves))
    return True


def bind(*args: Any) -> Binding | None:
  """The :class:`Binding` of these arguments; None if model or optimizer can't be bound."""
  try:
    return Binding(*args)
  except _CannotBindError:
    return None


def _reachable(
  values: list[Any], roots: tuple[Any, ...]
) -> Iterator[tuple[Any, Callable[[Any], list[Any]] | None, list[Any]]]:
  """All objects inside of `values`, each once, with the function that reads it and its contents."""
  seen: set[int] = set()
  pending = values
  while pending:
    value = pending.pop()
    if any(value is root for root in roots):
      raise _CannotBindError
    if isinstance(value, _IMMUTABLE + _FLAX_OWN) or id(value) in seen:
      continue
    seen.add(id(value))
    read = _reader(value)
    contents = [] if read is None else read(value)
    yield value, read, contents
    pending += contents


def _reader(value: Any) -> Callable[[Any], list[Any]] | None:
  """The function that reads a container's names and values; None if it is no container."""
  if isinstance(value, nnx.Variable):
    return lambda variable: _entries(variable.get_metadata())
  if isinstance(value, nnx.Pytree):
    return lambda module: _entries(vars(module))
  if isinstance(value, nnx.State):
    return lambda state: _entries(state.raw_mapping)
  # Subclasses of dict and list may hold more than their entries. Flax's attention layers hold empty
  # FrozenDicts. Nested ones never compare equal: each read makes new objects of the inner ones.
  if type(value) in (dict, flax.core.FrozenDict):
    return _entries
  return list if type(value) is list or isinstance(value, tuple) else None


def _entries(mapping: Mapping[Any, Any]) -> list[Any]:
  return [*mapping, *mapping.values()]


def _same(contents: Sequence[Any], known: Sequence[Any]) -> bool:
  return len(contents) == len(known) and all(map(operator.is_, contents, known))
