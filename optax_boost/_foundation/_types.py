"""Names of the types that pass between the modules.

Most names of trees stand for ``Any``, since mypy finds no types of optax. The names tell a reader
what a tree holds.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
from jax.extend import core as jax_core

# Any pytree.
Tree: TypeAlias = object
# A tree. A function from SameTree to SameTree returns a tree with the structure of its argument.
SameTree = TypeVar("SameTree")
# Pytrees of arrays.
Params: TypeAlias = Any  # what a loss is differentiated by
Updates: TypeAlias = Any  # gradients, or what is added to params
OptState: TypeAlias = Any  # the state of a transformation
ModelState: TypeAlias = Any  # what a model keeps beside its params, such as running statistics
Batch: TypeAlias = Any  # the data that a loss reads
# A leaf of a pytree: an array, a number, or an `optax.MaskedNode` that a function takes as a leaf.
Leaf: TypeAlias = Any
# An array, or the shape and the dtype of an array.
ArrayOrShape: TypeAlias = jax.Array | jax.ShapeDtypeStruct
# The type of a traced array: the result of `jax.typeof`, or the `aval` of a jaxpr's variable.
ArrayType: TypeAlias = Any
# An entry of a partition spec: the mesh axes that shard an array's axis, if any.
SpecEntry: TypeAlias = Any
TreeDef: TypeAlias = jax.tree_util.PyTreeDef
# Arrays of shape (): a count of steps is an int32, a condition a bool, a loss or a norm a float.
IntScalar: TypeAlias = jax.Array
BoolScalar: TypeAlias = jax.Array
FloatScalar: TypeAlias = jax.Array
# A scalar bool: an array, or a Python or NumPy bool if the value is known while tracing.
Condition: TypeAlias = Any
# The value of an argument before its check, or a leaf of any type.
Unchecked: TypeAlias = object
# The path of a leaf or a node, as a tuple of JAX's keys.
KeyPath: TypeAlias = tuple[Any, ...]
Dtype: TypeAlias = jax.typing.DTypeLike
# Metrics by name, as a train step returns them.
Metrics: TypeAlias = dict[str, Any]
# `Jaxpr` is a traced program with its constants, `Program` one with or without its constants.
Jaxpr: TypeAlias = jax_core.ClosedJaxpr
Program: TypeAlias = jax_core.ClosedJaxpr | jax_core.Jaxpr
# An equation of a program. It is Any, not `JaxprEqn`, in which mypy finds no shapes of variables.
Equation: TypeAlias = Any
# A variable of a program, or a constant (a `Literal`); its attribute `aval` is its type.
Atom: TypeAlias = Any
# The extra arguments of ``update``, by name: all but updates, state and params.
ExtraArgs: TypeAlias = dict[str, Any]
# A user's loss, ``loss_fn(params, *args)``, or a function of the same arguments.
LossFn: TypeAlias = Callable[..., Any]
# A function of params and further arguments, such as the extra argument `value_fn`.
Closure: TypeAlias = Callable[..., Any]
# A function from a batch to its number of examples, by which the batch's gradient is weighted.
WeightFn: TypeAlias = Callable[[Any], Any]
# A function of the user from the shape and dtype of an array to the sharding of this array.
ShardingFn: TypeAlias = Callable[[jax.ShapeDtypeStruct], jax.sharding.Sharding]
# A function that tells whether a node of a tree counts as a leaf.
LeafTest: TypeAlias = Callable[[Any], bool]
AxisName: TypeAlias = str | tuple[str, ...]
# Names of mesh axes for all leaves, or for the leaves that a pattern matches.
AxisNames: TypeAlias = AxisName | Mapping[str, AxisName]
# A set of leaves: one or several patterns (`_patterns`), a tree of bools, a callable from the
# params to such a tree (optax's mask convention), or None for no leaf.
LeafSelector: TypeAlias = Any
