"""An eager interpreter of optimizers and the wrappers around them, in NumPy and float64.

It is written from the cards, the docstrings and optax's documentation, and imports nothing of
`optax_boost`, so it can say whether a composition of wrappers does what its parts promise. Clear
beats fast: a step is a function from gradients, state and params to updates, a new state and
whether a step was made; nothing is changed in place.

Params, gradients and updates are flat: a dict from a leaf's path to a float64 array. A leaf that
`optax.masked` hides is missing. The pair of `optax.lookahead` has the paths "fast/..." and
"slow/...", its gradients the paths without either. States are `State`s: the name of the state's
class, its fields, and the states inside it in the order of the class's fields.

All wrappers of `optax_boost` that hold an optimizer are one `Step`, which has only one order. What
the cards leave open is decided here so:

- A step is made if the params may move by it. A chain makes a step if all its members do;
  `optax.partition` and `optax.masked` if any of their leaves may move. A step that is not made
  changes neither params nor masters nor averages nor counts of steps made.
- A micro-batch that is left out, since it is not finite or a spike, is as if it had never come: it
  does not count in its window. (With ``not_finite="restart"`` it begins the window again.) Only
  counters, the loss scale and the norms know of it.
- A spike is judged by the norm of the micro-batch's unscaled gradient, or by its loss. A spike is a
  step without an overflow for the loss scale; a gradient that is not finite does not enter the mean
  of the norms. The mean of the losses does not care which layers are frozen.
- An optimizer in a window gets the mean of its losses, by their weights.
- The gradients of frozen groups are zeros, whatever comes: a NaN there leaves no batch out. Each
  number of frozen groups has a mean of the norms.
- `inner_count` counts the windows that were given to the optimizer, also if the optimizer's step
  was then undone: the window is over, and `every(inner_count)` must go on.
- `check="updates"` undoes the optimizer's step if a number in params or state would turn NaN or
  infinite. The batch is then counted in `notfinite_count`, once.
- An average is of the masters if there are masters, else of the rounded params.
- Masters follow params that something else has moved, in the next step that is made.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np


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
    trained: of each leaf the steps in which it was trained, inside a step that freezes layers.
    in_place: whether the door writes new params itself. Then a permutation of `laperm` heals params
      that are not finite, which no update can.
  """

  dtype: str = "float32"
  observed: dict[str, np.ndarray] | None = None
  trained: dict[str, int] | None = None
  in_place: bool = False

  def land(self, params, updates, old, new, rounds=True):
    """The params, or the masters, after a step that led from one state to the next."""
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
    return self.round(landed) if rounds else landed

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


# The step of optax_boost.

LEAVES_OUT = {"accumulate", "dynamic_loss_scale", "precision", "skip_spikes"}


