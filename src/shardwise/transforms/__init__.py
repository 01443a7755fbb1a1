"""Program to program: remat, micro-batches."""
