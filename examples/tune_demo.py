"""Finds the batch size and the rates that demo.py holds: `python examples/tune_demo.py`.

Each is trained with a seed of its own and measured on validation text; the test text is never
looked at. O0 sees as many characters in small batches as in large ones.
"""

import argparse
import itertools

from _demo_report import O1
import _texts
import _transformer
import _transformer_training as training
import demo

import optax_boost

SEED = 100
SIZES, RATES = (2, 4), (0.003, 0.006, 0.012)
TUNING_RATES = (0.003, 0.01, 0.03)


def main(arguments: list[str] | None = None) -> None:
  """Prints the validation loss of each."""
  parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
  parser.parse_args(arguments)
  start = demo.initial_params(SEED)
  text = _texts.split(_texts.plays())
  windows = demo.held_out(text.validation)
  for size, rate in itertools.product(SIZES, RATES):
    steps = demo.STEPS * demo.BATCH_SIZE // size
    feed = demo.batches(text.train, steps, SEED, size)
    step = optax_boost.make_train_step(_transformer.loss_fn, demo.optimizer(rate, steps))
    _, run = training.train(step, start, feed, windows, [steps])
    loss, seconds = run.losses[-1], run.seconds[-1]
    print(f"O0, batch {size}, rate {rate:g}: {loss:.3f} after {seconds:.1f} s", flush=True)

  feed = demo.batches(text.train, demo.STEPS, SEED)
  at = demo.at_level(O1, start, feed, demo.RATE)
  step = optax_boost.make_train_step(_transformer.loss_fn, at.tx)
  params, run = training.train(
    step, start, at.batches(), windows, [demo.STEPS], prepare=lambda *of: at.prepare(*of, print)
  )
  print(at.boost.explain())
  print(f"O1: {run.losses[-1]:.3f} after {run.seconds[-1]:.1f} s", flush=True)

  text = _texts.split(_texts.comedy())
  windows = demo.held_out(text.validation)
  feed = demo.batches(text.train, demo.TUNING_STEPS, SEED)
  for name, rate in itertools.product(demo.WAYS, TUNING_RATES):
    tx = demo.WAYS[name](demo.optimizer(rate, demo.TUNING_STEPS), params)
    step = optax_boost.make_train_step(_transformer.loss_fn, tx)
    _, run = training.train(step, params, feed, windows, [demo.TUNING_STEPS])
    print(f"{name}, rate {rate:g}: {run.losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
  main()
