"""Means, differences and tables as text."""

from collections.abc import Sequence
import math

import numpy as np


def half_interval(values: np.ndarray) -> float | None:
  """Half of the 95 % interval of the mean, by Student's t; None for less than two values."""
  # Imported late: nothing else needs SciPy, which JAX brings along.
  from scipy import special

  if len(values) < 2:
    return None
  quantile = special.stdtrit(len(values) - 1, 0.975)
  return float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def plus_minus(mean: float, spread: float | None, sign: str = "") -> str:
  """A mean with its spread, to the second digit of the spread; `sign` "+" shows plus signs."""
  if spread is None:
    return f"{mean:{sign}.4g}"
  if not 1e-12 < spread < 1e6:
    return f"{mean:{sign}.4g} ± {spread:.2g}"
  decimals = max(0, 1 - math.floor(math.log10(spread)))
  if decimals > 5:
    return f"{mean:{sign}.3e} ± {spread:.1e}"
  return f"{mean:{sign}.{decimals}f} ± {spread:.{decimals}f}"


def finding(mean: float, half: float | None) -> str:
  """A mean difference in words, with half of its interval."""
  if math.isnan(mean):
    return "not known"
  direction = "higher" if mean > 0 else "lower"
  if half is None:
    return f"{direction} by {abs(mean):.3g} with the one seed, which says little"
  if abs(mean) <= half:
    return f"no clear difference ({plus_minus(mean, half, sign='+')})"
  return f"{direction} by {plus_minus(abs(mean), half)}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
  """A Markdown table whose columns line up as plain text; the first line is the header."""
  columns = []
  # A user's names may hold what ends a cell.
  lines = [[" ".join(cell.replace("|", r"\|").splitlines()) for cell in line] for line in lines]
  for i, column in enumerate(zip(*lines, strict=True)):
    width = max(map(len, column))
    # The first column is the method's name; numbers are aligned to the right.
    rule = "-" * (width - 1) + ":" if i else "-" * width
    pad = str.rjust if i else str.ljust
    head, *cells = (pad(cell, width) for cell in column)
    columns.append([head, rule, *cells])
  return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
