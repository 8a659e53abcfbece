"""What outlives the processes of a run: the state after a round, what clients keep, who has worked on it."""
