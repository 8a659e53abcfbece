"""Privacy over a whole run: what its rounds spend of a budget, and masks on its sums. `privacy/` is one release."""
