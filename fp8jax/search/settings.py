"""Keys of --job=search."""

from fp8jax.keys import NOTHING, key, section


# A table: a key a row, its meaning beside it.
# fmt: off
@section("search", NOTHING, mapped=True)
class Search:
  """--job=search: FLIQS (arXiv:2308.03290), formats sampled per linear layer while the model
  trains, and a policy that learns which to take; on one device. A search remembers these keys.
  """

  options: tuple[str, ...] = key(("e2m1_dynamic", "fp8_dynamic", "bf16"),
    "Recipes to choose from, of fp8jax/recipe/served.py with current scales, or bf16: for the "
    "linear layers of which precision.rules quantize the forward product, the head excepted.")
  target: float = key(0.125, "BOPs of these layers' forward products, as a share of BF16's: 0.25 "
    "in 8 bits, 0.0625 in 4.")
  decisions: str = key("layer", 'One option per linear layer ("layer"), per transformer layer '
    '("block") or for all ("single").', choices=("layer", "block", "single"))
  reward: str = key("absolute", 'With quality Q = minus the training loss and c = BOPs / target: '
    'Q - beta |c - 1| ("absolute"), Q - beta max(c - 1, 0) ("one_sided"), Q c^beta ("soft"), '
    'Q max(c, 1)^beta ("hard").', choices=("absolute", "one_sided", "soft", "hard"))
  beta: float = key(1.0, "See reward.", least=0)
  delay: int = key(2500, "First steps, in which options are uniform and the policy rests.", least=0)
  rate: float = key(5e-3, "Adam's learning rate for the policy's logits.")
  entropy: float = key(0.5, "Largest weight of the entropy that the policy is to lose.", least=0)
  entropy_schedule: str = key("cosine", 'From 0 to `entropy` after the delay: "cosine", "linear", '
    '"heaviside" (at half time); or "constant".',
    choices=("cosine", "linear", "heaviside", "constant"))


# fmt: on
