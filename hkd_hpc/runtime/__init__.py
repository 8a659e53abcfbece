"""Where a run happens: machine, versions, identity of code and data; paths and code that a user gave."""
