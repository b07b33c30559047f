"""Tells whether the update of each leaf depends on the moments of no other leaf.

Only then can a step be made once for each set of step counts, so that each leaf takes the result
of its own counts. Adam's update of a leaf depends on this leaf's moments, and a clipping before
Adam on all gradients, but on no moments. A clipping after Adam depends on the moments of all
leaves.

The program of an ``update`` tells this exactly: each value gets the set of the leaves from whose
moments it is computed, and of a stacked leaf the axis of the value that its layers are along.
"""

from collections.abc import Sequence
import functools
import math

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _types
from optax_boost._trace import _jaxpr

# The index of a param from whose moments a value is computed, and the axis of the value that is the
# axis of the param's layers, if these must not meet; else None.
_Source = tuple[int, int | None]
_Sources = frozenset[_Source]
# The layers of a stacked param meet in a value.
_LAYERS: _Source = (-1, None)
# The settings of operations that act on each entry alone.
_ENTRYWISE = frozenset({"accuracy", "new_dtype", "out_dtype", "sharding", "weak_type", "y"})


def moments_meet(
  inner: optax.GradientTransformationExtraArgs,
  state: optax.OptState,
  params: optax.Params,
  moments: Sequence[_Source | None],
  owners: Sequence[int | None],
  classes: Sequence[int | None],
) -> bool:
  """Returns whether a result of ``inner.update`` depends on moments of params of other classes.

  Args:
    inner: the optimizer.
    state: its state.
    params: its params.
    moments: for each leaf of the state that is a moment beside a step count, the index of its
      param, and the axis of the param's layers in the leaf; else None.
    owners: for each leaf of the state, the index of the param that it belongs to, or None.
    classes: for each param, the class of its group; None if its layers are of several classes.
  """
  program = _program(inner, state, params)
  if program is None:
    return True
  none: list[_Sources] = [frozenset()] * len(classes)
  of_state = [frozenset() if source is None else frozenset([source]) for source in moments]
  results = _Dependence().run(program, [*none, *of_state, *none])

  def is_of_class(index: int, owner: int | None) -> bool:
    if index == owner:
      return True
    return None not in (owner, classes[index]) and classes[index] == classes[owner]  # type: ignore

  def fits(sources: _Sources, owner: int | None) -> bool:
    along = {source for source in sources if source[1] is not None}
    one_axis_each = len(along) == len({index for index, _ in along})
    return (
      _LAYERS not in sources and one_axis_each and all(is_of_class(i, owner) for i, _ in sources)
    )

  return not all(map(fits, results, [*range(len(classes)), *owners]))


def _program(
  inner: optax.GradientTransformationExtraArgs, state: optax.OptState, params: optax.Params
) -> _types.Program | None:
  """Returns the program of ``inner.update``; None if it can't be traced."""
  for needs_extra_args in (False, True):
    extra = {"value": jnp.zeros([]), "grad": params, "grad_fn": lambda params, **_: params}
    call = functools.partial(inner.update, **extra) if needs_extra_args else inner.update
    try:
      return jax.make_jaxpr(call)(params, state, params)
    except Exception:
      continue
  return None


class _Dependence(_jaxpr.Interpreter[_Sources]):
  """Finds from which moments each result is computed; a loop's results are of all its inputs."""

  def constant(self, value: jax.typing.ArrayLike) -> _Sources:
    return frozenset()

  def join(self, values: Sequence[_Sources]) -> _Sources:
    return frozenset().union(*values)

  def operation(self, equation: _types.Equation, inputs: list[_Sources]) -> Sequence[_Sources]:
    return [
      frozenset(
        _moved(equation, atom.aval.shape, out.aval.shape, source)
        for atom, sources in zip(equation.invars, inputs, strict=True)
        for source in sources
      )
      for out in equation.outvars
    ]

  def visit(self, equation: _types.Equation, inputs: list[_Sources]) -> Sequence[_Sources]:
    name = equation.primitive.name
    if name in ("scan", "while"):
      return self.operation(equation, inputs)
    results = super().visit(equation, inputs)
    return [inputs[0] | found for found in results] if name == "cond" else results


def _moved(
  equation: _types.Equation, before: Sequence[int], after: Sequence[int], source: _Source
) -> _Source:
  """Returns a source of an operation's operand as a source of its result, of shape `after`.

  The axis of layers may move; if the operation may compute an entry from several layers, returns
  `_LAYERS`.
  """
  index, axis = source
  if axis is None:
    return source
  name, settings = equation.primitive.name, equation.params
  if name.startswith(("reduce_", "arg")) and "axes" in settings and axis not in settings["axes"]:
    return index, axis - sum(reduced < axis for reduced in settings["axes"])
  if name == "broadcast_in_dim":
    return index, settings["broadcast_dimensions"][axis]
  if name == "transpose":
    return index, settings["permutation"].index(axis)
  if name in ("reshape", "squeeze", "expand_dims"):
    entries = math.prod(before[:axis])
    for i, length in enumerate(after):
      if length == before[axis] and math.prod(after[:i]) == entries:
        return index, i
  fits = len(before) == len(after) and before[axis] == after[axis]
  fits = fits and all(n in (1, m) for n, m in zip(before, after, strict=True))
  if fits and _ENTRYWISE.issuperset(settings):
    return source
  return _LAYERS
