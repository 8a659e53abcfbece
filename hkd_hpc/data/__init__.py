"""Image data: official and own files (`sources`), one copy per node (`share`), who gets which image (`partition`).

Nothing is imported here, so that `python -m hkd_hpc.data prepare` needs the standard library only.
"""
