"""Decides from a trace of a model which BatchNorms are removed; used by the NNX and Linen forms."""

from optax_boost._methods._less_bn._flow import (
  mark_norm as mark_norm,
  on_arrays as on_arrays,
  trace_flows as trace_flows,
)
from optax_boost._methods._less_bn._plan import (
  Plan as Plan,
  PlanCallback as PlanCallback,
  Predicate as Predicate,
  Trace as Trace,
  make_plan as make_plan,
)
