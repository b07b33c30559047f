"""Compositions: each is built twice, for the interpreter and from `optax_boost` and optax.

A composition is a base optimizer and the names of the wrappers around it, from the outside in.
All learning rates, gradients and weights are short binary fractions, so that SGD is nearly exact
in float32, and exact where params in bfloat16 are rounded.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
from tests.contract import registry
from tests.contract.orders import interpreter as eager

# Three leaves, each a group of `freeze_layers`; `optax.masked` and `optax.partition` hide the body.
GROUPS = ("body", "neck", "head")
SHAPES = {"body": (2,), "neck": (3,), "head": (2, 2)}
HIDDEN = ("body",)
MICRO_STEPS = 12
# The last micro-step of a window of two, and the first of another. The head never freezes, so
# every door sees that the gradient is bad; a bad number in a frozen neck does no harm.
NAN_STEP, INFINITE_STEP = 3, 8
RATE = 2.0**-3


def initial_params():
  rng = np.random.default_rng(0)
  return {name: rng.integers(-16, 17, shape) / 8 for name, shape in SHAPES.items()}


def gradients(steps=MICRO_STEPS, bad=True):
  """The gradients of the micro-steps: a NaN in one of them, infinities in another."""
  rng = np.random.default_rng(1)
  signs = rng.choice([-1, 1], (steps, 9))
  flat = signs * rng.integers(1, 17, (steps, 9)) / 8
  ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
  grads = [
    {
      name: leaf.reshape(SHAPES[name])
      for name, leaf in zip(SHAPES, np.split(row, ends), strict=True)
    }
    for row in flat
  ]
  if bad:
    grads[NAN_STEP]["head"][0, 1] = np.nan
    grads[INFINITE_STEP]["neck"][2] = np.inf
    grads[INFINITE_STEP]["head"][1, 0] = -np.inf
  return grads


WEIGHTS = (1, 3, 2, 5, 4, 1, 2, 2, 7, 1, 3, 6)


def half_by_turns(count):
  """A schedule of the learning rate: the whole rate and its half, by turns."""
  return RATE * (1 - 0.5 * (count % 2))


@dataclasses.dataclass(frozen=True)
class Freezing:
  """A schedule of `freeze_layers` with its depths and factors, from the card's words."""

  schedule: optax_boost.FreezeSchedule
  depths: tuple[int, ...]
  factors: tuple[tuple[float, ...], ...]


STEPS = range(MICRO_STEPS + 1)
ONES = tuple((1.0,) * len(GROUPS) for _ in STEPS)


