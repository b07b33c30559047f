"""Races of transformations: ``from optax_boost.race import RaceResult, race``.

The attribute ``optax_boost.race`` is the function, however this subpackage is imported; its
classes are imported by name.
"""

from optax_boost.race._api import race
from optax_boost.race._curves import RaceCurves
from optax_boost.race._result import RaceResult

__all__ = ["RaceCurves", "RaceResult", "race"]
