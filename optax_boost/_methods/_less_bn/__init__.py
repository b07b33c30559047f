"""Decides from a trace of a model which BatchNorms are removed; used by the NNX and Linen forms."""

from optax_boost._methods._less_bn._flow import mark_norm as mark_norm
from optax_boost._methods._less_bn._flow import on_arrays as on_arrays
from optax_boost._methods._less_bn._flow import trace_flows as trace_flows
from optax_boost._methods._less_bn._plan import Plan as Plan
from optax_boost._methods._less_bn._plan import PlanCallback as PlanCallback
from optax_boost._methods._less_bn._plan import Predicate as Predicate
from optax_boost._methods._less_bn._plan import Trace as Trace
from optax_boost._methods._less_bn._plan import make_plan as make_plan
