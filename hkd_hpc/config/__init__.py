"""The settings of a run: declared, filled in, checked."""
