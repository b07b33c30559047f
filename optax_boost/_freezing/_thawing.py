"""An optimizer's step in which each group has step counts of its own.

Adam divides its moments by 1 - b^n, n being one count for all leaves. If a layer is thawed after a
thousand steps, its moments are zero still and n is 1000, so that its first steps are several times
too long. PyTorch counts the steps of each param. So does this module, for each group: the program
of the inner ``update`` is traced once, and computed so that each value that depends on a count is
computed with the count of the group that it belongs to.

  owners   of a value in the program: the groups of the leaves (gradients, params, moments) of which
           it is made. A value with one owner is computed with the counts of this group.
  pure     a scalar made of counts alone, as 1 - b^n: computed for all groups at once, in a vector.
  mixed    a value made of leaves of several groups, as the norm of all updates for clipping: it is
           computed once per group for which it is needed, from values that have one owner each.

Values without a count in them are computed once. The layers of a stacked leaf may belong to several
groups. Then entrywise operations get the counts in an array that broadcasts against the leaf; all
other operations get the counts of its last group.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _jaxpr
from optax_boost import _views
from optax_boost._freezing import _state_layout

_CALLS = frozenset(_jaxpr.PLAIN_CALLS) - {"checkpoint", "remat", "remat2"}


# The counts with which a value is computed: the counts of a group, or of each layer's group. None:
# the counts of the inner state itself, which every step advances.
_Owner: TypeAlias = _state_layout.LeafGroup | None


class _Value(NamedTuple):
  """A description of a value in a program, before it is computed.

  Attributes:
    shape: its shape.
    counted: whether it depends on a step count.
    owners: the groups of the leaves from which it is computed entry by entry.
    scalar_owners: the groups of the leaves of which it contains a scalar (a norm, a ratio).
    pure: whether it is a scalar made of counts alone.
  """

  shape: tuple[int, ...]
  counted: bool = False
  owners: frozenset[_Owner] = frozenset()
  scalar_owners: frozenset[_Owner] = frozenset()
  pure: bool = False

  def computed_for(self, owner: _Owner) -> _Owner:
    """The owner of the counts with which it is computed, as an operand of a value of `owner`."""
    if not self.counted:
      return None
    of_leaves = self.owners or self.scalar_owners
    if len(of_leaves) == 1:
      (owner,) = of_leaves
    if (
      isinstance(owner, _state_layout.Layers)
      and not self.pure
      and owner.axis_in(self.shape) is None
    ):
      return owner.last_group
    return owner


class _Operation(NamedTuple):
  """An equation between values, which are numbered."""

  equation: Any
  inputs: list[int]
  outputs: list[int]


def _memory(x: Any) -> Any:
  return getattr(jax.typeof(x), "memory_space", None)


def _in_memory(x: Any, space: Any) -> Any:
  """Moves an array to a memory space: a state may be in the host's, where nothing is computed."""
  return x if space in (None, _memory(x)) else jax.device_put(x, space)


def _on_device(x: Any) -> Any:
  return _in_memory(x, jax.memory.Space.Device) if _memory(x) is not None else x


def _is_entrywise(operation: _Operation) -> bool:
  """Whether a scalar operand may as well be an array of the result's shape."""
  return operation.equation.primitive.name in (*_views.POINTWISE, "broadcast_in_dim")


