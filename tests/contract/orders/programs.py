"""Compositions: each is built twice, for the interpreter and from `optax_boost` and optax.

A composition is a base optimizer and the names around it, from the outside in: of wrappers of
`optax_boost`, each with its arguments (`WAYS`), and of what optax, or a user, puts around an
optimizer (`HOLDERS`). Wrappers without a holder between them are one step.

All learning rates, gradients and weights are short binary fractions, so that SGD is nearly exact
in float32, and exact where params in bfloat16 are rounded.
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
from tests.contract.orders import interpreter as eager

# Three leaves, each a group of `freeze_layers`; `optax.masked` and `optax.partition` hide the body.
GROUPS = ("body", "neck", "head")
SHAPES = {"body": (2,), "neck": (3,), "head": (2, 2)}
HIDDEN = ("body",)
MICRO_STEPS = 12
# The last micro-step of a window of two, and the first of another. The head never freezes, so
# every door sees that the gradient is bad; a bad number in a frozen neck does no harm.
NAN_STEP, INFINITE_STEP = 3, 8
# A gradient eight times as long as the others: with 8 bits its sum with another one is exact.
SPIKE_STEP = 6
RATE = 2.0**-3


def initial_params():
  rng = np.random.default_rng(0)
  return {name: rng.integers(-16, 17, shape) / 8 for name, shape in SHAPES.items()}


def gradients(steps=MICRO_STEPS, bad=True):
  """The gradients of the micro-steps: a NaN in one, infinities in another, a spike in a third."""
  rng = np.random.default_rng(1)
  signs = rng.choice([-1, 1], (steps, 9))
  flat = signs * rng.integers(1, 17, (steps, 9)) / 8
  if bad:
    flat[SPIKE_STEP] *= 8
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


# The fifth is a spike, and the last but one is far above the others.
LOSSES = (2.0, 1.5, 1.75, 1.0, 8.0, 1.25, 1.5, 1.0, 1.25, 1.0, 3.0, 1.0)
WEIGHTS = (1, 3, 2, 5, 4, 1, 2, 2, 7, 1, 3, 6)


class Freezing(NamedTuple):
  """A schedule of `freeze_layers` with its depths and factors, from the card's words."""

  schedule: optax_boost.FreezeSchedule
  depths: tuple[int, ...]
  factors: tuple[tuple[float, ...], ...]


STEPS = range(MICRO_STEPS + 1)
ONES = tuple((1.0,) * len(GROUPS) for _ in STEPS)


