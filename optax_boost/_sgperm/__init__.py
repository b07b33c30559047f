"""SGPerm and LaPerm: training by permuting weights."""
