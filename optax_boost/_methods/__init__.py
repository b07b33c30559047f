"""Methods, which rewrite updates or the model. No method imports another one.

``_leaves`` checks the arguments `exclude`, `layers` and `axis_name`, which several methods share.
"""