def freezings():
  """The schedules by name, for three groups."""
  turns = (0, 0, 1, 2)  # continuous: half of the steps, one and two groups deep
  interval = optax_boost.interval_freezing(3, 0.5)
  times = (6, 9, 12)  # progressive: from half of twelve steps on, in equal distances
  return {
    "fixed": Freezing(optax_boost.fixed_freezing(3, 1), (1,) * len(STEPS), ONES),
    "continuous": Freezing(
      optax_boost.continuous_freezing(3, 0.5), tuple(turns[t % 4] for t in STEPS), ONES
    ),
    # Its depths are drawn, so they are the schedule's own; `test_orders` checks when it freezes.
    "interval": Freezing(interval, tuple(int(interval.frozen_groups(t)) for t in STEPS), ONES),
    "progressive": Freezing(
      optax_boost.progressive_freezing(3, 12),
      tuple(sum(t >= end for end in times[:2]) for t in STEPS),
      tuple(tuple(0.5 * (1 + np.cos(np.pi * min(t / end, 1))) for end in times) for t in STEPS),
    ),
    "gradual": Freezing(
      optax_boost.gradual_unfreezing(3, 3), tuple(max(2 - t // 3, 0) for t in STEPS), ONES
    ),
  }


FREEZINGS = freezings()


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

BASES = ("sgd", "momentum", "adam")


def build_base(base, learning_rate):
  if isinstance(base, Poisoned):
    return base.build(learning_rate)
  if base == "adam":
    return optax.adam(learning_rate, b1=eager.Adam.b1, b2=eager.Adam.b2)
  return optax.sgd(learning_rate, momentum=eager.Momentum.decay if base == "momentum" else None)


def interpret_base(base, rate, run):
  if isinstance(base, Poisoned):
    return base.interpret(rate, run)
  return {"sgd": eager.Sgd, "momentum": eager.Momentum, "adam": eager.Adam}[base](rate, run)


class Way(NamedTuple):
  """A way to use a wrapper.

  Attributes:
    factory: the wrapper's name.
    arguments: its arguments for the interpreter.
    wrap: the wrapper with these arguments.
  """

  factory: str
  arguments: dict[str, Any]
  wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]

  @property
  def slot(self):
    rounds = self.factory in ("master_weights", "stochastic_rounding")
    return "precision" if rounds else self.factory


def window(every, not_finite="drop"):
  arguments = {"every": every if callable(every) else lambda _: every, "not_finite": not_finite}
  return Way(
    "accumulate", arguments, lambda tx: optax_boost.accumulate(tx, every, not_finite=not_finite)
  )


def way(factory, **arguments):
  """A wrapper whose arguments mean the same to the interpreter."""
  return Way(factory, arguments, lambda tx: getattr(optax_boost, factory)(tx, **arguments))


def precision(factory, check="gradients", **key):
  keeps = factory == "master_weights"
  arguments = {"keeps": keeps, "keyed": bool(key), "check": check}
  make = getattr(optax_boost, factory)
  return Way(factory, arguments, lambda tx: make(tx, check=check, **key))


def freezing(name):
  schedule, depths, factors = FREEZINGS[name]
  return Way(
    "freeze_layers",
    {"depths": depths, "factors": factors},
    lambda tx: optax_boost.freeze_layers(tx, list(GROUPS), schedule),
  )


KEY = {"key": 0}
SCALE = {"initial_scale": 4.0, "growth_interval": 3, "hysteresis": 1}
SCALE |= {"minimum": 1.0, "maximum": 8.0}
HYSTERESIS = {"initial_scale": 16.0, "growth_interval": 7, "hysteresis": 2}
HYSTERESIS |= {"minimum": 8.0, "maximum": 64.0}
WAYS = {
  "accumulate": window(2),
  "accumulate_keep": window(3, "keep"),
  "accumulate_varying": window(lambda inner_count: 1 + inner_count % 3),
  "accumulate_one": window(1),
  "accumulate_restart": window(3, "restart"),
  "dynamic_loss_scale": way("dynamic_loss_scale", **SCALE),
  "dynamic_loss_scale_hysteresis": way("dynamic_loss_scale", **HYSTERESIS),
  "dynamic_loss_scale_checked": way("dynamic_loss_scale", **SCALE, check="updates"),
  "master_weights": precision("master_weights"),
  "stochastic_rounding": precision("stochastic_rounding", **KEY),
  "master_weights_key": precision("master_weights", **KEY),
  "master_weights_checked": precision("master_weights", "updates"),
  "stochastic_rounding_checked": precision("stochastic_rounding", "updates", **KEY),
  "master_weights_key_checked": precision("master_weights", "updates", **KEY),
  "average_params": way("average_params", start=2, every=2),
  "average_params_decay": way("average_params", decay=0.75),
  "average_params_every": way("average_params", decay=0.5, every=3),
  "skip_spikes": way("skip_spikes", factor=3.0, decay=0.5, start=2),
  "skip_spikes_early": way("skip_spikes", factor=1.2, decay=0.75, start=1),
  "skip_spikes_loss": way("skip_spikes", factor=3.0, decay=0.5, loss_factor=4.0, start=2),
  "layerwise_decay": Way(
    "layerwise_decay",
    {"decay": 0.5},
    lambda tx: optax_boost.layerwise_decay(tx, list(GROUPS), 0.5),
  ),
  **{f"freeze_{name}": freezing(name) for name in FREEZINGS},
}
# The ways to fill each slot.
SLOTS = {w.slot: [n for n in WAYS if WAYS[n].slot == w.slot] for w in WAYS.values()}
SUBSETS = tuple(
  subset for size in range(1, len(SLOTS) + 1) for subset in itertools.combinations(SLOTS, size)
)

# Trees, not functions: `freeze_layers` maps over states with placeholders for the params.
MASK = {name: name not in HIDDEN for name in SHAPES}
LABELS = {name: "hidden" if name in HIDDEN else "seen" for name in SHAPES}
# More than there are: a step after giving up is made, which its state does not tell.
MOST_ERRORS = 20


class LoggedState(NamedTuple):
  """State of :func:`logged`."""

  calls: jax.Array
  held: optax.OptState


def logged(inner):
  """A user's holder, which passes everything on and counts its calls."""
  inner = optax.with_extra_args_support(inner)

  def update(updates, state, params=None, **extra_args):
    updates, held = inner.update(updates, state.held, params, **extra_args)
    return updates, LoggedState(state.calls + 1, held)

  def init(params):
    return LoggedState(jnp.zeros([], jnp.int32), inner.init(params))

  return optax.GradientTransformationExtraArgs(init, update)


class Holder(NamedTuple):
  """What holds an optimizer, and is no step.

  Attributes:
    build: makes it; it gets a function of the learning rate that makes the optimizer, and the rate.
    interpret: the same for the interpreter; the rate is an `eager.Rate`.
  """

  build: Callable[..., optax.GradientTransformation]
  interpret: Callable[..., Any]


def chain(before=(), after=(), build=optax.chain):
  """A chain: what is before and after the optimizer, each for optax and for the interpreter."""

  def members(make, rate, which):
    return [*(pair[which] for pair in before), make(rate), *(pair[which] for pair in after)]

  return Holder(
    lambda make, rate: build(*members(make, rate, 0)),
    lambda make, rate, run: eager.Chain(*members(make, rate, 1)),
  )


def named(*members):
  return optax.named_chain(*((f"member{i}", member) for i, member in enumerate(members)))


def half_by_turns(count):
  """A schedule of the learning rate: the whole rate and its half, by turns."""
  return RATE * (1 - 0.5 * (count % 2))


@dataclasses.dataclass
class HalfOf:
  """Half of a rate that something else may change."""

  rate: eager.Rate

  @property
  def value(self):
    return self.rate.value / 2


def injected(make, rate, run):
  own = eager.Rate(RATE)
  return eager.InjectHyperparams(make(own), own, half_by_turns)


def clip(largest):
  return [(optax.clip_by_global_norm(largest), eager.Clip(largest))]


LARGEST_NORM = 2.0
HOLDERS = {
  "clip": chain(before=clip(LARGEST_NORM)),
  "chain_of_one": chain(),
  "named_chain_of_one": chain(build=named),
  "named_chain": chain(before=clip(LARGEST_NORM), build=named),
  "clip_after": chain(after=clip(LARGEST_NORM * RATE / 2)),
  "named_clip_after": chain(after=clip(LARGEST_NORM * RATE / 2), build=named),
  "identity_after": chain(after=[(optax.identity(), eager.Identity())]),
  "logged": Holder(
    lambda make, rate: logged(make(rate)), lambda make, rate, run: eager.Chain(make(rate))
  ),
  "multi_steps": Holder(
    lambda make, rate: optax.MultiSteps(make(rate), 2).gradient_transformation(),
    lambda make, rate, run: eager.MultiSteps(make(rate), 2),
  ),
  "apply_if_finite": Holder(
    lambda make, rate: optax.apply_if_finite(make(rate), MOST_ERRORS),
    lambda make, rate, run: eager.ApplyIfFinite(make(rate), MOST_ERRORS),
  ),
  "masked": Holder(
    lambda make, rate: optax.masked(make(rate), MASK),
    lambda make, rate, run: eager.Masked(make(rate), HIDDEN),
  ),
  "partition": Holder(
    lambda make, rate: optax.partition({"seen": make(rate), "hidden": optax.sgd(RATE)}, LABELS),
    lambda make, rate, run: eager.Partition(eager.Sgd(eager.Rate(RATE), run), make(rate), HIDDEN),
  ),
  "inject_hyperparams": Holder(
    lambda make, rate: optax.inject_hyperparams(lambda learning_rate: make(learning_rate))(
      learning_rate=half_by_turns
    ),
    injected,
  ),
  "lookahead": Holder(
    lambda make, rate: optax.lookahead(make(rate), sync_period=3, slow_step_size=0.5),
    lambda make, rate, run: eager.Lookahead(make(rate), 3, 0.5),
  ),
  "switch_after": Holder(
    lambda make, rate: optax_boost.switch_after(5, make(rate), make(rate / 2)),
    lambda make, rate, run: eager.SwitchAfter(5, make(rate), make(HalfOf(rate))),
  ),
  "laperm": Holder(
    lambda make, rate: optax_boost.laperm(make(rate), 2, exclude="body|neck"),
    lambda make, rate, run: eager.Laperm(make(rate), ("head",), 2),
  ),
}


def build(order, base, learning_rate=RATE):
  """The composition of `optax_boost` and optax."""
  if not order:
    return build_base(base, learning_rate)
  name, *inside = order
  make = functools.partial(build, inside, base)
  if name in WAYS:
    return WAYS[name].wrap(make(learning_rate))
  return HOLDERS[name].build(make, learning_rate)


def interpret(order, base, run, rate=None):
  """The same composition for the interpreter: wrappers that follow each other are one step."""
  rate = eager.Rate(RATE) if rate is None else rate
  ours = list(itertools.takewhile(WAYS.__contains__, order))
  if ours:
    slots = {WAYS[name].slot: WAYS[name].arguments for name in ours}
    assert len(slots) == len(ours), order
    return eager.Step(interpret(order[len(ours) :], base, run, rate), run, GROUPS, slots)
  if not order:
    return interpret_base(base, rate, run)
  name, *inside = order
  return HOLDERS[name].interpret(lambda rate: interpret(inside, base, run, rate), rate, run)


# What computes in the params' dtype is exact in bfloat16 only so.
EXACT_IN_BFLOAT16 = ("accumulate", "accumulate_one", "freeze_continuous", "freeze_gradual")


def factory(name):
  return WAYS[name].factory


def nesting(subset, seed, dtype="float32"):
  """The slots of a subset in a random nesting, each filled in a random way."""
  draw = random.Random(f"{subset} {seed}")

  def choose(slot):
    ways = SLOTS[slot]
    if dtype == "bfloat16" and "precision" not in subset:
      ways = [
        w for w in ways if slot not in ("accumulate", "freeze_layers") or w in EXACT_IN_BFLOAT16
      ]
    return draw.choice(ways)

  order = [choose(slot) for slot in subset]
  draw.shuffle(order)
  return tuple(order)


def bases(order, dtype="float32"):
  """The optimizers that compute exactly, or in float32."""
  rounds = any(name in WAYS and WAYS[name].slot == "precision" for name in order)
  return ("sgd",) if dtype == "bfloat16" and not rounds else BASES
