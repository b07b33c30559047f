"""Texts of characters by part: tiny Shakespeare, and the sources that every Python brings."""

import functools
import pathlib
import sysconfig

import numpy as np

from tests.evidence import common

PARTS = common.PARTS
# Characters of the library's sources that are used, of about 11 million.
_SOURCES = 6_000_000


@functools.cache
def characters(name):
  """Characters as integers below 128 by part: 80, 10 and 10 percent.

  Args:
    name: ``"tinyshakespeare"``, a file in the folder OPTAX_BOOST_DATA, or ``"sources"``, the
      modules of Python's standard library in random order.
  """
  if name == "tinyshakespeare":
    text = common.file_of(name).read_bytes()
  else:
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
      path
      for path in library.rglob("*.py")
      if not {"site-packages", "test", "tests", "lib2to3"} & set(path.parts)
    )
    order = np.random.default_rng(0).permutation(len(files))
    text = b"\n".join(files[i].read_bytes() for i in order)[:_SOURCES]
  numbers = np.minimum(np.frombuffer(text, np.uint8), 127).astype(np.int32)
  ends = [len(numbers) * 8 // 10, len(numbers) * 9 // 10]
  return dict(zip(PARTS, np.split(numbers, ends), strict=True))


def windows(text, length, count=None):
  """The text's first windows of `length` characters, side by side: [windows, length]."""
  return text[: len(text) // length * length].reshape(-1, length)[:count]


def random_windows(text, length, count, rng):
  """Windows at random places: [count, length]."""
  starts = rng.integers(0, len(text) - length, count)
  return text[starts[:, None] + np.arange(length)]
