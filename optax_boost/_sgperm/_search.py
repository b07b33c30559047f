"""The cycle search on the host, one source for two machines: plain Python and numba.

As plain Python it takes lists, as a function compiled by numba arrays; so it indexes, compares and
adds, and does nothing else. Weights and epsilons are float64, in which their sums are what the
specification compares.
"""

from typing import Any


def search(
  weights: Any,
  up: Any,
  order: Any,
  starts: Any,
  epsilon: Any,
  source: Any,
  above: Any,
  below: Any,
  live: Any,
  seen: Any,
  path: Any,
  cursor: Any,
) -> None:
  """Finds the cycles of all subsets.

  The subsets lie one behind the other, each in ascending order of weight; an entry is named by its
  place in this order.

  Args:
    weights: the entries' weights.
    up: whether the entry wants to increase; the others want to decrease.
    order: per subset, its entries by falling size of the recommendation.
    starts: where each subset starts, and at last where they end.
    epsilon: per subset, how far a weight may move.
    source: receives for each entry whose weight it gets; starts as the entry itself.
    above: scratch, the next live entry; starts as the next.
    below: scratch, the last live entry; starts as the last.
    live: scratch, whether an entry may still be in a cycle; starts as true.
    seen: scratch, the last source whose search visited the entry; starts as -1.
    path: scratch.
    cursor: scratch.
  """
  for group in range(len(epsilon)):
    first, last = starts[group], starts[group + 1]
    reach = epsilon[group]
    for t in range(first, last):
      s = order[t]
      if not live[s]:
        continue
      w = weights[s]
      tied = False
      found = False
      # All of the source's own direction lie between it and the nearest entry of the other.
      end = s
      if up[s]:
        step = above[s]
        while step < last and weights[step] - reach <= w:
          tied = tied or weights[step] == weights[end]
          end = step
          if not up[step]:
            found = step != above[s] or weights[step] < w + reach
            break
          step = above[step]
      else:
        step = below[s]
        while step >= first and w < weights[step] + reach:
          tied = tied or weights[step] == weights[end]
          end = step
          if up[step]:
            found = step != below[s] or w - reach <= weights[step]
            break
          step = below[step]
      length = 1
      path[0] = s
      if found and not tied:
        step = s
        while step != end:
          step = above[step] if up[s] else below[step]
          path[length] = step
          length += 1
      elif found:
        # An entry that wants to decrease cannot step to an equal weight: the path may wind.
        cursor[s] = above[s] if up[s] else below[s]
        seen[s] = s
        while length > 0:
          i = path[length - 1]
          j = cursor[i]
          if up[i]:
            while j < last and j != s and seen[j] == s:
              j = above[j]
            inside = j < last and weights[j] < weights[i] + reach
            if inside:
              cursor[i] = above[j]
          else:
            while j >= first and (weights[j] == weights[i] or (j != s and seen[j] == s)):
              j = below[j]
            inside = j >= first and weights[i] - reach <= weights[j]
            if inside:
              cursor[i] = below[j]
          if not inside:
            length -= 1
          elif j == s:
            break
          else:
            seen[j] = s
            cursor[j] = above[j] if up[j] else below[j]
            path[length] = j
            length += 1
        length = max(length, 1)
      for k in range(length):
        i = path[k]
        source[i] = path[k + 1] if k + 1 < length else s
        live[i] = False
        lower, upper = below[i], above[i]
        if lower >= first:
          above[lower] = upper
        if upper < last:
          below[upper] = lower
