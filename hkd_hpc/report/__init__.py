"""Runs and studies as one HTML page that one would put beside a paper: tables, figures, what happened, how to
reproduce it.
"""
