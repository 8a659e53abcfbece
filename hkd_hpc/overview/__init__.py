"""What a run is going to do, and how far it is, in words."""
