"""GEMM shapes (M, N, K) of the suites that compute.

Small ones run everywhere; odd ones have partial last tiles; long ones have more steps along K than
the reference unrolls; those for Hopper have N of one tile, of three, of a bit more than one and of
less, one to six steps, and sizes that the kernel pads. What is compiled and timed stands in
kernels/mosaic_aot_test.py and experiments/bench/kernels/run.py.
"""

SMALL = [(16, 16, 16), (128, 128, 128), (64, 192, 256)]
ODD = [(40, 72, 200), (3, 130, 576), (129, 1, 64)]
LONG = [(8, 24, 128 * 20), (8, 24, 128 * 20 + 40)]
GEMM = SMALL + ODD + LONG
HOPPER = [(128, 128, 128), (200, 384, 384), (3, 131, 200), (129, 24, 704)]
