"""From an FX graph to a plan: normalise, annotate, grow regions by cost."""
