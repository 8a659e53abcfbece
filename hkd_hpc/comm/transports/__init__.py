"""What moves tensors: one process, MPI, gloo, NCCL."""
