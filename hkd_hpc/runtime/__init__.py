"""Where a run happens: machine, versions, identity of code and data."""
