"""Races of transformations: counting, timing, comparison, pictures.

The modules, each of which imports those before it:

  _plot      the picture of a race
  _result    curves, compared at equal steps, gradient evaluations and time
  _averages  averages of params and statistics in an optimizer's state, which a race evaluates
  _training  the trainings: gradients are counted, the steps timed, the other seeds trained
  _race      ``race``: its arguments and its batches
"""

from optax_boost._race._race import race as race
from optax_boost._race._result import RaceResult as RaceResult