class _Recorder(_jaxpr.Interpreter[int]):
  """Lists the operations of a program and of its inner calls, and describes its values."""

  def __init__(self) -> None:
    self.values: list[_Value] = []
    self.constants: dict[int, Any] = {}
    self.operations: list[_Operation] = []

  def add(self, value: _Value) -> int:
    """Numbers a value."""
    self.values.append(value)
    return len(self.values) - 1

  def constant(self, value: Any) -> int:
    number = self.add(_Value(jnp.shape(value)))
    self.constants[number] = value
    return number

  def visit(self, equation: Any, inputs: list[int]) -> Sequence[int]:
    if equation.primitive.name in _CALLS:
      return self.run(next(_jaxpr.sub_jaxprs(equation)), inputs)
    return self.operation(equation, inputs)

  def operation(self, equation: Any, inputs: list[int]) -> Sequence[int]:
    operands = [self.values[i] for i in inputs]
    shapes = [getattr(variable.aval, "shape", ()) for variable in equation.outvars]
    counted = any(operand.counted for operand in operands)
    owners = frozenset().union(*(operand.owners for operand in operands))
    scalar_owners = frozenset().union(*(operand.scalar_owners for operand in operands))
    is_pure = (
      counted
      and not (owners or scalar_owners or equation.effects)
      and all(operand.pure or not operand.counted for operand in operands)
      and all(shape == () for shape in shapes)
    )

    def describe(shape: tuple[int, ...]) -> _Value:
      reduced = shape == () and any(operand.shape for operand in operands if operand.owners)
      if reduced or (shape == () and len(owners | scalar_owners) > 1):
        return _Value(shape, counted, frozenset(), owners | scalar_owners)
      return _Value(shape, counted, owners, scalar_owners, is_pure)

    outputs = [self.add(describe(shape)) for shape in shapes]
    self.operations.append(_Operation(equation, inputs, outputs))
    return outputs


