"""Comparisons whose tolerance follows from the terms that a result is summed from.

Each term of a sum is rounded in units of its own last place (ulps). A sum that cancels to a 30th
of its terms' magnitudes thus keeps a 30th of the relative precision, and how many ulps are lost
depends on the order of summation and on fused multiply-adds, which differ by processor. A bound in
ulps of the summed magnitudes holds on all of them, and is as tight as float32 allows.
"""

import numpy as np


def assert_within_ulps(found, expected, magnitudes, ulps):
  """Entry by entry: |found - expected| <= ulps * epsilon * magnitudes.

  `magnitudes` is the sum of the magnitudes of each entry's terms; epsilon is of `found`'s dtype.
  """
  dtype = np.asarray(found).dtype
  found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
  unit = np.broadcast_to(np.finfo(dtype).eps * np.asarray(magnitudes, np.float64), expected.shape)
  assert found.shape == expected.shape
  # Not `error > bound`: a NaN must not pass.
  wrong = ~(np.abs(found - expected) <= ulps * unit)
  if wrong.any():
    with np.errstate(divide="ignore", invalid="ignore"):
      off = np.abs(found - expected) / unit
    at = np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape)
    raise AssertionError(
      f"{wrong.sum()} of {wrong.size} entries are further than {ulps} ulps of their terms off; "
      f"the worst by {off[at]:.3g}, at {tuple(map(int, at))}: {found[at]!r}, not {expected[at]!r}"
    )


def path_lengths(start, trace):
  """|start| and the magnitudes of all steps to each entry of `trace`, whose first axis is time."""
  points = np.concatenate([np.asarray(start)[None], trace]).astype(np.float64)
  return np.abs(points[0]) + np.cumsum(np.abs(np.diff(points, axis=0)), axis=0)


def decayed_sums(terms, decay):
  """The sums of |terms| of a momentum: s <- decay s + |term|, along the first axis."""
  sums = np.abs(np.asarray(terms, np.float64))
  for t in range(1, len(sums)):
    sums[t] += decay * sums[t - 1]
  return sums
