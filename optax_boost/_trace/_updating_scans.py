"""Evaluates a loss whose backward pass updates params, layer by layer.

A scan that slices leaves gets a derivative of its own. Forward, it keeps what JAX would keep, but
not the layers of its leaves, and passes them on. Backward, a loop over the layers carries the
leaves and the optimizer's arrays of them: an iteration takes a layer of these arrays, computes the
gradient of the layer, and writes the updated layer in its place. So the gradients of a leaf never
exist at once, and the cotangents of the leaf and of its arrays are the *updated* leaf and arrays.

>>> import jax, jax.numpy as jnp
>>> def loss_fn(w, x):
...   return jnp.sum(jax.lax.scan(lambda x, w: (x * w, None), x, w)[0])
>>> w, x = jnp.array([2.0, 3.0]), jnp.array([1.0, 5.0])
>>> program = jax.make_jaxpr(loss_fn)(w, x)
>>> (scan,) = find_scans(program, 1)
>>> def descend(index, g, layers, fixed, scalars):
...   return [layers[0] - 0.1 * g[0]], scalars
>>> def loss(w, rate):
...   (loss,), rate = evaluate(program, [w], [x], [Update(scan, {}, [], descend)], [[]], rate)
...   return loss, rate
>>> _, pull = jax.vjp(loss, w, 0.1)
>>> new_w, _ = pull((1.0, 0.1))
>>> [round(x, 2) for x in new_w.tolist()]  # the gradients are 3 * 6 and 2 * 6
[0.2, 1.8]
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp

from optax_boost._foundation import _conditionals, _placement, _types
from optax_boost._trace import _frozen_scans, _jaxpr, _leaf_scans

# Takes the index of a layer, the gradients of the leaves, the layer's slices of the leaves and of
# their arrays, the fixed values, and the scalars; returns the new slices and scalars. A slice keeps
# the axis of the layers, with length 1.
UpdateLayer: TypeAlias = Callable[
  [jax.Array, list[jax.Array], list[jax.Array], Sequence[Any], Any], tuple[list[jax.Array], Any]
]


class Update(NamedTuple):
  """What a scan does with its leaves in the backward pass.

  Attributes:
    leaves: the numbers of the leaves that the scan slices, with the axis of the layers.
    axes: the axes of the layers in the optimizer's arrays of these leaves, by their number.
    fixed: values that all layers need.
    update: the arithmetic.
  """

  leaves: Mapping[int, int]
  axes: Mapping[int, int]
  fixed: Sequence[Any]
  update: UpdateLayer


def find_scans(program: _types.Jaxpr, count: int) -> list[dict[int, int]]:
  """Returns the leaves that each scan can update, by number, with the axis of the layers.

  The leaves are the first `count` arguments of the program.
  """
  uses = _leaf_scans.find_uses(program, count)
  obstacles = uses.find_obstacles([False] * count, once=True)
  scans: dict[int, dict[int, int]] = {}
  for number, obstacle in enumerate(obstacles):
    if not obstacle:
      (slicing,) = uses.scanned[number]
      scans.setdefault(slicing.scan, {})[number] = slicing.axis
  return list(scans.values())


def evaluate(
  program: _types.Jaxpr,
  leaves: Sequence[jax.Array],
  arguments: Sequence[Any],
  updates: Sequence[Update],
  arrays: Sequence[Sequence[jax.Array]],
  scalars: Any,
) -> tuple[list[jax.Array], Any]:
  """Computes the results of a program of `leaves` and `arguments`, and the scalars to pass on.

  `arrays` are the optimizer's arrays of each scan's leaves. Forward, scalars may have any values.
  """
  uses = _leaf_scans.find_uses(program, len(leaves))
  evaluator = _UpdatingScans(uses.needed, updates, arrays, scalars)
  values: list[Any] = list(leaves)
  for update in updates:
    for number in update.leaves:
      leaf = leaves[number]
      values[number] = _leaf_scans.Leaf(leaf, number, tuple(range(leaf.ndim)), (False,))
  results = list(map(_leaf_scans.as_array, evaluator.evaluate(program, [*values, *arguments])))
  return results, evaluator.scalars


class _UpdatingScans(_leaf_scans.LeafScans):
  """Computes a program; the scans in `updates` get their own derivative."""

  def __init__(
    self,
    needed: set[int],
    updates: Sequence[Update],
    arrays: Sequence[Sequence[jax.Array]],
    scalars: Any,
  ) -> None:
    super().__init__(needed)
    self._updates = {frozenset(update.leaves): update for update in updates}
    self._arrays = {frozenset(u.leaves): list(x) for u, x in zip(updates, arrays, strict=True)}
    self.scalars = scalars

  def read(self, numbers: Sequence[int]) -> Any:
    return self._arrays if numbers else {}, self.scalars

  def write(self, tokens: Any) -> None:
    self._arrays, self.scalars = self._arrays | tokens[0], tokens[1]

  def scan_part(
    self,
    equation: _types.Equation,
    shared: Sequence[Any],
    carry: list[jax.Array],
    slices: Sequence[Any],
    length: int,
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    key = frozenset(_leaf_scans.numbers_of(slices))
    update = self._updates.get(key)
    if update is None:
      return super().scan_part(equation, shared, carry, slices, length)
    scan = _Scan(equation, update, slices, length)
    inputs = [*shared], carry, [x for x in slices if not isinstance(x, _leaf_scans.Leaf)]
    (carry, results), self.scalars = scan.run(
      inputs, scan.leaves, self._arrays[key], list(update.fixed), self.scalars
    )
    return carry, results


class _Scan:
  """A scan over layers whose derivative updates the layers."""

  def __init__(
    self, equation: _types.Equation, update: Update, slices: Sequence[Any], length: int
  ) -> None:
    self._equation, self._update, self._slices, self._length = equation, update, slices, length
    leaves = {x.number: x for x in slices if isinstance(x, _leaf_scans.Leaf)}
    # In the order of `update`. Arrays are arguments of `run`, which differentiates no closure.
    self._leaves = [leaves[number] for number in update.leaves]
    self.leaves = [leaf.array for leaf in self._leaves]
    self._axes = [*update.leaves.values(), *update.axes.values()]
    self.run = jax.custom_vjp(lambda *arguments: self._forward(*arguments)[0])
    self.run.defvjp(self._forward, self._backward)

  def _iterate(self, shared: Any, carry: Any, others: Any, layers: Any) -> tuple[Any, Any]:
    """Computes an iteration; returns the results that have a derivative, and all results."""
    by_number = dict(zip(self._update.leaves, layers, strict=True))
    rest = iter(others)
    slices = [
      by_number[x.number] if isinstance(x, _leaf_scans.Leaf) else next(rest) for x in self._slices
    ]
    body = jax_core.jaxpr_as_fun(self._equation.params["jaxpr"])
    results = body(*shared, *carry, *slices)
    return [x for x in results if _is_float(x)], results

  def _layers(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns what the body gets of a layer, from slices of the leaves."""
    return [leaf.layer(x) for leaf, x in zip(self._leaves, arrays, strict=True)]

  def _slice(self, arrays: Sequence[jax.Array], index: jax.Array) -> list[jax.Array]:
    """Returns the slices of a layer, along the axes of the leaves and then of their arrays."""
    return [
      jax.lax.dynamic_slice_in_dim(_placement.gather_axes(x, (axis,)), index, 1, axis)
      for x, axis in zip(arrays, self._axes, strict=False)
    ]

  def _forward(
    self, inputs: Any, leaves: list[jax.Array], arrays: list[jax.Array], fixed: Any, scalars: Any
  ) -> tuple[Any, Any]:
    shared, carry, others = inputs
    resume: Any = None

    def body(carry: Any, inputs: Any) -> Any:
      nonlocal resume
      index, others = inputs
      layers = self._layers(self._slice(leaves, index))
      results, pull = _vjp(self._iterate, shared, carry, others, layers)
      resume, kept = _take_known(pull, [*shared, *others, *layers])
      return results[: len(carry)], results[len(carry) :], kept

    layer = jax.tree.map(lambda x: jax.typeof(x[0]), (jnp.arange(self._length), others))
    program, shapes = jax.make_jaxpr(body, return_shape=True)(carry, layer)
    # What each layer keeps alike, as a mask, is kept once.
    constants = _jaxpr.constant_results(program)
    first = len(program.out_avals) - len(shapes[2])
    alike = {i - first: x for i, x in constants.items() if i >= first}

    def iterate(carry: Any, inputs: Any) -> Any:
      values = jax_core.jaxpr_as_fun(program)(*jax.tree.leaves((carry, inputs)))
      carry, results, kept = jax.tree.unflatten(jax.tree.structure(shapes), values)
      return carry, (results, [x for i, x in enumerate(kept) if i not in alike])

    numbers = jnp.arange(self._length)
    carry, (results, kept) = _frozen_scans.run_scan(
      self._equation, iterate, carry, (numbers, others), self._length
    )
    # The loop of the derivative begins with the leaves, so they are not kept twice.
    keep = jax.tree_util.Partial(resume, alike, kept)
    return ((carry, results), scalars), (keep, shared, others, leaves, arrays, fixed)

  def _backward(self, residuals: Any, cotangents: Any) -> Any:
    keep, shared, others, leaves, arrays, fixed = residuals
    alike, kept = keep.args
    (d_carry, d_results), scalars = cotangents
    d_shared = [jnp.zeros_like(x) if _is_float(x) else None for x in shared]
    is_float = [_is_float(x) for x in self._equation.outvars]
    d_carry = [x if used else None for x, used in zip(d_carry, is_float, strict=False)]
    d_results = [x if f else None for x, f in zip(d_results, is_float[len(d_carry) :], strict=True)]

    def body(loop: Any, inputs: Any) -> Any:
      stacks, *loop = loop
      index, kept, others, d_results = inputs

      def once(slices: Any, d_shared: Any, d_carry: Any, scalars: Any, _: Any) -> Any:
        layers, pull_layers = jax.vjp(self._layers, slices[: len(self._leaves)])
        pull = keep.func(_merge(alike, kept), [*shared, *others, *layers])
        derivatives = pull([x for x in [*d_carry, *d_results] if x is not None])
        more, d_carry, d_others, d_layers = derivatives
        d_shared = [x if y is None else x + y for x, y in zip(d_shared, more, strict=True)]
        (grads,) = jax.lax.optimization_barrier(pull_layers(d_layers))
        new, scalars = self._update.update(index, grads, slices, fixed, scalars)
        return new, d_shared, d_carry, scalars, d_others

      # XLA 10: the inputs of a loop are materialized, so all reads come before the writes below.
      always = jax.lax.optimization_barrier(index >= 0)
      d_others = [jnp.zeros_like(x) if _is_float(x) else None for x in others]
      _, new, *loop, d_others = _conditionals.once_if(
        always, once, self._slice(stacks, index), *loop, d_others
      )
      stacks = [
        jax.lax.dynamic_update_slice_in_dim(x, y, index, axis)
        for x, y, axis in zip(stacks, new, self._axes, strict=True)
      ]
      return (stacks, *loop), d_others

    loop = [*leaves, *arrays], d_shared, d_carry, scalars
    inputs = jnp.arange(self._length), kept, others, d_results
    (stacks, d_shared, d_carry, scalars), d_others = jax.lax.scan(
      body, loop, inputs, length=self._length, reverse=not self._equation.params["reverse"]
    )
    new = stacks[: len(leaves)], stacks[len(leaves) :]
    return (d_shared, d_carry, d_others), *new, None, scalars


