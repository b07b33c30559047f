"""Decides from a trace of a model which BatchNorms ``nnx.less_bn`` and ``linen.less_bn`` remove.

Modules:

  _data_graph  makes a graph of the operations on the data in a traced model
  _plan        decides which BatchNorms are removed, and which dense layer is normalized
"""

from optax_boost._methods._less_bn._data_graph import (
  mark_norm as mark_norm,
  on_arrays as on_arrays,
  trace_data_graphs as trace_data_graphs,
)
from optax_boost._methods._less_bn._plan import (
  Plan as Plan,
  PlanCallback as PlanCallback,
  Predicate as Predicate,
  Trace as Trace,
  make_plan as make_plan,
)