class _Computation:
  """Computes a recorded program, whose counts are vectors: one per group, and the state's own."""

  def __init__(self, program: Any, recorder: _Recorder, arguments: dict[int, Any]):
    self._template = program.jaxpr
    self._values, self._operations = recorder.values, recorder.operations
    self._computed: dict[tuple[int, _Owner], Any] = {
      (number, None): value for number, value in [*recorder.constants.items(), *arguments.items()]
    }
    # The entries of the vectors that `_computed` has for pure values.
    self._entries: dict[tuple[int, _Owner], Any] = {}

  def run(self, results: Iterable[tuple[int, _Owner]]) -> None:
    """Computes results for their owners."""
    needed: list[dict[_Owner, None]] = [{} for _ in self._values]

    def need(number: int, owner: _Owner) -> None:
      value = self._values[number]
      needed[number][None if value.pure else value.computed_for(owner)] = None

    for number, owner in results:
      need(number, owner)
    plan: list[tuple[_Operation, list[_Owner]]] = []
    for operation in reversed(self._operations):
      owners = dict.fromkeys(owner for number in operation.outputs for owner in needed[number])
      if operation.equation.effects and not owners:
        owners = {None: None}
      plan.append((operation, list(owners)))
      for owner in owners:
        for number in operation.inputs:
          for one in self._groups_asked(operation, number, owner):
            need(number, one)
    for operation, owners in reversed(plan):
      for owner in owners:
        outputs = self._compute(operation, owner)
        for number, output in zip(operation.outputs, outputs, strict=True):
          self._computed[number, owner] = output

  def result(self, number: int, owner: _Owner) -> Any:
    """A computed value for an owner; a pure one for a leaf's layers is a vector of theirs."""
    value = self._values[number]
    owner = value.computed_for(owner)
    if not value.pure:
      return self._computed[number, owner]
    if (number, owner) not in self._entries:
      vector = self._computed[number, None]
      entries = _on_device(vector)
      if isinstance(owner, _state_layout.Layers):
        entries = entries[np.array(owner.groups)]
      else:
        entries = jax.lax.index_in_dim(entries, -1 if owner is None else owner, keepdims=False)
      self._entries[number, owner] = _in_memory(entries, _memory(vector))
    return self._entries[number, owner]

  def for_groups(self, number: int, num_groups: int) -> Any:
    """A computed scalar for each group."""
    if self._values[number].pure:
      return _on_device(self._computed[number, None])[:num_groups]
    return jnp.stack([_on_device(self.result(number, group)) for group in range(num_groups)])

  def _groups_asked(self, operation: _Operation, number: int, owner: _Owner) -> list[_Owner]:
    """The owners for which an operation needs a value: a leaf's layers, or each of their groups."""
    if (
      isinstance(owner, _state_layout.Layers)
      and self._values[number].pure
      and not _is_entrywise(operation)
    ):
      return list(dict.fromkeys(owner.groups))
    return [owner]

  def _compute(self, operation: _Operation, owner: _Owner) -> list[Any]:
    """The results of an operation for an owner; pure ones for all groups at once."""
    if operation.outputs and all(self._values[number].pure for number in operation.outputs):
      return self._compute_for_all_groups(operation)
    if isinstance(owner, _state_layout.Layers) and any(
      self._values[number].pure for number in operation.inputs
    ):
      return self._compute_for_layers(operation, owner)
    operands = [self.result(number, owner) for number in operation.inputs]
    return self._bind(operation.equation, operands)

  def _compute_for_all_groups(self, operation: _Operation) -> list[Any]:
    operands = [self._computed[number, None] for number in operation.inputs]
    axes = [0 if self._values[number].pure else None for number in operation.inputs]
    return jax.vmap(lambda *operands: self._bind(operation.equation, operands), axes)(*operands)

  def _compute_for_layers(self, operation: _Operation, owner: _state_layout.Layers) -> list[Any]:
    pure = [self._values[number].pure for number in operation.inputs]
    shapes = [self._values[number].shape for number in operation.outputs]
    if _is_entrywise(operation):
      operands = [self.result(number, owner) for number in operation.inputs]
      operands = [
        jnp.broadcast_to(owner.spread(x, shapes[0]), shapes[0]) if is_pure else x
        for x, is_pure in zip(operands, pure, strict=True)
      ]
      is_broadcast = operation.equation.primitive.name == "broadcast_in_dim"
      return operands if is_broadcast else self._bind(operation.equation, operands)
    # Once for each group, and then each layer's own result.
    outputs: list[Any] = []
    for group in sorted(set(owner.groups)):
      operands = [
        self.result(number, group if is_pure else owner)
        for number, is_pure in zip(operation.inputs, pure, strict=True)
      ]
      of_group = self._bind(operation.equation, operands)
      is_group = np.array(owner.groups) == group
      outputs = [
        jnp.where(owner.spread(is_group, shape), new, old)
        if owner.axis_in(shape) is not None
        else new
        for new, old, shape in zip(of_group, outputs or of_group, shapes, strict=True)
      ]
    return outputs

  def _bind(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation."""
    if not any(True for _ in _jaxpr.sub_jaxprs(equation)):
      results = equation.primitive.bind(*operands, **equation.params)
      return list(results) if equation.primitive.multiple_results else [results]
    # An equation with a program in it is computed as a program of one equation.
    atoms = zip(equation.invars, operands, strict=True)
    inputs = {atom: value for atom, value in atoms if not isinstance(atom, jax_core.Literal)}
    program = _jaxpr.part(self._template, list(inputs), equation.outvars, [equation])
    return _jaxpr.compute(program, inputs.values())


def initial_counts(
  inner: optax.GradientTransformation,
  state: optax.OptState,
  numbers: Any,
  params: optax.Params,
  num_groups: int,
) -> tuple[jax.Array, ...]:
  """The step counts of the groups: a vector for each count in the state that belongs to moments.

  Warns of counts that may belong to the moments, or to the run.
  """
  layout = _state_layout.find_layout(inner, state, _state_layout.leaf_groups(numbers, params))
  if layout.unclear:
    _base.warn(
      f"`freeze_layers` keeps one step count for all groups in {', '.join(layout.unclear)}: it"
      " can't tell whether the count belongs to the moments of the leaves or to the run. The first"
      " steps of a layer that is thawed late may be too long. Warm the learning rate up after each"
      " thaw, or keep the moments in a NamedTuple with a scalar `count`, as"
      " `optax.ScaleByAdamState`.",
      UserWarning,
    )
  leaves = jax.tree.leaves(state)
  return tuple(jnp.full(num_groups, _on_device(leaves[place])) for place in layout.counts)


def update(
  inner: optax.GradientTransformationExtraArgs,
  numbers: Any,
  gradients: optax.Updates,
  state: optax.OptState,
  params: optax.Params | None,
  extra_args: dict[str, Any],
  *,
  counts: Sequence[jax.Array],
  depth: Any,
) -> tuple[optax.Updates, optax.OptState, tuple[jax.Array, ...]]:
  """The step of an optimizer in which each group has step counts of its own.

  Args:
    inner: the optimizer.
    numbers: the groups of the leaves, in the structure of the gradients.
    gradients: the gradients, zero for frozen leaves.
    state: the optimizer's state. Its own counts count all steps.
    params: the params, if there are any.
    extra_args: of ``update``.
    counts: the groups' step counts, as from :func:`initial_counts`.
    depth: how many groups are frozen.

  Returns:
    The updates, in which frozen leaves have the updates that trained ones would have; the new state
    and the new counts of the groups, in which frozen leaves and groups keep their old entries.
  """
  groups = _state_layout.leaf_groups(numbers, gradients)
  layout = _state_layout.find_layout(inner, state, groups)
  num_groups = len(counts[0]) if counts else 1
  is_trained = np.arange(num_groups, dtype=np.int32) >= depth
  leaves = jax.tree.leaves(state)
  if _are_equal([leaves[place] for place in layout.counts], counts, is_trained):
    updates, new_state = inner.update(gradients, state, params, **extra_args)
    new_leaves = jax.tree.leaves(new_state)
    new_counts = [jnp.full(num_groups, _on_device(new_leaves[place])) for place in layout.counts]
  else:
    updates, new_state, new_counts = _update_apart(
      inner, layout, groups, (gradients, params, state), extra_args, counts
    )
  pairs = zip(new_counts, counts, strict=True)
  return (
    updates,
    layout.select(functools.partial(_groups.select_frozen, depth), state, new_state),
    tuple(jnp.where(is_trained, new, old) for new, old in pairs),
  )


def _are_equal(
  state_counts: Sequence[Any], counts: Sequence[jax.Array], is_trained: jax.Array | np.ndarray
) -> bool:
  """Whether the counts of all trained groups are known to equal the counts in the state."""
  if not counts:
    return True
  if any(isinstance(x, jax.core.Tracer) for x in (*state_counts, *counts, is_trained)):
    return False
  pairs = zip(state_counts, counts, strict=True)
  return all(np.all((np.asarray(vector) == count) | ~is_trained) for count, vector in pairs)


def _update_apart(
  inner: optax.GradientTransformationExtraArgs,
  layout: _state_layout.StateLayout,
  groups: Any,
  arguments: tuple[optax.Updates, optax.Params | None, optax.OptState],
  extra_args: dict[str, Any],
  counts: Sequence[jax.Array],
) -> tuple[optax.Updates, optax.OptState, list[jax.Array]]:
  """The inner step, each group's leaves computed with its own counts."""

  def step(gradients: Any, params: Any, state: Any) -> Any:
    return inner.update(gradients, state, params, **extra_args)

  program, shapes = jax.make_jaxpr(_jaxpr.untraced(step), return_shape=True)(*arguments)
  groups_of_params: list[_Owner] = jax.tree.leaves(groups)
  of_state = range(len(jax.tree.leaves(arguments[:2])), len(program.jaxpr.invars))
  of_counts = {of_state[place]: vector for place, vector in zip(layout.counts, counts, strict=True)}
  trees = 1 if arguments[1] is None else 2
  owners = [*groups_of_params * trees, *layout.groups]

  recorder = _Recorder()
  inputs: dict[int, Any] = {}
  triples = zip(program.jaxpr.invars, owners, jax.tree.leaves(arguments), strict=True)
  for i, (variable, owner, leaf) in enumerate(triples):
    shape = variable.aval.shape
    if i in of_counts:
      vector = jnp.append(_on_device(of_counts[i]), _on_device(leaf))
      number = recorder.add(_Value(shape, counted=True, pure=True))
      inputs[number] = _in_memory(vector, _memory(leaf))
    else:
      owned_by = frozenset() if owner is None else frozenset([owner])
      inputs[recorder.add(_Value(shape, owners=owned_by))] = leaf
  outputs = recorder.run(program, list(inputs))

  computation = _Computation(program, recorder, inputs)
  wanted = list(zip(outputs, [*groups_of_params, *layout.groups], strict=True))
  new_counts = [outputs[len(groups_of_params) + place] for place in layout.counts]
  num_groups = len(counts[0])
  every_group = [(number, group) for number in new_counts for group in range(num_groups)]
  computation.run([*wanted, *every_group])
  results = [computation.result(number, owner) for number, owner in wanted]
  updates, state = jax.tree.unflatten(jax.tree.structure(shapes), results)
  return updates, state, [computation.for_groups(number, num_groups) for number in new_counts]
