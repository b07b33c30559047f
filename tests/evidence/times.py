"""The time until a score, read off a curve."""

import numpy as np


def time_to(score, times, scores):
  """The interpolated time at which a curve first reaches a score; infinite if it doesn't."""
  end = next((i for i, reached in enumerate(scores, 1) if reached >= score), None)
  return float(np.interp(score, scores[:end][-2:], times[:end][-2:])) if end else np.inf


def speed(share):
  """How many times as fast as a time of 1, for a table."""
  return f"{1 / share:.2f}" if np.isfinite(share) else "never"
