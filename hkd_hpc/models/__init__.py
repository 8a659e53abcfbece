"""Networks, a model as one flat buffer, its optimiser, its tests."""
