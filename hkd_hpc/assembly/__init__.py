"""The parts that assemble.py puts together: a federation, its network, what is checked and what is recorded of both."""
