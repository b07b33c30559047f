"""``skip_spikes`` beside clipping, with planted bad batches: ``python -m benchmarks.spikes``."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _harness
import optax_boost

_ABOUT = """\
A small language model (an embedding of 4 tokens, two layers of 64, 32 kinds of tokens of a
Markov chain), AdamW at 3e-3 for 2,000 steps of 32 examples; inside of each rule it is clipped at
norm 1, if the name does not say that it is not. The factors are 5 for the norm and 5 for the
loss. From step 300 on, 24 batches are bad, at random steps, of one kind for each training: all
targets are replaced by random tokens; the targets of the same network as a regression are 100
times as large, a wrong unit; or the gradient, not the loss, is 1,000 times as long. *Window* is
the rule of OLMo-core, levanter and MaxText, written from their description: skip if the loss or
the norm is above the mean plus 6 standard deviations of the last 128 steps, once there are 64.
Found and missed bad batches and false alarms are sums over three seeds, of 72 bad and 5,928 good
batches; the loss is on data without bad batches, a mean over the seeds and [the range]. "no bad
batch" is the training without them."""

STEPS, BATCH, TOKENS, CONTEXT, WIDTH, BAD, SEEDS = 2000, 32, 32, 4, 64, 24, 3
KINDS = ("corrupted tokens", "a wrong label unit", "an exploding gradient")


class WindowState(NamedTuple):
  """State of :func:`window_rule`."""

  inner_state: Any
  history: jax.Array
  count: jax.Array
  skipped: jax.Array


def window_rule(inner, length=128, deviations=6.0):
  """Skips steps by mean and deviation of the losses and norms in a window."""

  def init(params):
    zero = jnp.zeros([], jnp.int32)
    return WindowState(inner.init(params), jnp.full((2, length), jnp.nan), zero, zero)

  def update(updates, state, params=None, *, value, **extra):
    now = jnp.stack([value, optax.tree.norm(updates)])
    limits = jnp.nanmean(state.history, 1) + deviations * jnp.nanstd(state.history, 1, ddof=1)
    is_spike = (state.count >= length // 2) & jnp.any(now > limits)
    moved, inner_state = inner.update(updates, state.inner_state, params, **extra)
    keep = functools.partial(jax.tree.map, lambda old, new: jnp.where(is_spike, old, new))
    return keep(jax.tree.map(jnp.zeros_like, moved), moved), WindowState(
      keep(state.inner_state, inner_state),
      state.history.at[:, state.count % length].set(now),
      state.count + 1,
      state.skipped + is_spike,
    )

  return optax.GradientTransformationExtraArgs(init, update)


def clipped():
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


RULES = {
  "not clipped": lambda: optax.adamw(3e-3),
  "clipping alone": clipped,
  "skip_spikes, norm": lambda: optax_boost.skip_spikes(clipped()),
  "skip_spikes, loss": lambda: optax_boost.skip_spikes(clipped(), None, loss_factor=5.0),
  "skip_spikes, both": lambda: optax_boost.skip_spikes(clipped(), loss_factor=5.0),
  "skip_spikes, both, not clipped": lambda: optax_boost.skip_spikes(
    optax.adamw(3e-3), loss_factor=5.0
  ),
  "window, both": lambda: window_rule(clipped()),
}


def skips(state):
  if isinstance(state, WindowState):
    return state.skipped
  return getattr(state, "spike_count", jnp.int32(0))


def init_params(key):
  shapes = {"embed": (TOKENS, 16), "first": (CONTEXT * 16, WIDTH), "second": (WIDTH, WIDTH)}
  shapes["head"] = (WIDTH, TOKENS)
  keys = jax.random.split(key, len(shapes))
  return {
    name: jax.random.normal(k, shape) / np.sqrt(shape[0] if name != "embed" else 1)
    for k, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def draw(key, size):
  """Sequences of a Markov chain whose next token depends on the two before, with noise."""
  first, noise, random = jax.random.split(key, 3)
  tokens = list(jax.random.randint(first, (2, size), 0, TOKENS))
  flips = jax.random.bernoulli(noise, 0.2, (CONTEXT - 1, size))
  others = jax.random.randint(random, (CONTEXT - 1, size), 0, TOKENS)
  for flip, other in zip(flips, others, strict=True):
    tokens.append(jnp.where(flip, other, (tokens[-1] * 5 + tokens[-2] * 3 + 1) % TOKENS))
  tokens = jnp.stack(tokens, 1)
  return tokens[:, :CONTEXT], tokens[:, CONTEXT]


def loss_fn(params, batch, kind):
  x, target, is_bad, random = batch
  hidden = params["embed"][x].reshape(len(x), -1)
  hidden = jnp.tanh(jnp.tanh(hidden @ params["first"]) @ params["second"])
  logits = hidden @ params["head"]
  if kind == "a wrong label unit":
    label = jnp.cos(2 * np.pi * target / TOKENS) * jnp.where(is_bad, 100, 1)
    return jnp.mean((logits[:, 0] - label) ** 2)
  if kind == "corrupted tokens":
    target = jnp.where(is_bad, random, target)
  loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, target))
  if kind == "an exploding gradient":
    loss += jnp.where(is_bad, 999, 0) * (loss - jax.lax.stop_gradient(loss))
  return loss


