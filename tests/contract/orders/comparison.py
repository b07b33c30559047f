"""Runs a composition through a door and compares it with the interpreter after each micro-step."""

import dataclasses
import operator
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
from tests import closeness
from tests.contract.orders import interpreter as eager, programs

DOORS = ("update", "apply_gradients", "train_step", "scan")
# Rounding errors of twelve steps, in ulps of the path of each number.
ULPS = 32
# The states whose fields are compared; other states hold nothing but these.
COMPARED = {
  "StepState", "TraceState", "ScaleByAdamState", "ApplyIfFiniteState", "MultiStepsState",
  "LookaheadState", "InjectStatefulHyperparamsState", "SwitchAfterState", "LapermState",
}  # fmt: skip


def flat(tree):
  """A tree's leaves by their paths, as float64."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path): np.asarray(
      leaf
    ).astype(np.float64)
    for path, leaf in leaves
  }


def states_of(node):
  """All states of `COMPARED` classes in an optimizer state, each before those inside it."""
  found = [node] if type(node).__name__ in COMPARED else []
  children = [node[key] for key in sorted(node)] if isinstance(node, dict) else node
  for child in children if isinstance(node, dict | tuple) else ():
    found += states_of(child)
  return found


@jax.custom_vjp
def zero(params, gradients):
  """Zero, with the given gradient, also if it is not finite."""
  return jnp.zeros([])


zero.defvjp(
  lambda params, gradients: (jnp.zeros([]), gradients),
  lambda gradients, loss: (
    jax.tree.map(lambda g: (loss * g).astype(g.dtype), gradients),
    jax.tree.map(jnp.zeros_like, gradients),
  ),
)


def loss_fn(params, batch):
  """The loss of the batch, whose gradient is the batch's."""
  return batch["loss"] + zero(params, batch["gradients"])


def slots(order):
  return {programs.WAYS[name].slot for name in order if name in programs.WAYS}


class Program:
  """A composition of `optax_boost` behind one of the doors."""

  def __init__(self, order, base, door, dtype="float32", params=None):
    self.order, self.door, self.dtype = order, door, dtype
    self.tx = programs.build(order, base)
    self.weighted = "accumulate" in slots(order)
    if params is None:
      params = {n: jnp.asarray(p, dtype) for n, p in programs.initial_params().items()}
    if "lookahead" in order:
      params = optax.LookaheadParams.init_synced(params)
    if door == "train_step":
      weight = (lambda batch: batch["weight"]) if self.weighted else None
      self.train_step = optax_boost.make_train_step(loss_fn, self.tx, weight=weight, donate=False)
      self.train_state = self.train_step.init(params)
      self.initial = self.train_state.params, self.train_state.opt_state
    else:
      self.initial = params, self.tx.init(params)

  def by_hand(self, params, state, batch):
    """A step of a loop of one's own, whose loss is scaled by hand."""
    grads = batch["gradients"]
    if "dynamic_loss_scale" in slots(self.order):
      scale = optax.tree.get(state, "loss_scale")
      grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    extra = {"value": batch["loss"]} | ({"weight": batch["weight"]} if self.weighted else {})
    if self.door != "update":
      return optax_boost.apply_gradients(self.tx, grads, state, params, **extra)
    tx = optax.with_extra_args_support(self.tx)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  def run(self, gradients, weights):
    """Yields params and optimizer state after each micro-step."""
    batches = [
      {
        "gradients": {name: jnp.asarray(g, self.dtype) for name, g in grads.items()},
        "weight": jnp.float32(weight),
        "loss": jnp.float32(loss),
      }
      for grads, weight, loss in zip(gradients, weights, programs.LOSSES, strict=False)
    ]
    if self.door == "train_step":
      for batch in batches:
        self.train_state, _ = self.train_step(self.train_state, batch)
        yield self.train_state.params, self.train_state.opt_state
    elif self.door == "scan":

      def step(carry, batch):
        carry = self.by_hand(*carry, batch)
        return carry, carry

      stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
      _, carries = jax.jit(lambda *args: jax.lax.scan(step, *args))(self.initial, stacked)
      carries = jax.tree.map(np.asarray, carries)
      for t in range(len(batches)):
        yield jax.tree.map(lambda x, t=t: x[t], carries)
    else:
      step, carry = jax.jit(self.by_hand), self.initial
      for batch in batches:
        carry = step(*carry, batch)
        yield carry


class Interpreter:
  """The same composition for the interpreter, with the gradients that its door hands on."""

  def __init__(self, order, base, door, dtype="float32"):
    self.order, self.door = order, door
    self.run = eager.Run(dtype, in_place=door != "update")
    self.tx = programs.interpret(order, base, self.run)
    params = programs.initial_params()
    if "lookahead" in order:
      params = {f"{side}/{name}": p for side in ("fast", "slow") for name, p in params.items()}
    self.params, self.state = params, self.tx.init(params)

  def step(self, grads, weight, loss, observed):
    self.run.observed = observed
    for node in self.state.nodes():
      scale = node.fields.get("scaling.loss_scale", 1)
      grads = {name: g * scale for name, g in grads.items()}
    with np.errstate(all="ignore"):
      updates, state, _ = self.tx.update(
        grads, self.state, self.params, {"weight": weight, "value": loss}
      )
      self.params = self.run.land(self.params, updates, self.state, state)
      self.state = state
    return self.params, self.state


