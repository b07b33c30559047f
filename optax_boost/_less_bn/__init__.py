"""Fewer BatchNorms: which of them go, found from a trace of the model; shared by all of Flax."""

from optax_boost._less_bn._checkpoint import LoadReport
from optax_boost._less_bn._checkpoint import load_tree
from optax_boost._less_bn._flow import abstract
from optax_boost._less_bn._flow import mark_norm
from optax_boost._less_bn._flow import trace
from optax_boost._less_bn._plan import Layers
from optax_boost._less_bn._plan import LessBNPlan
from optax_boost._less_bn._plan import NormPlace
from optax_boost._less_bn._plan import Predicate
from optax_boost._less_bn._plan import check_call
from optax_boost._less_bn._plan import check_plan
from optax_boost._less_bn._plan import in_bottleneck
from optax_boost._less_bn._plan import make_plan

__all__ = [
  "Layers",
  "LessBNPlan",
  "LoadReport",
  "NormPlace",
  "Predicate",
  "abstract",
  "check_call",
  "check_plan",
  "in_bottleneck",
  "load_tree",
  "make_plan",
  "mark_norm",
  "trace",
]
