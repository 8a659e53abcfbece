"""Speed and memory against their targets."""
