"""fp8jax: train language models in FP8 with JAX.

  y = fp8jax.dot("TD,DF->TF", x, w, "block_128")  # its gradients are FP8 products too

`RECIPES` holds the named recipes. A Recipe of one's own is made of Gemms and Quants; `recipe.quant`
and `formats` have the values that are not here. Recipes with delayed or static scales take a Site
in place of the name, see `site.single`. This file alone re-exports.
"""

from fp8jax.formats import E4M3, E5M2
from fp8jax.ops import site
from fp8jax.ops.api import dequantize, quantize
from fp8jax.ops.dots import dot, dot_general
from fp8jax.optim.quantized_moments import quantized_state, scale_by_adam
from fp8jax.quantization.convert import mxfp4_to_block_fp8
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import Quant, Scale

__version__ = "0.1.0"

__all__ = [
  "E4M3", "E5M2", "Gemm", "Quant", "RECIPES", "Recipe", "Scale", "__version__", "dequantize", "dot",
  "dot_general", "mxfp4_to_block_fp8", "quantize", "quantized_state", "scale_by_adam", "site",
]  # fmt: skip
