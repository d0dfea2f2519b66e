"""One table of GEMM shapes (M, N, K) for tests, benchmarks and tuning.

Small ones run everywhere; odd ones have partial last tiles; long ones have more steps along K than
the reference unrolls.
"""

SMALL = [(16, 16, 16), (128, 128, 128), (64, 192, 256)]
ODD = [(40, 72, 200), (3, 130, 576), (129, 1, 64)]
LONG = [(8, 24, 128 * 20), (8, 24, 128 * 20 + 40)]
GEMM = SMALL + ODD + LONG
