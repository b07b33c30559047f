"""Fewer BatchNorms: which of them go, found from a trace of the model; shared by all of Flax."""

from optax_boost._less_bn._flow import mark_norm as mark_norm
from optax_boost._less_bn._flow import on_arrays as on_arrays
from optax_boost._less_bn._flow import trace_flows as trace_flows
from optax_boost._less_bn._plan import Plan as Plan
from optax_boost._less_bn._plan import Predicate as Predicate
from optax_boost._less_bn._plan import Trace as Trace
from optax_boost._less_bn._plan import make_plan as make_plan
from optax_boost._less_bn._plan import recorded_plans as recorded_plans
