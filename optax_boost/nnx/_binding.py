"""The variables that hold a model's and an optimizer's arrays, while neither changes its structure.

A binding remembers every container of the last call with its contents, and compares them object by
object. A replaced or added layer, a set attribute (``model.eval()``), another ``Variable`` or other
metadata show as another object. Models with contents that can't be compared so (raw arrays as
attributes, containers of unknown kinds, static attributes that changed inside) are split again.
"""

from collections.abc import Callable
from collections.abc import Iterable
import operator
from typing import Any
import weakref

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


class Binding:
  """The variables that hold a state, in its order, and the contents to compare."""

  def __init__(
    self,
    roots: tuple[Any, ...],
    rngs: Any,
    held: "_Held",
    variables: list[Any],
    structure: Any,
  ):
    self._roots = roots
    self._rngs = rngs
    self._held = held
    self._variables = variables
    self._structure = structure

  def holds(self, model: Any, optimizer: Any, rngs: Any = None) -> bool:
    """Whether these are the bound ones, in the structure that they had."""
    roots = (model, optimizer)
    bound = all(ref() is root for ref, root in zip(self._roots, roots, strict=True))
    return bound and self._rngs is rngs and self._held.unchanged(roots)

  def read(self) -> Any:
    """The bound state with its present arrays."""
    return jax.tree.unflatten(self._structure, [v.get_raw_value() for v in self._variables])

  def write(self, state: Any) -> bool:
    """Puts arrays into their places; if the state has another structure, none, and says so."""
    leaves, structure = jax.tree.flatten(state)
    if structure != self._structure:
      return False
    for variable, leaf in zip(self._variables, leaves, strict=True):
      variable.set_raw_value(leaf)
    return True


def bind(
  model: Any, optimizer: Any, rngs: Any, state: Any, on_free: Callable[[Any], Any]
) -> Binding | None:
  """Finds the variables that hold a state; None if model or optimizer can't be bound.

  `on_free` is called when either is freed; it must hold neither. A binding keeps `rngs` alive.
  """
  leaves, structure = jax.tree.flatten(state)
  # Inside a trace there is no next call.
  traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
  if not _CAN_BIND or traced or not isinstance(model, nnx.Pytree):
    return None
  try:
    held = _Held((model, optimizer), rngs)
  except _CannotBindError:
    return None
  by_array = {id(variable.get_raw_value()): variable for variable in held.variables}
  found = [by_array.get(id(leaf)) for leaf in leaves]
  # Each array in a variable of its own, and no variable left over: nothing was overlooked.
  if any(v is None for v in found) or not len(leaves) == len(by_array) == len(held.variables):
    return None
  roots = (weakref.ref(model, on_free), weakref.ref(optimizer, on_free))
  return Binding(roots, rngs, held, found, structure)


class _CannotBindError(Exception):
  pass


class _Held:
  """The containers of two objects and rngs, with the contents of each, and their variables."""

  def __init__(self, roots: tuple[Any, ...], rngs: Any):
    self.variables: list[Any] = []
    self._containers: list[tuple[Any, type, Callable[[Any], list[Any]], list[Any]]] = []
    self._hashes: list[tuple[Any, int]] = []
    self._roots = {id(root) for root in roots}
    self._seen: set[int] = set()
    # Only the contents of the roots are kept, so that the roots can be freed.
    self._held_by_roots = [(type(root), _attributes(root)) for root in roots]
    for _, contents in self._held_by_roots:
      self._add_all(contents)
    self._add_all([rngs])

  def unchanged(self, roots: tuple[Any, ...]) -> bool:
    """Whether these objects hold the same contents."""
    for root, (kind, contents) in zip(roots, self._held_by_roots, strict=True):
      if type(root) is not kind or not _same(_attributes(root), contents):
        return False
    for container, kind, read, contents in self._containers:
      if type(container) is not kind or not _same(read(container), contents):
        return False
    return all(hash(value) == known for value, known in self._hashes)

  def _add_all(self, values: Iterable[Any]) -> None:
    for value in values:
      if id(value) in self._roots:
        raise _CannotBindError
      if isinstance(value, _IMMUTABLE + _FLAX_OWN) or id(value) in self._seen:
        continue
      self._seen.add(id(value))
      self._add(value)

  def _add(self, value: Any) -> None:
    read = _reader(value)
    if read is not None:
      if isinstance(value, nnx.Variable):
        self.variables.append(value)
      contents = read(value)
      self._containers.append((value, type(value), read, contents))
      self._add_all(contents)
    elif not jax.tree_util.all_leaves([value]):
      raise _CannotBindError
    elif type(value).__hash__ is not object.__hash__:
      # Objects that compare by value may change inside.
      try:
        self._hashes.append((value, hash(value)))
      except TypeError as error:
        raise _CannotBindError from error


def _reader(value: Any) -> Callable[[Any], list[Any]] | None:
  """The function that reads a container's names and values; None if it is no container."""
  if isinstance(value, nnx.Variable):
    return _metadata
  if isinstance(value, nnx.Pytree):
    return _attributes
  if isinstance(value, nnx.State):
    return _states
  # Subclasses of dict and list may hold more than their entries.
  if type(value) is dict:
    return _entries
  return list if type(value) is list or isinstance(value, tuple) else None


def _attributes(module: Any) -> list[Any]:
  held = vars(module)
  return [*held, *held.values()]


def _metadata(variable: Any) -> list[Any]:
  held = variable.get_metadata()
  return [*held, *held.values()]


def _entries(mapping: Any) -> list[Any]:
  return [*mapping, *mapping.values()]


def _states(state: Any) -> list[Any]:
  return _entries(state.raw_mapping)


def _same(contents: list[Any], known: list[Any]) -> bool:
  return len(contents) == len(known) and all(map(operator.is_, contents, known))
