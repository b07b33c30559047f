"""A graph of the operations on the data in a traced model.

Nodes are numbered in the order of the program, so every node's inputs have smaller numbers:

  node 0       the data: one input of the model
  inputs(n)    the nodes from which n is computed; params, constants and state are not nodes
  ancestors(n) all nodes from which a path leads to n, as the bits of an integer
  gate(n)      the last node that all paths from the data to n pass: n's immediate dominator. If a
               residual block ends in n = a + b, the paths to a and to b part at gate(n).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from optax_boost._foundation import _paths, _types
from optax_boost._trace import _jaxpr

_MARK = "optax_boost.norm:"
_WEIGHTS = ("conv_general_dilated", "dot_general", "ragged_dot")
_WINDOWS = ("cumsum", "cummax", "cumprod", "sort", "rev", "reduce_window")


def mark_norm(x: jax.Array, path: str) -> jax.Array:
  """Marks and returns `x`, the result of a normalization, so that the graph gets a node "norm".

  `path` is the path of the normalization's module, which becomes the path of the node.
  """
  return checkpoint_name(x, _MARK + path)


class Node(NamedTuple):
  """One operation on the data."""

  kind: str  # the primitive's name, or "norm" for a marked normalization
  inputs: tuple[int, ...]
  shape: tuple[int, ...]  # the shape of the operation's result
  path: str = ""  # the module of a normalization, or the param of a layer with weights


class DataGraph:
  """The graph of the operations on one input of a model; the module's docstring explains it."""

  def __init__(self, nodes: Sequence[Node], outputs: frozenset[int]):
    self.nodes = nodes
    self.outputs = outputs
    self.norms = [n for n, node in enumerate(nodes) if node.kind == "norm"]
    self.ancestors = [0] * len(nodes)
    self.gate = [0] * len(nodes)
    for n, node in enumerate(nodes[1:], 1):
      gate = node.inputs[0]
      for operand in node.inputs:
        self.ancestors[n] |= self.ancestors[operand] | 1 << operand
        # `gate` is the gate of n for the operands before `operand`. In each round, the later of the
        # nodes `gate` and `operand` is replaced by its own gate, which comes before it. The loop
        # ends at the last gate that both have in common.
        while gate != operand:
          gate, operand = self.gate[max(gate, operand)], min(gate, operand)
      self.gate[n] = gate

  def has_weights(self, n: int) -> bool:
    """Returns whether node `n` multiplies data by weights: a convolution or a matrix product."""
    return self.nodes[n].kind in _WEIGHTS and len(self.nodes[n].inputs) == 1

  def between(self, start: int, end: int) -> list[int]:
    """Returns the nodes on all paths from `start` to `end`, without `start` and with `end`."""
    inside = self.ancestors[end] | 1 << end
    return [n for n in range(start + 1, end + 1) if inside >> n & 1 and self.leads_to(start, n)]

  def leads_to(self, start: int, end: int) -> bool:
    """Returns whether `end` is computed from `start`."""
    return bool(self.ancestors[end] >> start & 1)

  def source(self, n: int) -> int:
    """Returns the node that `n` reads, skipping elementwise operations (biases, activations)."""
    current = self.nodes[n].inputs[0]
    while current:
      gate = self.gate[current]
      if not all(self._elementwise(m) for m in self.between(gate, current)):
        break
      current = gate
    return current

  def _elementwise(self, n: int) -> bool:
    node = self.nodes[n]
    if node.kind in ("norm", *_WEIGHTS) or node.kind.startswith(_WINDOWS):
      return False
    return all(self.nodes[i].shape == node.shape for i in node.inputs)


def trace_data_graphs(
  apply: Callable[..., Any],
  params: _types.Params,
  state: _types.ModelState,
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
) -> list[DataGraph]:
  """Traces ``apply(params, state, *args, **kwargs)``; returns a graph per array in the inputs.

  Arrays may be abstract. Inputs that are not arrays (flags, strings) are passed unchanged.
  """
  call, arrays = on_arrays(apply, args, kwargs)
  closed = jax.make_jaxpr(call)((params, state), *arrays)
  paths = _paths.leaf_paths(params)
  first = len(closed.jaxpr.invars) - len(arrays)
  return [_follow(closed, paths, first + i) for i in range(len(arrays))]


def is_abstract(leaf: _types.Unchecked) -> bool:
  """Returns whether an input of a model is an array or an abstract array."""
  return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def on_arrays(
  function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
  """Separates arrays from other arguments; returns a function ``call``, and the list of arrays.

  The list has the arrays in `args` and `kwargs`. ``call(first, *arrays)`` returns
  ``function(*first, *args, **kwargs)``, with `arrays` in place of the arrays in `args` and
  `kwargs`.
  """
  leaves, structure = jax.tree.flatten((args, kwargs))
  arrays = {i: leaf for i, leaf in enumerate(leaves) if is_abstract(leaf)}

  def call(first: tuple[Any, ...], *values: Any) -> Any:
    full = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
    args, kwargs = jax.tree.unflatten(structure, full.values())
    return function(*first, *args, **kwargs)

  return call, list(arrays.values())


class _Value(NamedTuple):
  """A variable in the traced program."""

  node: int | None = None  # the node that computes the variable; None if no data is used
  params: tuple[str, ...] = ()  # without a node, the paths of the params that are used


class _Follower(_jaxpr.Interpreter[_Value]):
  """Walks over a traced program, and appends a node to `nodes` for each operation on the data.

  Of a loop, the operations of one iteration become nodes.
  """

  def __init__(self, nodes: list[Node]):
    self._nodes = nodes

  def constant(self, value: _types.Unchecked) -> _Value:
    return _Value()

  def join(self, values: Sequence[_Value]) -> _Value:
    shapes = [self._nodes[v.node].shape for v in values if v.node is not None]
    return self._note("cond", values, shapes[0] if shapes else ())

  def operation(self, equation: _types.Equation, inputs: list[_Value]) -> list[_Value]:
    kind, path = equation.primitive.name, ""
    if kind == "name" and equation.params["name"].startswith(_MARK):
      kind, path = "norm", equation.params["name"].removeprefix(_MARK)
    shape = getattr(equation.outvars[0].aval, "shape", ()) if equation.outvars else ()
    return [self._note(kind, inputs, shape, path)] * len(equation.outvars)

  def _note(
    self, kind: str, inputs: Sequence[_Value], shape: tuple[int, ...], path: str = ""
  ) -> _Value:
    params = tuple(dict.fromkeys(path for value in inputs for path in value.params))
    data = tuple(dict.fromkeys(value.node for value in inputs if value.node is not None))
    if not data:
      return _Value(params=params)
    path = path or (params[0] if kind in _WEIGHTS and params else "")
    self._nodes.append(Node(kind, data, shape, path))
    return _Value(len(self._nodes) - 1)


def _follow(closed: _types.Jaxpr, paths: Sequence[str], data: int) -> DataGraph:
  """Returns the graph of the operations on one input of a traced program.

  `data` is the number of this input. The first inputs of the program are the params at `paths`.
  """
  values = [_Value(params=(path,)) for path in paths]
  values += [_Value()] * (len(closed.jaxpr.invars) - len(paths))
  values[data] = _Value(0)
  nodes = [Node("input", (), closed.jaxpr.invars[data].aval.shape)]
  outputs = _Follower(nodes).run(closed, values)
  return DataGraph(nodes, frozenset(v.node for v in outputs if v.node is not None))