def _is_float(x: Any) -> bool:
  return jnp.issubdtype(getattr(x, "aval", x).dtype, jnp.inexact)


def _vjp(function: Callable[..., tuple[Any, Any]], *trees: Any) -> tuple[Any, Any]:
  """Returns the aux of a function, and its derivative, which has None for others than floats."""
  leaves, structure = jax.tree.flatten(trees)
  floats = [i for i, x in enumerate(leaves) if _is_float(x)]

  def call(*differentiated: jax.Array) -> tuple[Any, Any]:
    merged = list(leaves)
    for i, x in zip(floats, differentiated, strict=True):
      merged[i] = x
    return function(*jax.tree.unflatten(structure, merged))

  _, pull, aux = jax.vjp(call, *[leaves[i] for i in floats], has_aux=True)
  return aux, jax.tree_util.Partial(_Pull(structure, tuple(floats)), pull)


@dataclasses.dataclass(frozen=True)
class _Pull:
  """Brings the cotangents of the differentiated arguments into the structure of all."""

  structure: _types.TreeDef
  floats: tuple[int, ...]

  def __call__(self, pull: Any, cotangents: Any) -> Any:
    found = dict(zip(self.floats, pull(cotangents), strict=True))
    return jax.tree.unflatten(self.structure, map(found.get, range(self.structure.num_leaves)))


def _take_known(pull: Any, known: Sequence[Any]) -> tuple[Callable[..., Any], list[jax.Array]]:
  """Returns a function that makes `pull` again, and the arrays that it needs besides `known`.

  An array that is in `known` need not be kept, since the derivative has it.
  """
  leaves, structure = jax.tree.flatten(pull)
  places = {id(x): i for i, x in enumerate(known)}
  sources = [places.get(id(x)) for x in leaves]
  found = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.core.Tracer)}
  kept = [x for i, x in enumerate(leaves) if i not in found and sources[i] is None]

  def resume(kept: Sequence[jax.Array], known: Sequence[Any]) -> Any:
    of_known = {i: known[source] for i, source in enumerate(sources) if source is not None}
    return jax.tree.unflatten(structure, _merge(found | of_known, kept))

  return resume, kept


def _merge(found: Mapping[int, Any], others: Sequence[Any]) -> list[Any]:
  """Returns a list with the values `found` at their numbers, and `others`, in order, between."""
  rest = iter(others)
  return [found[i] if i in found else next(rest) for i in range(len(found) + len(others))]
