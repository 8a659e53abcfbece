"""Faster local training on a GPU: recorded epochs, concurrent clients."""
