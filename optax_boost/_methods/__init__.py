"""Methods, which rewrite updates or the model.

None imports another; ``_leaves`` has the arguments that several share: leaves to leave alone,
layers, mesh axes.
"""
