"""Methods that rewrite updates or the model; none imports another."""
