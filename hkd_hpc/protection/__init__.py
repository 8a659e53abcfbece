"""What a run's protection asks of its rounds: what they spend of a privacy budget, and masks on its sums."""
