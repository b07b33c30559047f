"""Values that an argument must refuse, by the argument's kind."""

import dataclasses
from typing import Any

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
# Values of all types; each kind of argument refuses all but some of them.
THINGS = {
  "None": None,
  "text": "text",
  "whole": 3,
  "fraction": 0.5,
  "nan": NAN,
  "complex": 1j,
  "bool": True,
  "bytes": b"conv",
  "list": [3],
  "dict": {3: 0},
  "function": len,
  "vector": jnp.ones(2),
  "NumPy vector": np.ones(2),
  "bools": np.array([True, False]),
}
# A regular expression, a bracket that is not closed, characters in no order, no name.
BROKEN = {f"pattern {text}": text for text in ("conv$", "conv[", "conv[z-a]", "conv|")}


@dataclasses.dataclass(frozen=True)
class Kind:
  """Values by label: those that raise TypeError, those that raise ValueError, or one of both."""

  types: dict[str, Any]
  values: dict[str, Any] = dataclasses.field(default_factory=dict)
  either: dict[str, Any] = dataclasses.field(default_factory=dict)


def all_but(*labels: str, **more: Any) -> dict[str, Any]:
  """The things of all types but some, and more."""
  return {label: thing for label, thing in THINGS.items() if label not in labels} | more


def number(*out_of_range: float) -> Kind:
  """Real numbers. A concrete JAX scalar is checked like the number that it is."""
  values = {f"{value:g}": value for value in (NAN, INF, -INF, *out_of_range)}
  # NumPy before 2 warns that float32 has no such number.
  with np.errstate(over="ignore"):
    values |= {f"JAX {label}": jnp.asarray(value) for label, value in values.items()}
  values |= {f"NumPy {label}": np.asarray(values[label]) for label in ("nan", "inf")}
  values |= {"huge": HUGE, "-huge": -HUGE, "vector": jnp.ones(2), "NumPy vector": np.ones(2)}
  passing = ("whole", "fraction", "nan", "vector", "NumPy vector")
  objects = np.array(["a"], object)
  return Kind(all_but(*passing, objects=objects, complexes=jnp.ones([], complex)), values)


def count(minimum: int = 1, *, static: bool = False) -> Kind:
  """Whole numbers; `static`: no arrays, not even in range."""
  below = minimum - 1
  values = {f"{below}": below, "huge": HUGE, "-huge": -HUGE, "2**31": 2**31}
  in_jax = {f"JAX {below}": jnp.asarray(below), "whole vector": jnp.ones(2, int)}
  types = all_but("whole", whole_float=3.0, JAX_float=jnp.ones([]))
  if static:
    return Kind(types | in_jax | {"JAX 3": jnp.asarray(3)}, values)
  return Kind(types, values | in_jax)


FLAG = Kind(all_but("bool"))
NAME = Kind(all_but("text"), {"unknown": "nobody", "empty": ""})
FUNCTION = Kind(all_but("function"))
FLOAT_DTYPE = Kind(all_but(integers=jnp.int32, bools=bool, complexes=jnp.complex64))
TX = Kind(
  all_but(factory=optax.sgd, state=optax.sgd(0.1).init(jnp.ones(2)), class_=optax.MultiSteps)
)
KEYS = jax.random.split(jax.random.key(0))
SEED = Kind(all_but("whole"), {"huge": HUGE, "several": KEYS})
KEY = Kind(SEED.types | {"raw": jnp.zeros(2, jnp.uint32)}, SEED.values)
RNG = Kind(all_but(several=KEYS, scalar=jnp.ones([], jnp.uint32)))
AXIS_WORD = Kind(all_but("text", empty=(), mixed=("a", 3)))
AXIS_NAME = Kind(AXIS_WORD.types, {"unbound": "a", "two unbound": ("a", "b")})
# Arrays are masks to many, so two kinds of them must be no selector either.
SELECTOR = Kind(
  all_but("None", "text", in_jax=jnp.array([True, False]), tree={"conv": 1}, one=lambda tree: 3),
  BROKEN | {"another tree": {"other": True}, "too many": [True, False] * 4},
)
PATTERNS = Kind(all_but("text"), BROKEN | {f"list, {k}": ["conv", v] for k, v in BROKEN.items()})
GROUPS = Kind(all_but(empty=[]), {k: [v, "dense"] for k, v in BROKEN.items()})
BLOCKS = Kind(
  all_but(empty=[], mixed=["kernel", 3]),
  {f"list, {k}": ["kernel", v] for k, v in BROKEN.items()}
  | {
    "none": ["kernel", "bias", "nobody"],
    "left out": ["kernel"],
    "twice": ["kernel", "*"],
    "no such axis": ["kernel", "bias[:,*]"],
  },
)
TABLE = Kind({}, {}, all_but(negative=[-1], late=[2**31], empty=[], several=[0, 1]))
LAYERS = Kind(all_but())
BATCHES = Kind({}, {"empty": []})
OPT_STATE = Kind({}, {}, {"another one's": optax.adam(0.1).init({"w": jnp.ones(2)})})
MODEL = Kind(all_but(class_=nnx.Linear))
MODULE = Kind(all_but(class_=nn.Dense))
OPTIMIZER = Kind(all_but(tx=optax.sgd(0.1)))
RNG_NAMES = Kind({"text": "dropout", "whole": 3, "None": None, "numbers": (3,)})
