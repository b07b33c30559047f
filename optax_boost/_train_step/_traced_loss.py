"""The loss of a step as a jaxpr, which freezing and methods that treat layers need.

The loss is a function of ``(params, values)``, where `values` are the entries of the model state
that the gradient replaces (:mod:`optax_boost._train_step._replaced_values`).
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from optax_boost._foundation import _batches, _types
from optax_boost._trace import (
  _frozen_scans,
  _jaxpr,
  _layer_axes,
  _layer_scans,
  _leaf_uses,
  _sources,
)

# Params and replaced values: a pair.
Differentiated: TypeAlias = tuple[optax.Params, Sequence[jax.Array]]


class StatisticSources(NamedTuple):
  """The leaves and data that a leaf of the new model state depends on, over any number of steps.

  Attributes:
    params: the indices of the params' leaves.
    statistics: the indices of the leaves of the old model state.
    is_of_data: whether the leaf depends on data.
  """

  params: list[int]
  statistics: list[int]
  is_of_data: bool


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

  def layers(self) -> _layer_axes.LayerAxes:
    """Returns the roles of the params' axes. The model state does not count as data."""
    (params, values), (model_state, *data) = self._inputs, self._arguments
    state_flags = [None] * (len(values) + len(jax.tree.leaves(model_state)))
    flags = [*state_flags, *_batches.data_flags(data)]
    return _layer_axes.describe(_leaf_uses.follow(self.program, params, flags))

  def value_axes(self) -> dict[int, int]:
    """Returns along which axis each of the replaced values stacks layers, by index.

    The dict lacks a value that neither a scan over layers slices, nor the program by an index.
    """
    return self._layer_axes_of(len(jax.tree.leaves(self._inputs[0])), self._inputs[1])

  def statistics_axes(self) -> dict[int, int]:
    """Returns along which axis each leaf of the model state stacks layers, like `value_axes`."""
    return self._layer_axes_of(len(jax.tree.leaves(self._inputs)), self._arguments[0])

  def statistics_sources(self, carried: Mapping[int, int]) -> list[StatisticSources]:
    """Returns for each leaf of the new model state the leaves and data that it depends on.

    `carried` maps the index of a leaf of the old model state to its index in the new one.
    """
    (params, values), (model_state, batch, *rngs) = self._inputs, self._arguments
    num_params, num_old = len(jax.tree.leaves(params)), len(jax.tree.leaves(model_state))
    first, of_data = num_params + len(values), 1 << (num_params + num_old)
    bits = [1 << i for i in range(num_params + num_old)]
    arguments = [*bits[:num_params], *[0] * len(values), *bits[num_params:]]
    arguments += [of_data if is_data else 0 for is_data in _batches.data_flags(batch)]
    arguments += [0] * len(jax.tree.leaves(rngs))
    # The first result is the loss, and the statistics come next.
    pairs = {first + old: 1 + new for old, new in carried.items()}
    results = _sources.sources_of_results(self.program, arguments, pairs, of_data)[1:]

    def describe(sources: int) -> StatisticSources:
      indices = [i for i, bit in enumerate(bits) if sources & bit]
      params = [i for i in indices if i < num_params]
      statistics = [i - num_params for i in indices if i >= num_params]
      return StatisticSources(params, statistics, bool(sources & of_data))

    return list(map(describe, results))

  def _layer_axes_of(self, first: int, tree: _types.Tree) -> dict[int, int]:
    """Returns the axes of the layers in `tree`, whose leaves are the inputs from `first` on."""
    inputs = range(first, first + len(jax.tree.leaves(tree)))
    axes = (pair for scan in self._scans for pair in scan.axes)
    return {leaf - first: axis for leaf, axis in axes if leaf in inputs}

  @functools.cached_property
  def _scans(self) -> Sequence[_layer_scans.LayerScan]:
    """Returns the scans over layers of params, replaced values and the model state."""
    model_state, *data = self._arguments
    leaves = (self._inputs, model_state)
    return _leaf_uses.follow(self.program, leaves, _batches.data_flags(data)).scans

  def _trace(self, inputs: Differentiated) -> tuple[_types.Jaxpr, _types.TreeDef]:
    """Returns the program for inputs of the types of `inputs`, and its output's structure."""
    types = jax.tree.map(jax.typeof, inputs)
    signature = (jax.tree.structure(types), *jax.tree.leaves(types))
    if signature not in self._programs:
      trace = jax.make_jaxpr(_jaxpr.uncached(self._loss_fn), return_shape=True)
      program, shapes = trace(inputs, *self._arguments)
      self._programs[signature] = program, jax.tree.structure(shapes)
    return self._programs[signature]
