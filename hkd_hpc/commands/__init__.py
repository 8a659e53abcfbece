"""Commands of one file each, and `hkd`, which starts all commands."""
