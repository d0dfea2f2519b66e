"""A matrix made narrow for one GEMM or for two, in one pass over it."""