@functools.cache
def freezings():
  """The schedules by name, for three groups."""
  turns = (0, 0, 1, 2)  # continuous: half of the steps, one and two groups deep
  interval = optax_boost.interval_freezing(3, 0.5)
  key = jax.random.key(0)
  times = (6, 9, 12)  # progressive: from half of twelve steps on, in equal distances
  return {
    "fixed": Freezing(optax_boost.fixed_freezing(3, 1), (1,) * len(STEPS), ONES),
    "continuous": Freezing(
      optax_boost.continuous_freezing(3, 0.5), tuple(turns[t % 4] for t in STEPS), ONES
    ),
    # Its depths are drawn, so they are the schedule's own; `test_orders` checks when it freezes.
    "interval": Freezing(
      interval, tuple(int(interval.frozen_groups(np.int32(t), key)) for t in STEPS), ONES
    ),
    "progressive": Freezing(
      optax_boost.progressive_freezing(3, 12),
      tuple(sum(t >= end for end in times[:2]) for t in STEPS),
      tuple(tuple(0.5 * (1 + np.cos(np.pi * min(t / end, 1))) for end in times) for t in STEPS),
    ),
    "gradual": Freezing(
      optax_boost.gradual_unfreezing(3, 3), tuple(max(2 - t // 3, 0) for t in STEPS), ONES
    ),
  }


BASES = ("sgd", "momentum", "adam")


def build_base(name, learning_rate):
  if isinstance(name, Poisoned):
    return name.build(learning_rate)
  if name == "sgd":
    return optax.sgd(learning_rate)
  if name == "momentum":
    return optax.sgd(learning_rate, momentum=eager.Momentum.decay)
  return optax.adam(learning_rate, b1=eager.Adam.b1, b2=eager.Adam.b2)


def interpret_base(name, rate, run):
  if isinstance(name, Poisoned):
    return name.interpret(rate, run)
  return {"sgd": eager.Sgd, "momentum": eager.Momentum, "adam": eager.Adam}[name](rate, run)


@dataclasses.dataclass(frozen=True)
class Poisoned:
  """An optimizer that makes NaN of an ordinary gradient: of `MARK`, in two micro-steps.

  Attributes:
    base: the optimizer after it, whose updates turn NaN, and its moments if it has any.
  """

  base: str

  def build(self, learning_rate):
    def poison(g):
      return jnp.where(jnp.abs(g - MARK) < 1e-3, jnp.nan, g)

    poisoned = optax.stateless(lambda updates, params: jax.tree.map(poison, updates))
    return optax.chain(poisoned, build_base(self.base, learning_rate))

  def interpret(self, rate, run):
    return eager.Chain(eager.Poison(MARK), interpret_base(self.base, rate, run))

  def gradients(self):
    grads = gradients(bad=False)
    # The whole of a window of two.
    grads[4]["head"][0, 0] = grads[5]["head"][0, 0] = MARK
    return grads


# No other gradient has this value, and no mean of two others.
MARK = 2.125
POISONED = (
  ("master_weights_checked",),
  ("master_weights_key_checked",),
  ("stochastic_rounding_checked",),
  ("dynamic_loss_scale_checked",),
  ("master_weights_checked", "accumulate"),
  ("stochastic_rounding_checked", "accumulate"),
  ("accumulate", "master_weights_checked"),
  ("accumulate", "dynamic_loss_scale_checked"),
  ("dynamic_loss_scale_checked", "accumulate"),
  ("dynamic_loss_scale_checked", "master_weights_checked"),
  ("dynamic_loss_scale_checked", "stochastic_rounding_checked"),
  ("dynamic_loss_scale_checked", "master_weights"),
  ("dynamic_loss_scale", "master_weights_checked"),
  ("master_weights_checked", "freeze_continuous"),
  ("freeze_continuous", "master_weights_checked"),
  ("layerwise_decay", "dynamic_loss_scale_checked"),
  ("average_params", "master_weights_checked"),
  ("average_params", "stochastic_rounding_checked"),
  ("average_params", "dynamic_loss_scale_checked"),
  ("average_params", "accumulate", "master_weights_checked"),
  ("master_weights_checked", "dynamic_loss_scale"),
)

# What each wrapper is made with: every name is one way to use it.
EVERY = {
  "accumulate": 2,
  "accumulate_keep": 3,
  "accumulate_varying": lambda inner_count: 1 + inner_count % 3,
  "accumulate_one": 1,
}
SCALES = {
  "dynamic_loss_scale": {
    "initial_scale": 4.0, "growth_interval": 3, "hysteresis": 1, "minimum": 1.0, "maximum": 8.0
  },
  "dynamic_loss_scale_hysteresis": {
    "initial_scale": 16.0, "growth_interval": 7, "hysteresis": 2, "minimum": 8.0, "maximum": 64.0
  },
  "dynamic_loss_scale_checked": {
    "initial_scale": 4.0, "growth_interval": 3, "hysteresis": 1, "minimum": 1.0, "maximum": 8.0,
    "check": "updates"
  },
}  # fmt: skip
MASTERS = {
  "master_weights": {},
  "master_weights_checked": {"check": "updates"},
  "master_weights_key": {"key": 0},
  "master_weights_key_checked": {"key": 0, "check": "updates"},
}
ROUNDINGS = {"stochastic_rounding": {}, "stochastic_rounding_checked": {"check": "updates"}}
AVERAGES = {
  "average_params": {"start": 2, "every": 2},
  "average_params_decay": {"decay": 0.75},
  "average_params_every": {"decay": 0.5, "every": 3},
}
FROM_ROWS = {name: (row, order) for row in registry.ROWS for name, order in row.orders.items()}
KINDS = {
  "accumulate": ("accumulate", "accumulate_keep", "accumulate_varying"),
  "dynamic_loss_scale": tuple(SCALES),
  "master_weights": ("master_weights", "master_weights_checked"),
  "master_weights_key": ("master_weights_key", "master_weights_key_checked"),
  "stochastic_rounding": tuple(ROUNDINGS),
  "average_params": tuple(AVERAGES),
  "freeze_layers": tuple(
    f"freeze_{name}" for name in ("continuous", "gradual", "interval", "fixed", "progressive")
  ),
  "layerwise_decay": ("layerwise_decay",),
  "switch_after": ("switch_after",),
  "laperm": ("laperm",),
  "multi_steps": ("multi_steps",),
  "apply_if_finite": ("apply_if_finite",),
  "clip": ("clip",),
  "clip_after": ("clip_after",),
  "masked": ("masked",),
  "partition": ("partition",),
  "inject_hyperparams": ("inject_hyperparams",),
  "lookahead": ("lookahead",),
  "identity_after": ("identity_after",),
}
KINDS |= {row.factory: tuple(row.orders) for row in registry.ROWS if row.orders}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
KIND_OF["accumulate_one"] = "accumulate"
SWITCH = 5
SYNC_EVERY = 2
LARGEST_NORM = 2.0
DECAY = 0.5
# More than there are: a step after giving up is made, which its state does not tell.
MOST_ERRORS = 20


def build(order, base, learning_rate=RATE):
  """The composition of `optax_boost` and optax."""
  if not order:
    return build_base(base, learning_rate)
  name, *inside = order

  def make(learning_rate=learning_rate):
    return build(inside, base, learning_rate)

  if name in FROM_ROWS:
    row, order = FROM_ROWS[name]
    return row.around(make(), **order.kwargs)
  if name in EVERY:
    not_finite = "keep" if name == "accumulate_keep" else "drop"
    return optax_boost.accumulate(make(), EVERY[name], not_finite=not_finite)
  if name in SCALES:
    return optax_boost.dynamic_loss_scale(make(), **SCALES[name])
  if name in AVERAGES:
    return optax_boost.average_params(make(), **AVERAGES[name])
  if name.startswith("freeze_"):
    schedule = freezings()[name.removeprefix("freeze_")].schedule
    return optax_boost.freeze_layers(make(), list(GROUPS), schedule)
  if name in MASTERS:
    return optax_boost.master_weights(make(), **MASTERS[name])
  if name in ROUNDINGS:
    return optax_boost.stochastic_rounding(make(), key=0, **ROUNDINGS[name])
  if name == "layerwise_decay":
    return optax_boost.layerwise_decay(make(), list(GROUPS), DECAY)
  if name == "switch_after":
    return optax_boost.switch_after(SWITCH, make(), make(learning_rate / 2))
  if name == "laperm":
    return optax_boost.laperm(make(), SYNC_EVERY, exclude="^(?!head)")
  if name == "multi_steps":
    return optax.MultiSteps(make(), 2).gradient_transformation()
  if name == "apply_if_finite":
    return optax.apply_if_finite(make(), MOST_ERRORS)
  if name == "clip":
    return optax.chain(optax.clip_by_global_norm(LARGEST_NORM), make())
  if name == "clip_after":
    return optax.chain(make(), optax.clip_by_global_norm(LARGEST_NORM * RATE / 2))
  if name == "identity_after":
    return optax.chain(make(), optax.identity())
  if name == "masked":
    return optax.masked(make(), MASK)
  if name == "partition":
    return optax.partition({"seen": make(), "hidden": optax.sgd(RATE)}, LABELS)
  if name == "inject_hyperparams":
    return optax.inject_hyperparams(lambda learning_rate: make(learning_rate))(
      learning_rate=half_by_turns
    )
  if name == "lookahead":
    return optax.lookahead(make(), sync_period=3, slow_step_size=0.5)
  raise ValueError(name)


# Trees, not functions: `freeze_layers` maps over states with placeholders for the params.
MASK = {name: name not in HIDDEN for name in SHAPES}
LABELS = {name: "hidden" if name in HIDDEN else "seen" for name in SHAPES}


def interpret(order, base, run, rate=None, rounding="nearest"):
  """The same composition for the interpreter; `rounding` as of `Run.land`."""
  rate = eager.Rate(RATE) if rate is None else rate
  if not order:
    return interpret_base(base, rate, run)
  name, *inside = order

  def make(rate=rate, rounding=rounding):
    return interpret(inside, base, run, rate, rounding)

  if name in FROM_ROWS:
    return FROM_ROWS[name][1].interpret(make())
  if name in EVERY:
    every = EVERY[name] if callable(EVERY[name]) else lambda _: EVERY[name]
    return eager.Accumulate(make(), every, "keep" if name == "accumulate_keep" else "drop")
  if name in SCALES:
    return eager.DynamicLossScale(make(), **SCALES[name])
  if name in AVERAGES:
    return eager.AverageParams(make(), run, rounding, **AVERAGES[name])
  if name.startswith("freeze_"):
    freezing = freezings()[name.removeprefix("freeze_")]
    return eager.FreezeLayers(make(), run, GROUPS, freezing.depths, freezing.factors)
  if name in MASTERS:
    keyed, check = "key" in MASTERS[name], MASTERS[name].get("check", "gradients")
    return eager.MasterWeights(make(rounding=None), run, keyed, check)
  if name in ROUNDINGS:
    return eager.StochasticRounding(make(rounding="random"), run, **ROUNDINGS[name])
  if name == "layerwise_decay":
    return eager.LayerwiseDecay(make(), GROUPS, DECAY)
  if name == "switch_after":
    return eager.SwitchAfter(SWITCH, make(), make(HalfOf(rate)))
  if name == "laperm":
    return eager.Laperm(make(), ("head",), SYNC_EVERY)
  if name == "multi_steps":
    return eager.MultiSteps(make(), 2)
  if name == "apply_if_finite":
    return eager.ApplyIfFinite(make(), MOST_ERRORS)
  if name == "clip":
    return eager.Chain(eager.Clip(LARGEST_NORM), make())
  if name == "clip_after":
    return eager.Chain(make(), eager.Clip(LARGEST_NORM * RATE / 2))
  if name == "identity_after":
    return eager.Chain(make(), eager.Identity())
  if name == "masked":
    return eager.Masked(make(), HIDDEN)
  if name == "partition":
    return eager.Partition(eager.Sgd(eager.Rate(RATE), run), make(), HIDDEN)
  if name == "inject_hyperparams":
    inner = eager.Rate(RATE)
    return eager.InjectHyperparams(make(inner), inner, half_by_turns)
  if name == "lookahead":
    return eager.Lookahead(make(), 3, 0.5)
  raise ValueError(name)


@dataclasses.dataclass
class HalfOf:
  """Half of a rate that something else may change."""

  rate: eager.Rate

  @property
  def value(self):
    return self.rate.value / 2


def kinds(order):
  return tuple(KIND_OF[name] for name in order)


# From the outside in: the order that docs/choosing.md advises, with optax's wrappers in it.
ADVISED = (
  "average_params", "master_weights", "apply_if_finite", "dynamic_loss_scale", "accumulate",
  "freeze_layers", "layerwise_decay", "clip",
)  # fmt: skip


@functools.cache
def triples():
  """Three wrappers in the advised order, and with two of them exchanged."""
  turns = {kind: itertools.cycle(names) for kind, names in KINDS.items()}
  # Stochastic rounding, or masters with a key, in the place of masters.
  masters = itertools.cycle(("master_weights", "stochastic_rounding", "master_weights_key"))

  def named(kind):
    return next(masters) if kind == "master_weights" else next(turns[kind])

  orders = []
  for a, b, c in itertools.combinations(ADVISED, 3):
    for order in ((a, b, c), (b, a, c), (a, c, b), (c, b, a)):
      orders.append(tuple(named(kind) for kind in order))
  return tuple(orders)


@functools.cache
def pairs():
  """All ordered pairs of kinds that optax allows; the ways to use a wrapper take turns."""
  turns = {kind: itertools.cycle(names) for kind, names in KINDS.items()}
  return tuple(
    tuple(next(turns[kind]) for kind in pair)
    for pair in itertools.permutations(KINDS, 2)
    # Their trees must be like the gradients', which optax.lookahead's pairs are not.
    if pair[0] not in ("masked", "partition", "apply_if_finite") or pair[1] != "lookahead"
  )


PRECISION = ("master_weights", "master_weights_key", "stochastic_rounding")
# With params in bfloat16. What computes in their dtype must do so exactly: no clipping outside of
# masters, no windows of three.
WITH_BFLOAT16 = (
  "accumulate", "dynamic_loss_scale", "average_params", "average_params_decay", "switch_after",
  "multi_steps", "apply_if_finite", "masked", "partition", "inject_hyperparams",
)  # fmt: skip
INSIDE_BFLOAT16 = (
  "freeze_continuous", "freeze_gradual", "freeze_progressive", "layerwise_decay", "clip",
  "clip_after", "accumulate_keep",
)  # fmt: skip
# Wrappers inside random rounding, of which every step or every second moves the params.
MOVING = ("accumulate", "dynamic_loss_scale", "average_params", "switch_after")


@functools.cache
def in_bfloat16():
  """Compositions with a wrapper that rounds; and averages of rounded params."""
  orders = [(name,) for name in (*PRECISION, "average_params", "average_params_decay")]
  for rounds in PRECISION:
    orders += [(name, rounds) for name in (*WITH_BFLOAT16, "freeze_continuous", "layerwise_decay")]
    orders += [(rounds, name) for name in WITH_BFLOAT16 + INSIDE_BFLOAT16]
    orders += [
      (rounds, "dynamic_loss_scale", "accumulate"),
      ("average_params", rounds, "accumulate"),
      ("average_params_decay", rounds, "dynamic_loss_scale"),
      ("dynamic_loss_scale", rounds, "accumulate"),
      ("accumulate", rounds, "freeze_continuous"),
    ]
  return tuple(orders)


def exact_bases(order):
  """The optimizers that compute exactly, or in float32."""
  return ("momentum", "adam") if set(PRECISION) & set(order) else ("sgd",)


# Kinds of pairs, and compositions with params in bfloat16, that once went wrong silently.
ONCE_WRONG = (
  ("freeze_layers", "accumulate"),
  ("freeze_layers", "multi_steps"),
  ("freeze_layers", "master_weights"),
  ("freeze_layers", "stochastic_rounding"),
  ("freeze_layers", "dynamic_loss_scale"),
  ("freeze_layers", "apply_if_finite"),
  ("average_params", "stochastic_rounding"),
  ("layerwise_decay", "master_weights"),
  ("layerwise_decay", "stochastic_rounding"),
  ("layerwise_decay", "average_params"),
  ("clip_after", "average_params"),
  ("clip", "dynamic_loss_scale"),
  ("switch_after", "stochastic_rounding"),
)
ONCE_WRONG_IN_BFLOAT16 = (
  ("average_params",),
  ("average_params_decay",),
  ("master_weights", "freeze_continuous"),
  ("stochastic_rounding", "freeze_continuous"),
  ("freeze_continuous", "master_weights_key"),
  ("apply_if_finite", "master_weights"),
  ("apply_if_finite", "stochastic_rounding"),
  ("average_params", "stochastic_rounding"),
  ("layerwise_decay", "master_weights"),
  ("master_weights_key", "accumulate"),
  ("master_weights_key", "dynamic_loss_scale"),
  ("master_weights_key", "freeze_continuous"),
  ("master_weights_key", "switch_after"),
  ("master_weights_key", "multi_steps"),
)
