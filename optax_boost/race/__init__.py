"""Races of transformations: ``from optax_boost.race import RaceResult, race``.

The attribute ``optax_boost.race`` is the function, however this subpackage is imported; the class
is imported by name.
"""

from optax_boost.race._race import race
from optax_boost.race._result import RaceResult

__all__ = ["RaceResult", "race"]
