"""Quantization of a matrix for one GEMM or for two, in one pass over it."""
