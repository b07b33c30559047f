"""What evidence runs share: their data, and results that outlive the data's absence."""

import json
import os
import pathlib

import numpy as np
import pytest
from sklearn import datasets

from benchmarks import _harness


def file_of(name):
  """The npz file of a data set in the folder OPTAX_BOOST_DATA, or None."""
  folder = os.environ.get("OPTAX_BOOST_DATA")
  found = sorted(pathlib.Path(folder).glob(f"{name}*.npz")) if folder else []
  return found[0] if found else None


def digits():
  """Parts ``train``, ``validation`` and ``test`` of the digits: images (n, 8, 8), labels."""
  y, x = (bunch := datasets.load_digits()).target, bunch.images
  order = np.random.default_rng(0).permutation(len(y))
  x, y = x[order], y[order]
  cut = {"train": (0, 1024), "validation": (1024, 1397), "test": (1397, None)}
  return {part: (x[a:b], y[a:b]) for part, (a, b) in cut.items()}


def images(name, halved=False):
  """Parts of MNIST or CIFAR-10: standardized images (n, height, width, channels), labels.

  Args:
    name: ``"mnist"``, whose parts have 50,000, 10,000 and 10,000 images, or ``"cifar10"``, of the
      24,000 of which 16,000, 4,000 and 4,000.
    halved: whether to average squares of four pixels.
  """
  with np.load(file_of(name)) as file:
    x, y, test_x, test_y = (
      file[key] for key in ("train_images", "train_labels", "test_images", "test_labels")
    )
  cut = len(x) - {"mnist": 10_000, "cifar10": 4_000}[name]
  parts = {"train": (x[:cut], y[:cut]), "validation": (x[cut:], y[cut:]), "test": (test_x, test_y)}

  def floats(x):
    x = x.reshape(*x.shape[:3], -1).astype(np.float32)
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4)) if halved else x

  parts = {part: (floats(x), y.astype(np.int32)) for part, (x, y) in parts.items()}
  mean, spread = (f(parts["train"][0], (0, 1, 2)) for f in (np.mean, np.std))
  return {part: ((x - mean) / spread, y) for part, (x, y) in parts.items()}


def need(name):
  """Skips the test where a data set is not there."""
  if file_of(name) is None:
    pytest.skip(f"no {name}*.npz in the folder OPTAX_BOOST_DATA")


def added(part, found, order):
  """Adds results to those of earlier runs, whose data may not be here now, and saves all of them.

  Args:
    part: of the evidence; the results are kept in ``out/<part>_evidence.json``.
    found: new results, by task.
    order: all tasks.

  Returns:
    All results, in that order.
  """
  path = _harness.OUT / f"{part}_evidence.json"
  known = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | found
  known = {name: known[name] for name in order if name in known}
  _harness.replace(path, json.dumps(known) + "\n")
  return known
