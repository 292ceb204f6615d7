"""What the machine can do at most: how fast memory is read, how fast kernels multiply."""
