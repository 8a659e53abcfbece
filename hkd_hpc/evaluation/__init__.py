"""What is measured once, after the last round, with the final global model. The test of each round is the server's."""
