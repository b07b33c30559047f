"""Races: several transformations train the same problem, and are compared at equal budgets.

The modules, each of which imports those before it:

  _plot      the picture of a race
  _result    ``RaceResult``: curves, and their comparison at equal steps, gradients and time
  _averages  averages in an optimizer's state, at which a race evaluates
  _training  the trainings: count gradients, time steps, train the other seeds
  _race      ``race``, with its arguments and its batches
"""

from optax_boost._race._race import race as race
from optax_boost._race._result import RaceResult as RaceResult
