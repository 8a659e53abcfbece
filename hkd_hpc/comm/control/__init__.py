"""The control plane: how ranks meet, fail and end as one job."""
