"""Numbers: the metrics of a round (metrics.py), statistics over seeds, and the tables that show them."""
