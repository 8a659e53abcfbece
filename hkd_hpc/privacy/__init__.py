"""Privacy: how what leaves a client is clipped and gets noise, one rule for all schemes."""
