"""The one form of a transformation: what it says of itself, and what drives and checks its steps.

The modules, each of which imports those before it:

  _protocol         what the type of a state declares: metrics, requests, its outcome, exact params
  _skipped_steps    whether a call made a step, or left its batch out, as the states tell
  _finiteness       the rule of finiteness: ``finite_entries`` defines which entries of gradients,
                    params and states are finite
  _state_check      refuses the state of other params or of another transformation
  _form             what a transformation says of itself: its name, its arguments, what it holds,
                    what it changes or keeps
  _compositions     the transformations inside a transformation, of this package, of optax and of
                    users
  _order            the two rules of order, checked in ``init``
  _exact_params     adds updates to params; reaches the exact params of a permutation
  _driver           makes or skips the steps of wrappers, and returns updates or applies them
  _transformation   makes every transformation, from the functions of a method or of a wrapper
  _apply_gradients  ``apply_gradients``: update and ``optax.apply_updates`` in one call
"""
