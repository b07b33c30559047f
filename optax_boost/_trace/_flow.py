"""The flow of data through the leaves: which leaves are upstream of which leaves.

Leaf A is *upstream* of leaf B if B is used on data (values computed from the batch) that were
computed with A. The order in which a program uses A and B does not tell this, since a program uses
two parallel towers one after the other.

>>> import jax, jax.numpy as jnp
>>> def loss_fn(params, x):
...   left, right = x @ params["left"], x @ params["right"]
...   return jnp.sum((left + right) @ params["top"])
>>> params = {"left": jnp.ones((2, 2)), "right": jnp.ones((2, 2)), "top": jnp.ones((2, 2))}
>>> program = jax.make_jaxpr(loss_fn)(params, jnp.ones((2, 2)))
>>> [sorted(leaves) for leaves in trace_flow(program, 3, [True]).upstream]  # left, right, top
[[], [], [0, 1]]
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types
from optax_boost._trace import _jaxpr, _leaf_uses, _primitives
from optax_boost._trace._leaf_uses import DataKind


class Flow(NamedTuple):
  """The leaves upstream of each leaf.

  Attributes:
    upstream: for each leaf, the leaves upstream of its first use (in a loop, its first iteration).
    ever_upstream: for each leaf, the leaves upstream of any of its uses, in any loop iteration.
    recurrent: for each loop whose iterations depend on each other, the leaves that every iteration
      uses.
    stacks: the layers that the program takes from leaves one after another, as ``w[0]``, ``w[1]``,
      ... in Python, or ``w[i]`` by the counter of a loop.
  """

  upstream: tuple[frozenset[int], ...]
  ever_upstream: tuple[frozenset[int], ...]
  recurrent: tuple[frozenset[int], ...]
  stacks: tuple[_leaf_uses.LayerScan, ...] = ()


class _Entries(NamedTuple):
  """Entries that the program takes of a leaf, one after another, by their indices along an axis."""

  leaf: int
  axis: int
  indices: tuple[int, ...]


class _Value(NamedTuple):
  """The abstract value of a variable; a set of leaves is an integer whose bit i is leaf i.

  Attributes:
    is_data: whether the variable was computed from data.
    met_leaves: the leaves that were combined with data in the computation of the variable.
    unmet_leaves: the leaves that the variable was computed from, without data.
    is_penalty: whether the variable is a scalar that sums up params alone, as an L2 penalty.
    is_leaf: whether the variable has the entries of a leaf, in the same places.
    entries: the entries of unmet leaves that the variable was computed from.
    numbers: the entries of a vector of integers, or the values of an integer in the iterations of a
      loop, if the program alone tells them.
  """

  is_data: bool = False
  met_leaves: int = 0
  unmet_leaves: int = 0
  is_penalty: bool = False
  is_leaf: bool = False
  entries: frozenset[_Entries] = frozenset()
  numbers: tuple[int, ...] | None = None


def trace_flow(program: _types.Jaxpr, num_leaves: int, data: Sequence[bool | None]) -> Flow:
  """Finds out, for each leaf of the params, which leaves are upstream of this leaf.

  The first `num_leaves` arguments of the program are the leaves. `data` has a flag for each other
  argument: True for data, None for constants. At first, only arrays of the batch count as data. If
  fewer than two equations use further leaves on data, the search starts again with one more kind of
  data (:class:`DataKind`).
  """
  for definition in DataKind:
    analysis = _FlowAnalysis(definition, [v.aval.shape for v in program.jaxpr.invars[:num_leaves]])
    loss_arguments = program.jaxpr.invars[num_leaves:]
    arguments = [_Value(unmet_leaves=1 << leaf, is_leaf=True) for leaf in range(num_leaves)]
    arguments += [
      _Value(is_data=kind is not None and kind <= definition)
      for kind in map(_leaf_uses.data_kind, [v.aval for v in loss_arguments], data)
    ]
    analysis.run(program, arguments)
    if analysis.num_meetings > 1:
      break

  leaves_in = functools.cache(_leaves_in)  # most leaves have the upstream leaves of another one

  def as_sets(upstream: dict[int, int]) -> tuple[frozenset[int], ...]:
    return tuple(leaves_in(upstream.get(leaf, 0)) for leaf in range(num_leaves))

  loop_leaves = (_leaves_in(leaves) for leaves in dict.fromkeys(analysis.loops))
  ever = as_sets(analysis.ever_upstream)
  recurrent = tuple(leaves for leaves in loop_leaves if any(leaf in ever[leaf] for leaf in leaves))
  return Flow(as_sets(analysis.upstream), ever, recurrent, tuple(analysis.stacks()))


def _leaves_in(bits: int) -> frozenset[int]:
  return frozenset(leaf for leaf in range(bits.bit_length()) if bits >> leaf & 1)


class _FlowAnalysis(_jaxpr.Interpreter[_Value]):
  """Collects the leaves upstream of each leaf, under one definition of data."""

  def __init__(self, definition: DataKind, shapes: Sequence[tuple[int, ...]]) -> None:
    self._definition, self._shapes = definition, shapes
    self.upstream: dict[int, int] = {}
    self.ever_upstream: dict[int, int] = {}
    self.num_meetings = 0
    self.loops: list[int] = []
    self._met = 0  # the leaves that met data in the current loop
    # The entries that met data (None: a leaf that met data whole). For each, in which loop it did
    # so first (None: in no loop), and whether its leaf was upstream of this data.
    self._taken: dict[tuple[int, _Entries | None], tuple[int | None, bool]] = {}
    self._loop: int | None = None
    self._shared_by: dict[int | None, int] = {}  # for each loop, the leaves that all iterations use

  def constant(self, value: jax.typing.ArrayLike) -> _Value:
    is_data = self._definition >= DataKind.CONSTANT and np.size(value) > 1
    return _Value(is_data, numbers=None if is_data else _integers(value))

  def join(self, values: Sequence[_Value]) -> _Value:
    return _Value(
      any(v.is_data for v in values),
      _unite(v.met_leaves for v in values),
      _unite(v.unmet_leaves for v in values),
      all(v.is_penalty or not v.unmet_leaves for v in values) and any(v.is_penalty for v in values),
      all(v.is_leaf for v in values),
      frozenset().union(*(v.entries for v in values)),
      values[0].numbers if len({v.numbers for v in values}) == 1 else None,
    )

  def operation(self, equation: _types.Equation, inputs: list[_Value]) -> Sequence[_Value]:
    rule = _primitives.rule_of(equation)
    if rule.is_identity:
      return inputs
    if equation.primitive.name == "stop_gradient" and inputs[0].is_data:
      # A detached pass of the model is data like a batch, so its leaves are not upstream.
      return [_Value(is_data=True)]
    is_data = any(v.is_data for v in inputs)
    if equation.primitive.name == "random_wrap":
      is_data = is_data and self._definition >= DataKind.NOISE
    unmet_leaves = _unite(v.unmet_leaves for v in inputs)
    if not is_data:
      is_summed = any(
        v.is_penalty
        or (v.unmet_leaves and atom.aval.size > 1 and not (rule.is_lookup or rule.is_entrywise))
        for v, atom in zip(inputs, equation.invars, strict=True)
      )
      taken = self._take(equation, inputs)
      entries = frozenset().union(*(v.entries for v in inputs))
      numbers = None if unmet_leaves else _compute_numbers(equation, [v.numbers for v in inputs])
      return [
        _Value(
          unmet_leaves=unmet_leaves,
          is_penalty=bool(is_summed and not variable.aval.shape),
          is_leaf=rule.is_pointwise and inputs[0].is_leaf and len(inputs) == 1,
          entries=entries if taken is None else frozenset([taken[i]]),
          numbers=numbers,
        )
        for i, variable in enumerate(equation.outvars)
      ]
    met_leaves = _unite(v.met_leaves for v in inputs)
    meeting = _unite(v.unmet_leaves for v in inputs if not v.is_penalty)
    self._note(meeting, met_leaves, frozenset().union(*(v.entries for v in inputs)))
    return [_Value(True, met_leaves | meeting)] * len(equation.outvars)

  def loop(
    self, equation: _types.Equation, body: _types.Jaxpr, inputs: list[_Value], carry: slice
  ) -> Sequence[_Value]:
    met, self._met = self._met, 0
    outer, self._loop = self._loop, id(equation)
    length = equation.params.get("length", 0)
    values = list(inputs)
    counters = self._find_counters(body, inputs, carry) if 0 < length <= _MOST_NUMBERS else {}
    for position, step in counters.items():
      (first,) = inputs[position].numbers or (0,)
      counted = tuple(range(first, first + step * length, step))
      values[position] = _Value(numbers=counted)
    if equation.params.get("reverse"):
      for position in range(carry.stop, len(values)):
        numbers = values[position].numbers
        values[position] = values[position]._replace(numbers=numbers and numbers[::-1])

    def run_iteration(values: list[_Value]) -> list[_Value]:
      outputs = self.run(body, values)
      for position in counters:
        outputs[position - carry.start] = values[position]
      return outputs

    outputs = self.find_fixpoint(run_iteration, values, carry)
    shared = self._met & _unite(v.unmet_leaves for v in inputs[: carry.start])
    if shared:
      self.loops.append(shared)
      self._shared_by[id(equation)] = shared
    self._met |= met
    self._loop = outer
    return [value._replace(numbers=None) for value in outputs]

  def _find_counters(
    self, body: _types.Jaxpr, inputs: list[_Value], carry: slice
  ) -> dict[int, int]:
    """Returns the positions of the integers that a loop counts up or down, with 1 or -1."""
    begins = {i: inputs[i].numbers for i in range(carry.start, carry.stop) if inputs[i].numbers}
    if not begins:
      return {}
    taken = dict(self._taken)
    outputs = self.run(body, inputs)
    self._taken = taken  # in this run the counters don't count
    counters = {}
    for position, numbers in begins.items():
      after = outputs[position - carry.start].numbers
      if numbers is not None and after is not None and len(numbers) == len(after) == 1:
        counters[position] = after[0] - numbers[0]
    return {position: step for position, step in counters.items() if step in (1, -1)}

  def _take(self, equation: _types.Equation, inputs: list[_Value]) -> list[_Entries] | None:
    """Returns for each result of an equation which entries of a leaf it is, or None if not so."""
    leaf = inputs[0].unmet_leaves.bit_length() - 1 if inputs and inputs[0].is_leaf else None
    # The body of a scan gets a slice of a leaf, and that of `shard_map` a part.
    if leaf is None or equation.invars[0].aval.shape != self._shapes[leaf]:
      return None
    picked = _picked(equation, [v.numbers for v in inputs], self._shapes[leaf])
    return None if picked is None else [_Entries(leaf, *each) for each in picked]

  def _note(self, meeting: int, met_leaves: int, entries: Iterable[_Entries]) -> None:
    """Notes that the leaves `meeting` are used on data that were computed with `met_leaves`.

    `entries` are the entries of leaves among the operands.
    """
    leaves = _leaves_in(meeting)
    self.num_meetings += any(leaf not in self.upstream for leaf in leaves)
    for leaf in leaves:
      self.upstream.setdefault(leaf, met_leaves)
      self.ever_upstream[leaf] = self.ever_upstream.get(leaf, 0) | met_leaves
      taken: list[_Entries | None] = [each for each in entries if each.leaf == leaf]
      for each in taken or [None]:
        self._taken.setdefault((leaf, each), (self._loop, bool(met_leaves >> leaf & 1)))
    self._met |= meeting

  def stacks(self) -> list[_leaf_uses.LayerScan]:
    """Returns the layers of leaves that meet data only entry by entry, in the order of the entries.

    Leaves are in one stack if the program takes their entries in the same loop, or if it takes
    entry i of all of them before entry i + 1 of any. Entries that all get the same data, as experts
    do, are no layers.
    """
    found: dict[tuple[int, bool, int | None], list[tuple[dict[int, int], list[range]]]] = {}
    in_a_row = set()
    places: dict[int, list[tuple[int, _Entries | None]]] = {}
    for place, (leaf, entries) in enumerate(self._taken):
      places.setdefault(leaf, []).append((place, entries))
    for leaf, rows in places.items():
      taken = [entries for _, entries in rows if entries is not None]
      # A loop may take several entries in an iteration.
      columns = zip(*(entries.indices for entries in taken), strict=False)
      indices = [index for column in columns for index in column]
      loops = {self._taken[leaf, entries][0] for entries in taken}
      is_alike = len({(entries.axis, len(entries.indices)) for entries in taken}) == 1
      if len(taken) < len(rows) or not is_alike or len(loops) > 1:
        continue
      axis, reverse = taken[0].axis, indices[0] > 0
      length = self._shapes[leaf][axis]
      if indices[:: -1 if reverse else 1] != list(range(length)):
        continue
      loop = loops.pop() if len(taken[0].indices) > 1 else None
      if loop is not None or all(self._taken[leaf, each][1] for each in taken[1:]):
        in_a_row.add(leaf)
      spans = [range(place, place + 1) for place, _ in rows]
      stacks = found.setdefault((length, reverse, loop), [])
      for axes, others in stacks:
        pairs = zip(spans, others, strict=True)
        joined = [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in pairs]
        if all(a.stop <= b.start for a, b in itertools.pairwise(joined)):
          axes[leaf], others[:] = axis, joined
          break
      else:
        stacks.append(({leaf: axis}, spans))
    return [
      _leaf_uses.LayerScan(
        tuple(sorted(axes.items())),
        _leaves_in(self._shared_by.get(loop, 0)).difference(axes),
        length,
        reverse,
      )
      for (length, reverse, loop), stacks in found.items()
      for axes, _ in stacks
      if not in_a_row.isdisjoint(axes)
    ]


def _picked(
  equation: _types.Equation, numbers: list[tuple[int, ...] | None], shape: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...]]] | None:
  """Returns for each result of an equation the axis and the indices of an entry of operand 0.

  `numbers` are the numbers of the operands, and `shape` is the shape of operand 0. Returns None if
  a result is not one entry, or if the program alone doesn't tell which.
  """
  name, settings = equation.primitive.name, equation.params
  starts: list[tuple[int, ...] | None]
  if name in ("split", "unstack"):
    axis, count = settings["axis"], len(equation.outvars)
    return [(axis, (i,)) for i in range(count)] if count == shape[axis] else None
  if name == "slice" and set(settings["strides"] or [1]) == {1}:
    starts = [(start,) for start in settings["start_indices"]]
    sizes = np.subtract(settings["limit_indices"], settings["start_indices"])
  elif name == "dynamic_slice":
    starts, sizes = numbers[1:], settings["slice_sizes"]
  elif name == "gather" and equation.invars[1].aval.size == 1:
    (axis, *_) = settings["dimension_numbers"].start_index_map
    starts, sizes = (
      [numbers[1] if i == axis else None for i in range(len(shape))],
      settings["slice_sizes"],
    )
  else:
    return None
  cut = [axis for axis, size in enumerate(shape) if sizes[axis] != size]
  start = starts[cut[0]] if len(cut) == 1 and sizes[cut[0]] == 1 else None
  return None if start is None else [(cut[0], start)]


# What the primitives with which programs compute an index do to numbers.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
  **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "rem": np.fmod},
  **{"max": np.maximum, "min": np.minimum, "lt": np.less, "rev": lambda x: x[::-1]},
  "clamp": lambda low, x, high: np.clip(x, low, high),
  "select_n": lambda which, *cases: np.choose(which, cases),
  **dict.fromkeys(
    ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"), lambda x: x
  ),
}
_MOST_NUMBERS = 4096


def _compute_numbers(
  equation: _types.Equation, numbers: list[tuple[int, ...] | None]
) -> tuple[int, ...] | None:
  """Returns the integers of an equation's result, or None if the program alone doesn't tell."""
  aval, compute = equation.outvars[0].aval, _ARITHMETIC.get(equation.primitive.name)
  if equation.primitive.name == "iota" and len(aval.shape) == 1 and aval.size <= _MOST_NUMBERS:
    return tuple(range(aval.size))
  if compute is None or None in numbers or len(aval.shape) > 1:
    return None
  sizes = {len(each) for each in numbers if each is not None} - {1}
  if len(sizes) > 1 or (
    equation.primitive.name == "broadcast_in_dim" and aval.size not in (1, *sizes)
  ):
    return None
  return tuple(map(int, np.ravel(compute(*map(np.array, numbers)))))


def _integers(value: jax.typing.ArrayLike) -> tuple[int, ...] | None:
  """Returns the entries of a constant vector of integers, or a constant integer, else None."""
  is_small = np.ndim(value) < 2 and 0 < np.size(value) <= _MOST_NUMBERS
  if isinstance(value, jax.core.Tracer) or not is_small:
    return None
  array = np.asarray(value) if jnp.issubdtype(jnp.result_type(value), jnp.integer) else None
  return None if array is None else tuple(map(int, array.ravel()))


def _unite(sets: Iterable[int]) -> int:
  return functools.reduce(operator.or_, sets, 0)