def train(rule, kind, plants=True):
  """Returns for each seed and step whether it was skipped and is bad, and the final losses."""
  tx = optax.with_extra_args_support(RULES[rule]())
  bad = np.zeros((SEEDS, STEPS), bool)
  for seed, steps in enumerate(bad):
    steps[np.random.default_rng(seed).choice(np.arange(300, STEPS), BAD, replace=False)] = plants

  def step(seed, carry, inputs):
    params, state = carry
    t, is_bad = inputs
    data, noise = jax.random.split(jax.random.fold_in(jax.random.key(100 + seed), t))
    random = jax.random.randint(noise, (BATCH,), 0, TOKENS)
    batch = (*draw(data, BATCH), is_bad, random)
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, kind)
    updates, new = tx.update(grads, state, params, value=loss)
    return (optax.apply_updates(params, updates), new), skips(new) - skips(state)

  @jax.jit
  @jax.vmap
  def run(seed, bad):
    params = init_params(jax.random.key(seed))
    steps = functools.partial(step, seed)
    carry = params, tx.init(params)
    (params, _), skipped = jax.lax.scan(steps, carry, (jnp.arange(STEPS), bad))
    test = (*draw(jax.random.key(1), 8192), False, jnp.zeros(8192, int))
    return skipped, loss_fn(params, test, kind)

  skipped, losses = run(jnp.arange(SEEDS), jnp.asarray(bad))
  return np.asarray(skipped, bool), bad, np.asarray(losses)


def row(name, skipped, bad, losses):
  found, alarms = int(np.sum(skipped & bad)), int(np.sum(skipped & ~bad))
  spread = f"{np.mean(losses):.4f} [{min(losses):.4f}, {max(losses):.4f}]"
  return f"| {name} | {found} | {int(np.sum(bad)) - found} | {alarms} | {spread} |"


def main() -> None:
  body = []
  for kind in KINDS:
    body += [f"## {kind.capitalize()}\n", "| rule | found | missed | false alarms | loss |"]
    body += ["| --- | --- | --- | --- | --- |"]
    body += [row("no bad batch", *train("clipping alone", kind, plants=False))]
    body += [row(rule, *train(rule, kind)) for rule in RULES]
    body += [""]
    print("\n".join(body[-12:]), flush=True)
  packages = ("jax", "jaxlib", "optax", "numpy")
  _harness.write_lines("spikes", _ABOUT, body, packages, _harness.HERE / "results")


if __name__ == "__main__":
  main()
