"""Faster local training on a GPU, apart from the core and unmeasured: recorded epochs, concurrent clients.

Only assemble.py imports from it, `trainer_for`: without the folder, and with LocalTrainer in that line, all else works.
"""
