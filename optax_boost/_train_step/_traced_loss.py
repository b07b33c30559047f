"""The loss of a step as a jaxpr, which freezing and methods that treat layers need.

The loss is a function of ``(params, values)``, where `values` are the entries of the model state
that the gradient replaces (:mod:`optax_boost._train_step._replaced_values`).
"""

from collections.abc import Sequence
import functools
from typing import Any, TypeAlias

import jax
import optax

from optax_boost._foundation import _types
from optax_boost._trace import (
  _frozen_scans,
  _jaxpr,
  _layer_axes,
  _leaf_scans,
  _leaf_uses,
  _summing_scans,
  _updating_scans,
)

# Params and replaced values: a pair.
Differentiated: TypeAlias = tuple[optax.Params, Sequence[jax.Array]]


class TracedLoss:
  """A loss as a jaxpr ("program"), which is traced when it is first needed.

  Most steps don't need it: they freeze whole leaves or nothing, and no method reads `layers`.
  """

  def __init__(
    self, loss_fn: _types.LossFn, inputs: Differentiated, arguments: tuple[_types.Tree, ...]
  ) -> None:
    """The loss is ``loss_fn(inputs, *arguments)``; `arguments` are the model state, then data."""
    self._loss_fn, self._inputs, self._arguments = loss_fn, inputs, arguments
    self._programs: dict[Any, tuple[_types.Jaxpr, _types.TreeDef]] = {}

  def __call__(self, inputs: Differentiated) -> tuple[_types.FloatScalar, Any]:
    """Returns the loss and aux, computed by the program."""
    return self.run_with_leaves(inputs, jax.tree.leaves(inputs))

  def at(self, inputs: Differentiated, arguments: tuple[_types.Tree, ...]) -> "TracedLoss":
    """Returns the loss for other inputs and arguments."""
    return TracedLoss(self._loss_fn, inputs, arguments)

  def run(self, inputs: Differentiated) -> tuple[_types.FloatScalar, Any]:
    """Returns the loss and aux, computed by the loss itself."""
    output: tuple[_types.FloatScalar, Any] = self._loss_fn(inputs, *self._arguments)
    return output

  @property
  def program(self) -> _types.Jaxpr:
    """Returns the program for the types of the current params."""
    return self._trace(self._inputs)[0]

  def run_with_leaves(
    self, inputs: Differentiated, leaves: Sequence[Any]
  ) -> tuple[_types.FloatScalar, Any]:
    """Returns the loss and aux, computed from `leaves` instead of the leaves of `inputs`.

    A leaf may be split into frozen and trained parts (:mod:`optax_boost._trace._frozen_scans`).
    """
    program, structure = self._trace(inputs)
    outputs = _frozen_scans.evaluate(program, [*leaves, *jax.tree.leaves(self._arguments)])
    return jax.tree.unflatten(structure, outputs)

  def run_with_tokens(
    self,
    params: optax.Params,
    values: Sequence[Any],
    tokens: _summing_scans.Tokens,
    add: _summing_scans.Add,
    frozen: Sequence[_leaf_scans.Frozen],
    *,
    once: bool,
  ) -> tuple[tuple[_types.FloatScalar, Any], _summing_scans.Tokens]:
    """Returns the loss and aux, and the tokens (:mod:`optax_boost._trace._summing_scans`)."""
    program, structure = self._trace(self._inputs)
    arguments = [*values, *jax.tree.leaves(self._arguments)]
    outputs, tokens = _summing_scans.evaluate(
      program, jax.tree.leaves(params), arguments, tokens, add, frozen, once=once
    )
    return jax.tree.unflatten(structure, outputs), tokens

  def run_with_updates(
    self,
    params: Sequence[jax.Array],
    values: Sequence[jax.Array],
    updates: Sequence[_updating_scans.Update],
    arrays: Sequence[Sequence[jax.Array]],
    scalars: Any,
  ) -> tuple[tuple[_types.FloatScalar, Any], Any]:
    """Returns the loss and aux, and the scalars (:mod:`optax_boost._trace._updating_scans`)."""
    program, structure = self._trace(self._inputs)
    arguments = [*values, *jax.tree.leaves(self._arguments)]
    outputs, scalars = _updating_scans.evaluate(
      program, params, arguments, updates, arrays, scalars
    )
    return jax.tree.unflatten(structure, outputs), scalars

  def shapes(self) -> tuple[jax.ShapeDtypeStruct, Any]:
    """Returns the types of the loss and aux."""
    program, structure = self._trace(self._inputs)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.out_avals]
    return jax.tree.unflatten(structure, shapes)

  def layers(self) -> _layer_axes.LayerAxes:
    """Returns the roles of the params' axes. The model state does not count as data."""
    (params, values), (model_state, *data) = self._inputs, self._arguments
    state_flags = [None] * (len(values) + len(jax.tree.leaves(model_state)))
    flags = [*state_flags, *[True] * len(jax.tree.leaves(data))]
    return _layer_axes.describe(_leaf_uses.follow(self.program, params, flags))

  def value_axes(self) -> dict[int, int]:
    """Returns along which axis each of the replaced values stacks layers, by index.

    The dict lacks a value that stacks no layers.
    """
    return self._layer_axes_of(len(jax.tree.leaves(self._inputs[0])), self._inputs[1])

  def statistics_axes(self) -> dict[int, int]:
    """Returns along which axis each leaf of the model state stacks layers, like `value_axes`."""
    return self._layer_axes_of(len(jax.tree.leaves(self._inputs)), self._arguments[0])

  def _layer_axes_of(self, first: int, tree: _types.Tree) -> dict[int, int]:
    """Returns the axes of the layers in `tree`, whose leaves are the inputs from `first` on."""
    axes = self._axes_with_state[first : first + len(jax.tree.leaves(tree))]
    return {i: of.stacked[0] for i, of in enumerate(axes) if of is not None and of.stacked}

  @functools.cached_property
  def _axes_with_state(self) -> Sequence[_layer_axes.Axes | None]:
    """Returns the axes of params, replaced values and the model state, none of which is data."""
    model_state, *data = self._arguments
    leaves = (self._inputs, model_state)
    flags = [True] * len(jax.tree.leaves(data))
    return _layer_axes.describe(_leaf_uses.follow(self.program, leaves, flags)).axes

  def _trace(self, inputs: Differentiated) -> tuple[_types.Jaxpr, _types.TreeDef]:
    """Returns the program for inputs of the types of `inputs`, and its output's structure."""
    types = jax.tree.map(jax.typeof, inputs)
    signature = (jax.tree.structure(types), *jax.tree.leaves(types))
    if signature not in self._programs:
      trace = jax.make_jaxpr(_jaxpr.uncached(self._loss_fn), return_shape=True)
      program, shapes = trace(inputs, *self._arguments)
      self._programs[signature] = program, jax.tree.structure(shapes)
    return self._programs[signature]
