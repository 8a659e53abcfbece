"""Statistics over runs, and the tables that show them."""
