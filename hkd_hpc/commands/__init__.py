"""`hkd`, which starts all commands (hkd.py), and those that are one file.

Others have a package with a `__main__.py`: check, compare, doctor, export, jobs, report; that of data starts data.py.
Each is `python -m hkd_hpc.NAME` too.
"""
