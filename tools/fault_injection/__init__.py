"""Small jobs, broken on purpose."""
