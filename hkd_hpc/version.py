"""The version of this package, in this one place: setup.py reads it without an import."""

__version__ = "0.1.0"