class Step:
  """An optimizer with the wrappers of `optax_boost` around it, in whatever nesting.

  Attributes:
    inner: the optimizer.
    slots: the arguments of each wrapper, by its name; "precision" stands for `master_weights` and
      `stochastic_rounding`.
    groups: the leaves' names in the order of their groups.
  """

  def __init__(self, inner, run, groups, slots):
    self.inner, self.run, self.groups, self.slots = inner, run, groups, slots
    self.checks_updates = any(slots.get(n, {}).get("check") == "updates" for n in LEAVES_OUT)
    precision, window = slots.get("precision"), slots.get("accumulate")
    self.checks_gradients = (
      "dynamic_loss_scale" in slots
      or (precision is not None and precision["check"] == "gradients")
      or (window is not None and window["not_finite"] in ("drop", "restart"))
    )

  def group(self, path):
    return self.groups.index(leaf_name(path))

  def kept(self, tree):
    """The leaves that some step trains; nothing is stored for the others."""
    never = min(self.slots["freeze_layers"]["depths"]) if "freeze_layers" in self.slots else 0
    return {path: x for path, x in tree.items() if self.group(path) >= never}

  def init(self, params):
    kept = self.kept(params)
    fields = {"made": False, "count": 0}
    if LEAVES_OUT & set(self.slots):
      fields["left_out.notfinite_count"] = 0
    if "accumulate" in self.slots:
      fields |= {"accumulation.count": 0, "accumulation.inner_count": 0}
      fields |= {"accumulation.weight_sum": 0.0, "accumulation.value_sum": 0.0}
      fields["accumulation.accumulator"] = zeros_like(kept)
    if "dynamic_loss_scale" in self.slots:
      fields["scaling.loss_scale"] = self.slots["dynamic_loss_scale"]["initial_scale"]
      fields |= {"scaling.growth_count": 0, "scaling.hysteresis_count": 0}
    if self.slots.get("precision", {}).get("keeps"):
      # And the params to which the last step led.
      fields |= {"precision.master_params": kept, "_led_to": kept}
    if "average_params" in self.slots:
      fields |= {"averaging.average": dict(params), "averaging.snapshot_count": 0}
    if "skip_spikes" in self.slots:
      means = len(self.groups) if "freeze_layers" in self.slots else 1
      norms = ("norm_sums", "norm_weights", "norm_counts")
      fields |= {f"spikes.{name}": np.zeros(means) for name in norms}
      fields |= {"spikes.gradient_norm": 0.0, "spikes.spike_count": 0}
      if "loss_factor" in self.slots["skip_spikes"]:
        names = ("spikes.losses.mean", "spikes.losses.deviation", "spikes.losses.count")
        fields |= dict.fromkeys((*names, "_loss_sum", "_distance_sum", "_loss_weight"), 0.0)
    if "freeze_layers" in self.slots:
      fields["_trained"] = {path: np.zeros(()) for path in kept}
    return State("StepState", fields, [self.inner.init(kept)])

  def update(self, grads, state, params, extra):
    weight = extra.get("weight", 1.0)
    if "accumulate" in self.slots:
      # Windows in a part of the params are of windows, each with the sum of its weights.
      weights = state["accumulation.weight_sum"] + weight
      extra = extra | {"weight": weights}
    unscaled = {
      path: np.zeros_like(g)
      if self.frozen(path, state)
      else g / state.fields.get("scaling.loss_scale", 1)
      for path, g in self.kept(grads).items()
    }
    finite, good, fields = self.judge(unscaled, state, extra)
    mean, due, window = self.add(unscaled, weight, good, state)
    fields |= window
    if "accumulate" in self.slots and "value" in extra:
      values = state["accumulation.value_sum"] + (weight * extra["value"] if good else 0)
      if not good and self.slots["accumulate"]["not_finite"] == "restart":
        values = 0.0
      fields["accumulation.value_sum"] = 0.0 if due else values
      extra = extra | {"value": values / weights}
    masters = self.masters(params, state)
    moved, inner, made, passes = zeros_like(masters), state.inner[0], False, True
    if due:
      moved, inner, made = self.move(mean, state, masters, extra)
      passes = not self.checks_updates or self.sound(state.inner[0], masters, moved, inner)
    if not passes:
      moved, inner, made = zeros_like(masters), state.inner[0], False
    fields |= {"made": made, "count": state["count"] + made}
    if LEAVES_OUT & set(self.slots):
      bad = not (finite and passes)
      fields["left_out.notfinite_count"] = state["left_out.notfinite_count"] + bad
    if "dynamic_loss_scale" in self.slots:
      fields |= self.next_scale(state, finite)
    updates, snapshot = moved, lambda: self.run.land(params, updates, state.inner[0], inner)
    if "precision" in self.slots:
      updates, snapshot, masters = self.round(params, masters, moved, state, inner, made)
      fields |= masters
    updates = zeros_like(grads) | updates
    if "average_params" in self.slots and made:
      fields |= self.average(snapshot(), state)
    if "freeze_layers" in self.slots:
      fields["_trained"] = {
        path: n + (made and not self.frozen(path, state)) for path, n in state["_trained"].items()
      }
    return updates, state.after([inner], **fields), made

  def judge(self, grads, state, extra):
    """Whether a micro-batch is finite, whether it counts, and the new norms."""
    finite = all_finite(grads) or not self.checks_gradients
    if "skip_spikes" not in self.slots:
      return finite, finite, {}
    slot = self.slots["skip_spikes"]
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
    names = ("spikes.norm_sums", "spikes.norm_weights", "spikes.norm_counts")
    total, weight, count = (state[name][self.depth(state)] for name in names)
    limit = slot["factor"] * total / max(weight, 1) if count else np.inf
    spike = bool(np.isfinite(norm) and count >= slot["start"] and norm > limit)
    finite = finite and bool(np.isfinite(norm))
    fields = {"spikes.gradient_norm": norm}
    if np.isfinite(norm) and norm > 0:
      new = slot["decay"] * total + min(norm, limit), slot["decay"] * weight + 1, count + 1
      for name, value in zip(names, new, strict=True):
        fields[name] = state[name].copy()
        fields[name][self.depth(state)] = value
    if "loss_factor" in slot:
      loss = extra["value"]
      finite = finite and bool(np.isfinite(loss))
      is_loss_spike, losses = self.judge_loss(loss, state)
      spike = finite and (spike or is_loss_spike)
      fields |= losses
    fields["spikes.spike_count"] = state["spikes.spike_count"] + spike
    return finite, finite and not spike, fields

  def judge_loss(self, loss, state):
    """Whether a loss is far above those before it, and the new means."""
    slot, count = self.slots["skip_spikes"], state["spikes.losses.count"]
    mean, deviation = state["spikes.losses.mean"], state["spikes.losses.deviation"]
    limit = np.inf
    if count >= slot["start"] and deviation > 0:
      limit = mean + slot["loss_factor"] * deviation
    if not np.isfinite(loss):
      return False, {}
    entry = min(loss, limit)
    distance = abs(entry - mean) if count else 0
    total = slot["decay"] * state["_loss_sum"] + entry
    distances = slot["decay"] * state["_distance_sum"] + distance
    weight = slot["decay"] * state["_loss_weight"] + 1
    means = {"mean": total / weight, "deviation": distances / weight, "count": count + 1}
    fields = {f"spikes.losses.{name}": value for name, value in means.items()}
    fields |= {"_loss_sum": total, "_distance_sum": distances, "_loss_weight": weight}
    return loss > limit, fields

  def add(self, grads, weight, good, state):
    """The gradient of the optimizer's step, whether the step is due, and the new window."""
    if "accumulate" not in self.slots:
      return grads, good, {}
    total, weights = state["accumulation.accumulator"], state["accumulation.weight_sum"]
    count, windows = state["accumulation.count"], state["accumulation.inner_count"]
    if good:
      total = tree_map(lambda t, g: t + weight * g, total, grads)
      weights, count = weights + weight, count + 1
    elif self.slots["accumulate"]["not_finite"] == "restart":
      total, weights, count = zeros_like(total), 0.0, 0
    full = good and count >= self.slots["accumulate"]["every"](windows)
    mean = tree_map(lambda t: t / weights, total) if full else None
    fields = {"accumulation.count": 0 if full else count}
    fields["accumulation.inner_count"] = windows + full
    fields["accumulation.weight_sum"] = 0.0 if full else weights
    fields["accumulation.accumulator"] = zeros_like(total) if full else total
    return mean, full, fields

  def move(self, grads, state, params, extra):
    """The optimizer's step: frozen leaves get zeros and keep their state."""
    updates_of = self.inner.update
    if "freeze_layers" not in self.slots:
      updates, inner, made = updates_of(grads, state.inner[0], params, extra)
    else:
      factors = self.slots["freeze_layers"]["factors"][state["count"]]
      still = {path for path in grads if self.frozen(path, state)}
      grads = {p: np.zeros_like(g) if p in still else g for p, g in grads.items()}
      # The counts with which Adam corrects its bias belong to the leaf.
      self.run.trained = {path: int(n) for path, n in state["_trained"].items()}
      updates, inner, made = updates_of(grads, state.inner[0], params, extra)
      self.run.trained = None
      updates = {
        path: np.zeros_like(u) if path in still else factors[self.group(path)] * u
        for path, u in updates.items()
      }
      inner = held(state.inner[0], inner, still)
    if "layerwise_decay" in self.slots:
      decay, last = self.slots["layerwise_decay"]["decay"], len(self.groups) - 1
      updates = {path: u * decay ** (last - self.group(path)) for path, u in updates.items()}
    return updates, inner, made

  def depth(self, state):
    """The number of frozen groups."""
    schedule = self.slots.get("freeze_layers")
    return schedule["depths"][state["count"]] if schedule else 0

  def frozen(self, path, state):
    return self.group(path) < self.depth(state)

  def sound(self, old_inner, params, updates, inner):
    """Whether no number of params or state turns bad."""
    new = State("", {"params": tree_map(np.add, params, updates)}, [inner])
    return not turned_bad(State("", {"params": params}, [old_inner]), new)

  def masters(self, params, state):
    """What the optimizer sees: the masters, which follow params that something else moved."""
    kept = self.kept(params)
    if not self.slots.get("precision", {}).get("keeps"):
      return kept

    def follow(p, led_to, master):
      return np.where((p != led_to) & np.isfinite(p), p, master)

    return tree_map(follow, kept, state["_led_to"], state["precision.master_params"])

  def round(self, params, masters, moved, state, inner, made):
    """The updates, the snapshot for an average, and the new masters."""
    if not made:
      return zeros_like(masters), None, {}
    slot, kept = self.slots["precision"], self.kept(params)
    new = self.run.land(masters, moved, state.inner[0], inner, rounds=False)
    rounded = self.run.round_randomly(new) if slot["keyed"] else self.run.round(new)
    if slot["keyed"]:
      # An entry that stays is not rounded again.
      rounded = {p: np.where(new[p] == masters[p], kept[p], r) for p, r in rounded.items()}
    fields = {"precision.master_params": new, "_led_to": rounded} if slot["keeps"] else {}
    updates = {p: np.where(r == kept[p], 0, r - kept[p]) for p, r in rounded.items()}
    return updates, lambda: params | (new if slot["keeps"] else rounded), fields

  def average(self, new, state):
    """The average after a step that was made: of the snapshots since `start`, or decaying."""
    slot = self.slots["average_params"]
    after = state["count"] + 1 - (slot.get("start") or 0)
    if after <= 0 or after % slot.get("every", 1):
      return {}
    taken = state["averaging.snapshot_count"] + 1
    decay = slot.get("decay")
    share = 1 / taken if decay is None else (1 - decay) / (1 - decay**taken)

    def blend(a, snapshot):
      mixed = snapshot if taken == 1 else a + (snapshot - a) * share
      # An entry that is not finite is not taken.
      return np.where(np.isfinite(mixed), mixed, a)

    average = {path: blend(a, new[path]) for path, a in state["averaging.average"].items()}
    return {"averaging.average": average, "averaging.snapshot_count": taken}

  def next_scale(self, state, no_overflow):
    """The scale after a micro-batch; the hysteresis is Megatron's."""
    slot = self.slots["dynamic_loss_scale"]
    names = ("scaling.loss_scale", "scaling.growth_count", "scaling.hysteresis_count")
    scale, growth, overflows = (state[name] for name in names)
    if no_overflow:
      growth += 1
      if growth == slot["growth_interval"]:
        scale, growth, overflows = min(2 * scale, slot["maximum"]), 0, 0
    else:
      growth, overflows = 0, overflows + 1
      if overflows >= slot["hysteresis"]:
        scale = max(scale / 2, slot["minimum"])
    return dict(zip(names, (scale, growth, overflows), strict=True))


def held(old, new, still):
  """A state whose leaves stay as they were if they are frozen."""
  fields = {
    name: {path: old[name][path] if path in still else x for path, x in field.items()}
    if isinstance(field, dict)
    else field
    for name, field in new.fields.items()
  }
  inner = [held(o, n, still) for o, n in zip(old.inner, new.inner, strict=True)]
  return State(new.name, fields, inner)


# Methods of optax_boost that hold optimizers, and are no steps.


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


def averaged_params(state, params):
  """What `averaged_params` returns: averages once there is a snapshot, the params elsewhere."""
  averaged = dict(params)
  for node in state.nodes():
    if node.fields.get("averaging.snapshot_count"):
      averaged |= node["averaging.average"]
  return averaged
