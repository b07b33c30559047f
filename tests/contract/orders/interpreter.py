"""An eager interpreter of optimizers and their wrappers, in NumPy and float64.

It is written from the cards, the docstrings and optax's documentation, and imports nothing of
`optax_boost`, so it can say whether a composition of wrappers does what its parts promise. Clear
beats fast: a step is a function from gradients, state and params to updates, a new state and
whether a step was made; nothing is changed in place.

Params, gradients and updates are flat: a dict from a leaf's path to a float64 array. A leaf that
`optax.masked` hides is missing. The pair of `optax.lookahead` has the paths "fast/..." and
"slow/...", its gradients the paths without either. States are `State`s: the name of the state's
class, its fields, and the states inside it in the order of the class's fields.

The rule that every wrapper obeys: *a step that is not made changes nothing*, neither params nor
masters nor averages nor counts of steps made, and whether it was made travels outwards through
every nesting. What the cards leave open is decided here so:

- A step is made if the params may move by it. A chain makes a step if all its members do;
  `optax.partition` and `optax.masked` if any of their leaves may move.
- `accumulate` counts in `inner_count` the windows that ran the inner optimizer, also if the inner
  step was then skipped: the window is over, and `every(inner_count)` must go on. A window that ends
  in a skipped step is not a step for the wrappers around it.
- `count` of `freeze_layers`, `master_weights`, `stochastic_rounding` and `average_params` is of
  steps made, as their docstrings say. So a skipped step repeats its depth, also if `freeze_layers`
  is around the wrapper that skips.
- `growth_count` of a loss scale counts micro-steps without an overflow, also inside a window: the
  scale meets the gradient of each of them.
- A bad micro-batch that `accumulate` drops has no influence, whichever door it came through: its
  loss, which the train step passes as `value`, doesn't make the window's step a bad one.
- `master_weights`, `stochastic_rounding` and `dynamic_loss_scale` undo a step by whose updates or
  state a number would turn NaN or infinite, also if the gradient is finite, and not if an inner
  wrapper leaves a bad gradient out. That is the step of the optimizer, not the micro-batch that
  joins a window's sum: a bad one that `accumulate` keeps spoils its window, which ends without a
  step. The innermost of these wrappers around the step counts it.
- An `average_params` averages the masters inside `master_weights`, the rounded params elsewhere.
- An `average_params` in `optax.lookahead` averages the fast params before they are synchronized;
  in `optax.masked` and `optax.partition` the leaves that it sees.
- Masters follow params that something else has moved whenever `update` is called. In a step that
  is not made they may also follow later, so they are not compared then.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

# The counts with which Adam corrects its bias belong to the leaf: a leaf that was frozen until now
# starts with a count of one. False: they belong to the run.
COUNTS_OF_TRAINED_STEPS = True


@dataclasses.dataclass
class State:
  """A node of an optimizer state: the name of its class, its fields, the states inside it."""

  name: str
  fields: dict[str, Any]
  inner: list["State"] = dataclasses.field(default_factory=list)

  def after(self, inner: list["State"], **fields: Any) -> "State":
    return State(self.name, self.fields | fields, inner)

  def nodes(self) -> list["State"]:
    """This state and all inside it, each before those inside it."""
    return [self, *(node for state in self.inner for node in state.nodes())]

  def __getitem__(self, field: str) -> Any:
    return self.fields[field]


def tree_map(function, tree, *others):
  return {path: function(x, *(other[path] for other in others)) for path, x in tree.items()}


def zeros_like(tree):
  return tree_map(np.zeros_like, tree)


def all_finite(tree):
  return all(np.isfinite(x).all() for x in tree.values())


def leaf_name(path):
  """The name of a leaf, also in the pair of `optax.lookahead`."""
  return path.rpartition("/")[2]


def turned_bad(old, new):
  """Whether a number in a state would turn NaN or infinite."""

  def lost(o, n):
    return bool(np.any(np.isfinite(o) & ~np.isfinite(n)))

  for before, after in zip(old.nodes(), new.nodes(), strict=True):
    for name, field in before.fields.items():
      trees = field if isinstance(field, dict) else {"": field}
      news = after[name] if isinstance(field, dict) else {"": after[name]}
      if any(lost(x, news[path]) for path, x in trees.items()):
        return True
  return False


def step_inside(inner, grads, state, params, extra, *, judges=False):
  """A step of what one of our wrappers holds: updates, state, whether it was made, whether lost.

  A wrapper that judges undoes a step whose updates or state turn bad. The step is that of the first
  transformation inside that is none of `SEEN_THROUGH`; the innermost judge counts it as lost.
  """
  judged = judges or extra.get("_judged", False)
  if isinstance(inner, SEEN_THROUGH):
    losses = []
    wrapper_extra = extra | {"_judged": judged, "_losses": losses}
    updates, new, made = inner.update(grads, state, params, wrapper_extra)
    lost = bool(losses)
  else:
    named = {name: value for name, value in extra.items() if not name.startswith("_")}
    updates, new, made = inner.update(grads, state, params, named)
    for change in extra.get("_changes", ()):
      updates, new = change(updates, state, new)
    lost = judged and (not all_finite(updates) or turned_bad(state, new))
    if lost:
      updates, new, made = zeros_like(updates), state, False
  if lost and not judges and "_losses" in extra:
    extra["_losses"].append(lost)
  return updates, new, made, lost


@dataclasses.dataclass
class Rate:
  """A learning rate, which `optax.inject_hyperparams` changes between steps."""

  value: float


@dataclasses.dataclass
class Run:
  """What the nodes of an interpreter share.

  Attributes:
    dtype: of the params: "float32", in which nothing is rounded here, or "bfloat16".
    observed: the params that the tested program returned for the current step. Random rounding
      takes its outcome from them, if it is one that it could have had.
    trained: of each leaf the steps in which it was trained, for `COUNTS_OF_TRAINED_STEPS`.
    in_place: whether the door writes new params itself. Then a permutation of `laperm` heals params
      that are not finite, which no update can.
  """

  dtype: str = "float32"
  observed: dict[str, np.ndarray] | None = None
  trained: dict[str, int] | None = None
  in_place: bool = False

  def land(self, params, updates, old, new, rounding="nearest"):
    """The params after a step that led from one state to the next.

    `rounding` is "nearest", "random" inside `stochastic_rounding`, None for masters.
    """
    landed = tree_map(np.add, params, updates)
    for before, after in zip(old.nodes(), new.nodes(), strict=True):
      permutes = self.in_place and after.name == "LapermState" and after["synced"]
      if permutes and after["count"] != before["count"]:
        landed |= {
          path: np.where(np.isfinite(params[path]), landed[path], p)
          for path, p in after["permuted_params"].items()
          # Not of a pair of params.
          if path in landed
        }
    if rounding is None:
      return landed
    return self.round(landed) if rounding == "nearest" else self.round_randomly(landed)

  def round(self, tree):
    """Params rounded to the nearest numbers of their dtype.

    Next to the middle between two, as far as float32 may be off, to the observed one. In the very
    middle, where short binary fractions may be, to the even one.
    """
    if self.dtype == "float32":
      return tree

    def choose(path, x):
      low, high = neighbours(x)
      found = self.observed[path]
      off = abs(x - (low + high) / 2)
      close = (off > 0) & (off <= 2.0**-19 * abs(x))
      return np.where(close & ((found == low) | (found == high)), found, nearest(x))

    return {path: choose(path, x) for path, x in tree.items()}

  def round_randomly(self, tree):
    """Params rounded to one of their two neighbours: to the observed one, if it is one of these."""
    if self.dtype == "float32":
      return tree

    def choose(path, x):
      low, high = neighbours(x)
      found = self.observed[path]
      return np.where(found == low, low, np.where(found == high, high, nearest(x)))

    return {path: choose(path, x) for path, x in tree.items()}


def nearest(x):
  return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def neighbours(x):
  """The next bfloat16 at or below x, and at or above it."""
  near = nearest(x)
  half = near.astype(ml_dtypes.bfloat16)
  below = np.nextafter(half, ml_dtypes.bfloat16(-np.inf)).astype(np.float64)
  above = np.nextafter(half, ml_dtypes.bfloat16(np.inf)).astype(np.float64)
  return np.where(near <= x, near, below), np.where(near >= x, near, above)


# Optimizers.


class Sgd:
  """`optax.sgd` without momentum."""

  def __init__(self, rate, run):
    self.rate = rate

  def init(self, params):
    return State("", {})

  def update(self, grads, state, params, extra):
    return tree_map(lambda g: -self.rate.value * g, grads), state, True


class Momentum:
  """`optax.sgd` with momentum 1/2."""

  decay = 0.5

  def __init__(self, rate, run):
    self.rate = rate

  def init(self, params):
    return State("TraceState", {"trace": zeros_like(params)})

  def update(self, grads, state, params, extra):
    trace = tree_map(lambda g, t: g + self.decay * t, grads, state["trace"])
    return tree_map(lambda t: -self.rate.value * t, trace), state.after([], trace=trace), True


class Adam:
  """`optax.adam`, Kingma & Ba, "Adam", 2015.

  With decays whose powers float32 holds exactly: 1 - 0.999 has lost ten bits.
  """

  b1, b2, eps = 0.75, 0.9375, 1e-8

  def __init__(self, rate, run):
    self.rate, self.run = rate, run

  def init(self, params):
    fields = {"count": 0, "mu": zeros_like(params), "nu": zeros_like(params)}
    return State("ScaleByAdamState", fields)

  def update(self, grads, state, params, extra):
    count = state["count"] + 1
    mu = tree_map(lambda g, m: self.b1 * m + (1 - self.b1) * g, grads, state["mu"])
    nu = tree_map(lambda g, n: self.b2 * n + (1 - self.b2) * g**2, grads, state["nu"])

    def move(path):
      steps = count if self.run.trained is None else self.run.trained[path] + 1
      m = mu[path] / (1 - self.b1**steps)
      n = nu[path] / (1 - self.b2**steps)
      return -self.rate.value * m / (np.sqrt(n) + self.eps)

    updates = {path: move(path) for path in grads}
    return updates, state.after([], count=count, mu=mu, nu=nu), True


# Wrappers of optax.


class Chain:
  """`optax.chain`: each member sees the updates of the one before."""

  def __init__(self, *members):
    self.members = members

  def init(self, params):
    return State("", {}, [member.init(params) for member in self.members])

  def update(self, grads, state, params, extra):
    made, states = True, []
    for member, before in zip(self.members, state.inner, strict=True):
      grads, after, member_made = member.update(grads, before, params, extra)
      states.append(after)
      made = made and member_made
    return grads, state.after(states), made


class Identity:
  """`optax.identity`."""

  def init(self, params):
    return State("", {})

  def update(self, grads, state, params, extra):
    return grads, state, True


class Clip:
  """`optax.clip_by_global_norm`."""

  def __init__(self, largest):
    self.largest = largest

  def init(self, params):
    return State("", {})

  def update(self, grads, state, params, extra):
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    if norm < self.largest:
      return grads, state, True
    return tree_map(lambda g: g / norm * self.largest, grads), state, True


class Poison:
  """Makes NaN of the gradients near a number."""

  def __init__(self, mark):
    self.mark = mark

  def init(self, params):
    return State("", {})

  def update(self, grads, state, params, extra):
    return tree_map(lambda g: np.where(abs(g - self.mark) < 1e-3, np.nan, g), grads), state, True


class ApplyIfFinite:
  """`optax.apply_if_finite`: a gradient that is not finite makes no step, a few times in a row."""

  def __init__(self, inner, most_errors):
    self.inner, self.most_errors = inner, most_errors

  def init(self, params):
    fields = {"notfinite_count": 0, "last_finite": True, "total_notfinite": 0}
    return State("ApplyIfFiniteState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    finite = all_finite(grads)
    errors = 0 if finite else state["notfinite_count"] + 1
    updates, inner, made = zeros_like(grads), state.inner[0], False
    if finite or errors > self.most_errors:
      updates, inner, made = self.inner.update(grads, inner, params, extra)
    total = state["total_notfinite"] + (not finite)
    return (
      updates,
      state.after([inner], notfinite_count=errors, last_finite=finite, total_notfinite=total),
      made,
    )


class MultiSteps:
  """`optax.MultiSteps(...).gradient_transformation()`, which drops the extra arguments.

  It multiplies by zero between two steps, so a NaN reaches the updates, and stays in the sum.
  """

  def __init__(self, inner, every):
    self.inner, self.every = inner, every

  def init(self, params):
    fields = {"mini_step": 0, "gradient_step": 0, "acc_grads": zeros_like(params)}
    return State("MultiStepsState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    step = state["mini_step"]
    mean = tree_map(lambda g, a: a + (g - a) / (step + 1), grads, state["acc_grads"])
    updates, inner, made = self.inner.update(mean, state.inner[0], params, {})
    emit = step == self.every - 1
    return (
      tree_map(lambda u: emit * u, updates),
      state.after(
        [inner if emit else state.inner[0]],
        mini_step=(step + 1) % self.every,
        gradient_step=state["gradient_step"] + emit,
        acc_grads=tree_map(lambda a: (1 - emit) * a, mean),
      ),
      made and emit,
    )


class Masked:
  """`optax.masked`: the gradients of the leaves that it hides are their updates."""

  def __init__(self, inner, hidden):
    self.inner, self.hidden = inner, hidden

  def seen(self, tree):
    return {path: x for path, x in tree.items() if leaf_name(path) not in self.hidden}

  def init(self, params):
    return State("", {}, [self.inner.init(self.seen(params))])

  def update(self, grads, state, params, extra):
    seen = self.seen(grads)
    updates, inner, made = self.inner.update(seen, state.inner[0], self.seen(params), extra)
    return grads | updates, state.after([inner]), made or len(seen) < len(grads)


class Partition:
  """`optax.partition` in two: each transformation has leaves of its own."""

  def __init__(self, named, others, names):
    self.named, self.others, self.names = named, others, names

  def split(self, tree):
    named = {path: x for path, x in tree.items() if leaf_name(path) in self.names}
    return named, {path: x for path, x in tree.items() if path not in named}

  def init(self, params):
    named, others = self.split(params)
    return State("", {}, [self.named.init(named), self.others.init(others)])

  def update(self, grads, state, params, extra):
    members = zip(
      (self.named, self.others), self.split(grads), state.inner, self.split(params), strict=True
    )
    parts = [member.update(g, before, p, extra) for member, g, before, p in members]
    updates = {path: u for part, _, _ in parts for path, u in part.items()}
    return updates, state.after([s for _, s, _ in parts]), any(made for _, _, made in parts)


class InjectHyperparams:
  """`optax.inject_hyperparams` with a schedule of the learning rate."""

  def __init__(self, inner, rate, schedule):
    self.inner, self.rate, self.schedule = inner, rate, schedule

  def init(self, params):
    fields = {"count": 0, "learning_rate": self.schedule(0)}
    return State("InjectStatefulHyperparamsState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    self.rate.value = self.schedule(state["count"])
    updates, inner, made = self.inner.update(grads, state.inner[0], params, extra)
    fields = {"count": state["count"] + 1, "learning_rate": self.rate.value}
    return updates, state.after([inner], **fields), made


class Lookahead:
  """`optax.lookahead`: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", 2019."""

  def __init__(self, inner, period, slow_step):
    self.inner, self.period, self.slow_step = inner, period, slow_step

  @staticmethod
  def side(params, name):
    return {
      path.removeprefix(f"{name}/"): p for path, p in params.items() if path.startswith(f"{name}/")
    }

  def init(self, params):
    inner = self.inner.init(self.side(params, "fast"))
    return State("LookaheadState", {"steps_since_sync": 0}, [inner])

  def update(self, grads, state, params, extra):
    fast, slow = self.side(params, "fast"), self.side(params, "slow")
    updates, inner, made = self.inner.update(grads, state.inner[0], fast, {})
    sync = state["steps_since_sync"] == self.period - 1
    apart = tree_map(lambda f, u, s: f + u - s, fast, updates, slow)
    pair = {f"fast/{p}": u - sync * (1 - self.slow_step) * apart[p] for p, u in updates.items()}
    pair |= {f"slow/{p}": self.slow_step * sync * apart[p] for p in updates}
    steps = (state["steps_since_sync"] + 1) % self.period
    return pair, state.after([inner], steps_since_sync=steps), made or sync


