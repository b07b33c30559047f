"""The one form of a transformation: what it says of itself, and what drives and checks its steps.

The modules, each of which imports those before it:

  _protocol         what a state's type declares: metrics, requests, its outcome, exact params
  _finiteness       the one rule of finiteness: ``finite_entries`` defines which entries of
                    gradients, params and states are finite
  _state_check      refuses the state of other params or of another transformation
  _form             what a transformation says of itself: its name, its arguments, what it holds,
                    what it changes or keeps
  _compositions     the transformations inside a transformation, of this package, of optax and of
                    users
  _order            the two rules of order, checked in ``init``
  _driver           the driver of wrappers: a step is made or not, in updates or in place
  _transformation   the one way to write a transformation, and a wrapper of another one
  _apply_gradients  ``apply_gradients``: update and ``optax.apply_updates`` in one
"""
