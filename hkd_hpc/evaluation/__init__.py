"""What is measured once, with the final global model."""