# Wrappers of optax_boost.


class Accumulate:
  """`accumulate`: the weighted mean of the window's gradients, for one step of `inner`."""

  def __init__(self, inner, every, not_finite):
    self.inner, self.every, self.not_finite = inner, every, not_finite

  def init(self, params):
    fields = {"count": 0, "inner_count": 0, "weight_sum": 0.0}
    fields |= {"accumulator": zeros_like(params), "notfinite_count": 0}
    return State("AccumulateState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    inside = {node.name for node in state.inner[0].nodes()}
    extra = dict(extra)
    weight = extra.pop("weight", 1.0)
    good = all_finite(grads)
    # A loss scale inside must see an overflow, or it would never come down.
    keeps = self.not_finite == "keep" or "DynamicLossScaleState" in inside
    total, weights = state["accumulator"], state["weight_sum"]
    if good or keeps:
      total = tree_map(lambda t, g: t + weight * g, total, grads)
      weights += weight
    full = state["count"] + 1 >= self.every(state["inner_count"])
    updates, inner, made, ran = zeros_like(grads), state.inner[0], False, False
    if full and weights > 0:
      if "AccumulateState" in inside:
        extra["weight"] = weights
      mean = tree_map(lambda t: t / weights, total)
      updates, inner, made, _ = step_inside(self.inner, mean, inner, params, extra)
      ran = True
    if not made:
      updates = zeros_like(updates)
    return (
      updates,
      state.after(
        [inner],
        count=0 if full else state["count"] + 1,
        inner_count=state["inner_count"] + ran,
        weight_sum=0.0 if full else weights,
        accumulator=zeros_like(total) if full else total,
        notfinite_count=state["notfinite_count"] + (not good),
      ),
      made,
    )


class DynamicLossScale:
  """`dynamic_loss_scale`: Micikevicius et al., 2018; the hysteresis is Megatron's."""

  def __init__(
    self,
    inner,
    *,
    initial_scale,
    growth_interval,
    hysteresis,
    minimum,
    maximum,
    check="gradients",
  ):
    self.inner, self.initial, self.judges = inner, initial_scale, check == "updates"
    self.growth_interval, self.hysteresis = growth_interval, hysteresis
    self.minimum, self.maximum = minimum, maximum

  def init(self, params):
    fields = {"loss_scale": self.initial, "growth_count": 0, "hysteresis_count": 0}
    return State(
      "DynamicLossScaleState", fields | {"notfinite_count": 0}, [self.inner.init(params)]
    )

  def update(self, grads, state, params, extra):
    scale, growth, overflows = (
      state[name] for name in ("loss_scale", "growth_count", "hysteresis_count")
    )
    unscaled = tree_map(lambda g: g / scale, grads)
    good, lost = all_finite(unscaled), False
    updates, inner, made = zeros_like(grads), state.inner[0], False
    if good:
      updates, inner, made, lost = step_inside(
        self.inner, unscaled, inner, params, extra, judges=self.judges
      )
      growth += 1
      if growth == self.growth_interval:
        scale, growth, overflows = min(2 * scale, self.maximum), 0, 0
    else:
      growth, overflows = 0, overflows + 1
      if overflows >= self.hysteresis:
        scale = max(scale / 2, self.minimum)
    return (
      updates,
      state.after(
        [inner],
        loss_scale=scale,
        growth_count=growth,
        hysteresis_count=overflows,
        notfinite_count=state["notfinite_count"] + (not good or lost),
      ),
      made,
    )


class Wide:
  """What `master_weights` and `stochastic_rounding` share: which steps they make."""

  inner: Any
  judges: bool

  def step_if_finite(self, grads, state, params, extra):
    """The inner step: skipped if the gradients are not finite, or undone if the result is not."""
    inside = {node.name for node in state.inner[0].nodes()}
    # A loss scale inside must see an overflow.
    if self.judges or "DynamicLossScaleState" in inside or all_finite(grads):
      return step_inside(self.inner, grads, state.inner[0], params, extra, judges=self.judges)
    return zeros_like(params), state.inner[0], False, True


class MasterWeights(Wide):
  """`master_weights`: `inner` moves the masters; the params are their rounding."""

  def __init__(self, inner, run, keyed, check="gradients"):
    self.inner, self.run, self.keyed, self.judges = inner, run, keyed, check == "updates"

  def init(self, params):
    fields = {"master_params": dict(params), "count": 0, "notfinite_count": 0}
    # The params to which the last step led; whether the masters in the state are certain.
    fields |= {"_led_to": dict(params), "_known": True}
    return State("MasterWeightsState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    def follow(path):
      moved = (params[path] != state["_led_to"][path]) & np.isfinite(params[path])
      return np.where(moved, params[path], state["master_params"][path])

    masters = {path: follow(path) for path in params}
    updates, inner, made, lost = self.step_if_finite(grads, state, masters, extra)
    if not made:
      known = all(np.array_equal(masters[p], state["master_params"][p]) for p in masters)
      fields = {"_known": known, "notfinite_count": state["notfinite_count"] + lost}
      return zeros_like(params), state.after([inner], **fields), False
    new = tree_map(np.add, masters, updates)
    rounded = self.run.round_randomly(new) if self.keyed else self.run.round(new)
    # A leaf whose master stays, stays: it is not rounded again.
    rounded = {
      path: np.where(new[path] == masters[path], params[path], r) for path, r in rounded.items()
    }
    fields = {"master_params": new, "_led_to": rounded, "_known": True, "count": state["count"] + 1}
    return tree_map(np.subtract, rounded, params), state.after([inner], **fields), True


class StochasticRounding(Wide):
  """`stochastic_rounding`: the sum of params and updates is rounded up or down."""

  def __init__(self, inner, run, check="gradients"):
    self.inner, self.run, self.judges = inner, run, check == "updates"

  def init(self, params):
    fields = {"count": 0, "notfinite_count": 0}
    return State("StochasticRoundingState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    updates, inner, made, lost = self.step_if_finite(grads, state, params, extra)
    if not made:
      count = state["notfinite_count"] + lost
      return zeros_like(params), state.after([inner], notfinite_count=count), False
    rounded = self.run.round_randomly(tree_map(np.add, params, updates))
    updates = tree_map(np.subtract, rounded, params)
    return updates, state.after([inner], count=state["count"] + 1), True


class AverageParams:
  """`average_params`: the mean of the snapshots after `start`, or with weights that decay."""

  def __init__(self, inner, run, rounding, *, start=None, decay=None, every=1):
    self.inner, self.run, self.rounding = inner, run, rounding
    self.start, self.decay, self.every = start, decay, every

  def init(self, params):
    fields = {"average": dict(params), "count": 0, "snapshot_count": 0}
    return State("AverageParamsState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    updates, inner, made, _ = step_inside(self.inner, grads, state.inner[0], params, extra)
    count = state["count"] + made
    after = count - (self.start or 0)
    taken, average = state["snapshot_count"], state["average"]
    if made and after > 0 and after % self.every == 0:
      taken += 1
      share = 1 / taken if self.decay is None else (1 - self.decay) / (1 - self.decay**taken)

      def blend(a, snapshot):
        # An entry that is not finite is not taken.
        mixed = snapshot if taken == 1 else a + (snapshot - a) * share
        return np.where(np.isfinite(mixed), mixed, a)

      snapshot = self.run.land(params, updates, state.inner[0], inner, self.rounding)
      average = tree_map(blend, average, snapshot)
    fields = {"average": average, "count": count, "snapshot_count": taken}
    return updates, state.after([inner], **fields), made


class FreezeLayers:
  """`freeze_layers`: the first groups of leaves get no update on some steps.

  `depths[t]` groups are frozen in the t-th step, `factors[t]` multiply the groups' updates.
  """

  def __init__(self, inner, run, groups, depths, factors):
    self.inner, self.run, self.groups = inner, run, groups
    self.depths, self.factors = depths, factors

  def init(self, params):
    fields = {"count": 0, "frozen_groups": self.depths[0]}
    fields["_trained"] = {path: np.zeros(()) for path in params}
    return State("FreezeLayersState", fields, [self.inner.init(params)])

  def frozen(self, path, state):
    return self.groups.index(leaf_name(path)) < state["frozen_groups"]

  def update(self, grads, state, params, extra):
    grads = {p: np.zeros_like(g) if self.frozen(p, state) else g for p, g in grads.items()}
    if COUNTS_OF_TRAINED_STEPS:
      self.run.trained = {path: int(n) for path, n in state["_trained"].items()}

    def change(updates, old, new):
      return {path: update_of(path, updates) for path in updates}, held(old, new)

    def update_of(path, updates):
      factor = self.factors[state["count"]][self.groups.index(leaf_name(path))]
      return np.zeros_like(updates[path]) if self.frozen(path, state) else factor * updates[path]

    def held(old, new):
      """A state whose leaves stay as they were if they are frozen."""
      fields = {
        name: {p: old[name][p] if self.frozen(p, state) else x for p, x in field.items()}
        if isinstance(field, dict)
        else field
        for name, field in new.fields.items()
      }
      return State(
        new.name, fields, [held(o, n) for o, n in zip(old.inner, new.inner, strict=True)]
      )

    changes = extra | {"_changes": [change, *extra.get("_changes", ())]}
    updates, moved, made, _ = step_inside(self.inner, grads, state.inner[0], params, changes)
    self.run.trained = None
    count = state["count"] + made
    trained = {
      path: n + (made and not self.frozen(path, state)) for path, n in state["_trained"].items()
    }
    return (
      updates,
      state.after(
        [moved],
        count=count,
        frozen_groups=self.depths[count],
        _trained=trained,
      ),
      made,
    )


class LayerwiseDecay:
  """`layerwise_decay`: the updates of group i of G times decay^(G - 1 - i)."""

  def __init__(self, inner, groups, decay):
    self.inner, self.groups, self.decay = inner, groups, decay

  def init(self, params):
    return State("LayerwiseDecayState", {}, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    last = len(self.groups) - 1

    def change(updates, old, new):
      factor = lambda path: self.decay ** (last - self.groups.index(leaf_name(path)))  # noqa: E731
      return {path: g * factor(path) for path, g in updates.items()}, new

    changes = extra | {"_changes": [change, *extra.get("_changes", ())]}
    updates, inner, made, _ = step_inside(self.inner, grads, state.inner[0], params, changes)
    return updates, state.after([inner]), made


class SwitchAfter:
  """`switch_after`: `first` acts for some steps, then `second`, which saw them all."""

  def __init__(self, step, first, second):
    self.step, self.first, self.second = step, first, second

  def init(self, params):
    inner = [self.first.init(params), self.second.init(params)]
    return State("SwitchAfterState", {"count": 0}, inner)

  def update(self, grads, state, params, extra):
    first_state, second_state = state.inner
    updates, second_state, made = self.second.update(grads, second_state, params, extra)
    if state["count"] < self.step:
      updates, first_state, made = self.first.update(grads, first_state, params, extra)
    return (
      updates,
      state.after(
        [first_state, second_state],
        count=state["count"] + 1,
      ),
      made,
    )


class Laperm:
  """`laperm`: every few steps each output's weights are the initial ones, in the trained order.

  Its vectors are the columns of the leaves that it is told to permute.
  """

  def __init__(self, inner, names, sync_every):
    self.inner, self.names, self.sync_every = inner, names, sync_every

  def init(self, params):
    held = {path: p for path, p in params.items() if leaf_name(path) in self.names}
    fields = {"count": 0, "synced": True, "permuted_params": held}
    return State("LapermState", fields, [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    updates, inner, made = self.inner.update(grads, state.inner[0], params, extra)
    count = state["count"] + made
    due = made and count % self.sync_every == 0
    weights = state["permuted_params"]
    if due:

      def permuted(path):
        trained = params[path] + updates[path]
        # NaN counts as the largest.
        order = np.argsort(np.where(np.isnan(trained), np.inf, trained), axis=0, kind="stable")
        ranks = np.argsort(order, axis=0)
        return np.take_along_axis(np.sort(weights[path], axis=0), ranks, axis=0)

      weights = {path: permuted(path) for path in weights}
      updates = updates | {path: w - params[path] for path, w in weights.items()}
    fields = {"count": count, "synced": due if made else state["synced"]}
    return updates, state.after([inner], permuted_params=weights, **fields), made


class Skipping:
  """A wrapper that decides about each step by its gradients.

  `decide(fields, grads, scale)` returns whether the step is made, and the fields after it; `scale`
  is that of a loss scale inside, or None.
  """

  def __init__(self, inner, name, fields, decide):
    self.inner, self.name, self.fields, self.decide = inner, name, fields, decide

  def init(self, params):
    return State(self.name, dict(self.fields), [self.inner.init(params)])

  def update(self, grads, state, params, extra):
    scales = [n["loss_scale"] for n in state.inner[0].nodes() if n.name == "DynamicLossScaleState"]
    go, fields = self.decide(state.fields, grads, scales[0] if scales else None)
    updates, inner, made = zeros_like(grads), state.inner[0], False
    if go:
      updates, inner, made, _ = step_inside(self.inner, grads, inner, params, extra)
    return updates, state.after([inner], **fields), made


# The wrappers that say of each step whether it is made; they hand on that it is judged.
SEEN_THROUGH = (
  Accumulate, DynamicLossScale, MasterWeights, StochasticRounding, AverageParams, FreezeLayers,
  LayerwiseDecay, Skipping,
)  # fmt: skip


def averaged_params(state, params):
  """What `averaged_params` returns: averages once there is a snapshot, the params elsewhere."""
  averaged = dict(params)
  for node in state.nodes():
    if node.name == "AverageParamsState" and node["snapshot_count"]:
      averaged |= node["average"]
  return averaged
