"""Keys of --job=sensitivity."""

from fp8jax.keys import NOTHING, key, section


# A table: a key a row, its meaning beside it.
# fmt: off
@section("sensitivity", NOTHING, mapped=True)
class Sensitivity:
  """The measurements of --job=sensitivity, on one device: the loss that each linear layer's forward
  GEMM loses by its recipe, with weights.hf's weights, the workdir's checkpoint's, or init.hf's.
  """

  tokens: int = key(8192, "Held-out tokens per source, rounded up to whole batches of eval.batch: "
    "rules are chosen on one half and reported on the other. Memory: tokens x layers x "
    "hidden_size x 4 bytes on the host.")
  max_loss: float = key(0.25, "Budget of a set of precision.rules: percent that the held-out loss "
    "may exceed BF16's; 0: none.")
  min_fp8: float = key(0.9, "Budget of another set: the least share of the sites' forward FLOPs "
    "that is quantized; 0: none.")
  recipes: tuple[str, ...] = key((), "Recipes to choose from per layer, beside bf16, of "
    "fp8jax/recipe/served.py with current scales: gradient scores and a knapsack within `bops`, "
    "beside measured ones; written to formats.json.")
  bops: float = key(0.125, "Budget of `recipes`: BOPs (bits of weights x bits of inputs, summed "
    "over multiplications) of the sites, as a share of BF16's.")
  # No keys. Switched on alone and measured, beside all at once: inputs or weights of all sites,
  # kinds (mlp/up of all layers), layers, and so many sites, the most sensitive by estimate.
  groups: tuple[str, ...] = ("tensors", "kinds", "layers")
  top: int = 20


# fmt: on
