"""The control plane: how ranks wait for each other, fail and end as one job."""
