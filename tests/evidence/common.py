"""What evidence runs share: their data, and results that outlive the data's absence."""

import json
import os
import pathlib

import numpy as np
from sklearn import datasets


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


def added(path, found, order):
  """Adds results to those in a JSON file, whose data may not be here now, and saves all of them.

  Args:
    path: of the file.
    found: new results, by task.
    order: all tasks.

  Returns:
    All results, in that order.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  known = (json.loads(path.read_text()) if path.exists() else {}) | found
  known = {name: known[name] for name in order if name in known}
  path.write_text(json.dumps(known) + "\n")
  return known
