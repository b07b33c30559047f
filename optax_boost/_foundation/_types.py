"""Types of the trees and arrays that pass between the modules; imports nothing else of ours.

mypy finds no types of optax, so to it a name of optax's is ``Any``. The names here are not: a tree
is an ``object``, which only functions of ``jax.tree`` look into.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import TypeAlias
from typing import TypeVar

import jax
from jax.extend import core as jax_core

# Any pytree: params, gradients, states, batches, masks.
Tree: TypeAlias = object
# A tree that a function gives back with other leaves.
SameTree = TypeVar("SameTree")
# The value of an argument before its check, or a leaf of any type.
Unchecked: TypeAlias = object
# The path of a leaf or a node, in JAX's keys.
KeyPath: TypeAlias = tuple[Any, ...]
Dtype: TypeAlias = jax.typing.DTypeLike
# Metrics by name, as a train step returns them.
Metrics: TypeAlias = dict[str, Any]
# A traced program and an equation of it.
Jaxpr: TypeAlias = jax_core.ClosedJaxpr
Equation: TypeAlias = jax_core.JaxprEqn
# The arguments of ``update`` after its first three, by name.
ExtraArgs: TypeAlias = dict[str, Any]
# A loss as users write it, ``loss_fn(params, *args)``, or a function of the same arguments.
LossFn: TypeAlias = Callable[..., Any]
# A function of params and further arguments, as the extra argument `value_fn` is.
Closure: TypeAlias = Callable[..., Any]
# The size of a batch, which weighs its gradient.
WeightFn: TypeAlias = Callable[[Any], Any]
# Whether a node of a tree counts as a leaf.
LeafTest: TypeAlias = Callable[[Any], bool]
# Names of mesh axes.
AxisName: TypeAlias = str | tuple[str, ...]
# The same for all leaves, or by regular expression.
AxisNames: TypeAlias = AxisName | Mapping[str, AxisName]
# A set of leaves: one or several regular expressions that match whole segments of their paths (see
# `_base.compile_pattern`), a tree of bools, a callable from the params to such a tree (optax's mask
# convention), or None for no leaf.
LeafSelector: TypeAlias = Any
