"""Sums that show nothing but themselves: pairwise masks modulo 2^64, after Bonawitz et al. (CCS 2017).

protocol.py has the steps of a client and of the server, exchange.py takes them to the ranks of a run.
"""