class Paths:
  """How far each number has moved until now: rounding errors are in units of that.

  At least a quarter: windows' means cancel, and what is made of them is as far off as their terms.
  """

  def __init__(self):
    self.last, self.lengths = {}, {}

  def length(self, name, value):
    value = np.where(np.isfinite(value), value, 0)
    if name not in self.last:
      self.lengths[name] = np.maximum(np.abs(value), 0.25)
    else:
      self.lengths[name] = self.lengths[name] + np.abs(value - self.last[name])
    self.last[name] = value
    return self.lengths[name]


def difference(found, expected, path_length):
  """What is wrong with a number or an array; None if it is as expected."""
  found, expected = np.asarray(found), np.asarray(expected, np.float64)
  if found.shape != expected.shape:
    return f"has the shape {found.shape}, not {expected.shape}"
  if found.dtype.kind in "iub":
    return None if np.array_equal(found, expected) else f"is {found}, not {expected}"
  special = ~np.isfinite(expected)
  if not np.array_equal(found[special].astype(np.float64), expected[special], equal_nan=True):
    return f"is {found.tolist()}, not {expected.tolist()}"
  found = np.where(special, np.float32(0), found.astype(np.float32))
  try:
    closeness.assert_within_ulps(found, np.where(special, 0, expected), path_length, ULPS)
  except AssertionError as error:
    return str(error).partition("; ")[2].replace("np.float64", "")
  return None


class Comparison:
  """Compares params, averages and states after each step; keeps the first difference of each field.

  Attributes:
    differences: from the name of a field to what was wrong with it first.
  """

  def __init__(self, run):
    self.run = run
    self.differences = {}
    self.paths = Paths()

  def check(self, moment, name, found, expected, place=()):
    """Compares an array or a dict of leaves; `place` tells fields of the same name apart."""
    trees = {"": (found, expected)}
    if isinstance(expected, dict):
      leaves = flat(found)
      if set(leaves) != set(expected):
        self.differences.setdefault(name, f"{moment}: leaves {sorted(leaves)}")
        return
      trees = {path: (leaves[path], x) for path, x in expected.items()}
    for path, (f, e) in trees.items():
      e = np.asarray(e, np.float64)
      wrong = difference(f, e, self.paths.length((name, place, path), e))
      if wrong:
        self.differences.setdefault(name, f"{moment}: {path} {wrong}")

  def compare(self, moment, found, expected):
    (found_params, found_state), (params, state) = found, expected
    self.check(moment, "params", found_params, params)
    found_states = states_of(found_state)
    states = [node for node in state.nodes() if node.name in COMPARED]
    names = [type(node).__name__ for node in found_states]
    assert names == [node.name for node in states], f"{moment}: states {names}"
    for i, (node, wanted) in enumerate(zip(found_states, states, strict=True)):
      for field, value in wanted.fields.items():
        if field.startswith("_"):
          continue
        slot, _, name = field.rpartition(".")
        holder = operator.attrgetter(slot)(node) if slot else node
        holder = node.hyperparams if field == "learning_rate" else holder._asdict()
        self.check(moment, f"{wanted.name}.{field}", holder[name], value, (i,))
    if any("averaging.average" in node.fields for node in states):
      averaged = optax_boost.averaged_params(found_state, found_params)
      average_run = dataclasses.replace(self.run, observed=flat(averaged))
      wanted_average = average_run.round(eager.averaged_params(state, params))
      self.check(moment, "averaged_params", averaged, wanted_average)


def differences(order, base, door, dtype="float32"):
  """What differs from the interpreter, by field."""
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`freeze_layers` saves no time")
    # `optax.masked` and `optax.partition` hide the first group.
    warnings.filterwarnings("ignore", "`groups` has patterns that match no leaf")
    program, oracle = Program(order, base, door, dtype), Interpreter(order, base, door, dtype)
    comparison = Comparison(oracle.run)
    comparison.compare("init", program.initial, (oracle.params, oracle.state))
    gradients = base.gradients() if isinstance(base, programs.Poisoned) else programs.gradients()
    # Means of two gradients, unless they are weighted, are exact in bfloat16.
    exact = dtype == "float32" or "precision" in slots(order)
    weights = programs.WEIGHTS if exact else (1,) * programs.MICRO_STEPS
    found = program.run(gradients, weights)
    for t, (grads, weight, after) in enumerate(zip(gradients, weights, found, strict=True)):
      expected = oracle.step(grads, weight, programs.LOSSES[t], flat(after[0]))
      comparison.compare(f"micro-step {t}", after, expected)
  return comparison.differences
