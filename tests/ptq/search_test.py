"""AWQ against its grid in float64, learned rounding against all roundings, the rest by hand."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from fp8jax import formats
from fp8jax.errors import UserError
from fp8jax.ptq import apply, awq, bias, learned_rounding, methods, moments, smooth
from fp8jax.quantization import quantize
from fp8jax.recipe.quant import Largest, Quant, Scale

INT4, E2M1 = formats.INT4, formats.E2M1
GRID = 20
# Losses of two ratios, or of two shares, that float32 cannot tell apart.
TIE = 1e-4


def _case(seed=0, n=12, k=48):
  """(weights of two layers, inputs): some channels loud, one dead."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((4 * k, k)) @ (np.eye(k) + rng.standard_normal((k, k)) / k**0.5)
  x *= np.exp(rng.standard_normal(k))
  x[:, 5] = 0
  ws = [rng.standard_normal((rows, k)).astype(np.float32) for rows in (n, n + 4)]
  return ws, x.astype(np.float32)


def _loss(w, back, x):
  return np.sum(((np.float64(w) - back) @ np.float64(x).T) ** 2)


@pytest.mark.parametrize("seed", [0, 1])
def test_awq_takes_the_best_ratio_of_its_grid(seed):
  """Weights of two Quants; all 20 losses in float64, and the chosen one but at ties."""
  ws, x = _case(seed)
  quants = (Quant(INT4, (1, 16)), Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32))
  mean = np.abs(np.float64(x)).mean(0)
  losses = []
  for ratio in np.arange(GRID) / GRID:
    s = np.where(mean > 0, mean, 1) ** ratio
    s = np.where(mean > 0, s / np.sqrt(s[mean > 0].max() * s[mean > 0].min()), 1)
    backs = [
      oracle.fake_quantize(w * np.float32(s), q.format.name, q.tile, q.scale.value) / s
      for w, q in zip(ws, quants)
    ]
    losses.append(sum(_loss(w, b, x) for w, b in zip(ws, backs)))
  losses = np.array(losses)
  made = awq.search([jnp.asarray(w) for w in ws], moments.of(x), quants, GRID)
  chosen = round(float(made.ratio) * GRID)
  assert losses[chosen] <= losses.min() * (1 + TIE)
  assert 0 < losses[chosen] < 0.9 * losses[0]
  # A code next to a tie may differ: few of these are, and the rest of the sum is exact.
  np.testing.assert_allclose(made.losses, losses, rtol=1e-3)
  s = mean[mean > 0] ** (chosen / GRID)
  np.testing.assert_allclose(
    np.asarray(made.scale_K)[mean > 0], s / np.sqrt(s.max() * s.min()), rtol=1e-5
  )
  assert made.scale_K[5] == 1


def test_the_factor_of_two_levels_is_of_what_clipping_left():
  """Scales are the factor times E4M3 numbers, of matrices that are quantized as one."""
  rng = np.random.default_rng(0)
  ws = [jnp.asarray(rng.standard_normal((n, 64)), jnp.float32) for n in (8, 24)]
  ws[1] = ws[1].at[3, 5].set(30.0)  # an outlier that a clip pays for
  x = jnp.asarray(rng.standard_normal((96, 64)), jnp.float32).at[:, 5].multiply(1e-3)
  quant = Quant(formats.by_name("e2m1"), (1, 16), Scale.E4M3_OVER_F32)
  made = {}
  for chosen in ((), (methods.Awq(clip=True),)):
    parts = apply.to_matrices(ws, moments.of(x), quant, chosen, "here")
    assert len(parts) == 2 and len({factor for _, factor in parts}) == 1
    for codes, factor in parts:
      shares = np.asarray(codes.scale, np.float64) / factor
      np.testing.assert_allclose(
        shares, shares.astype(ml_dtypes.float8_e4m3fn).astype(float), rtol=1e-6
      )
    made[bool(chosen)] = parts[0][1]
  assert made[False] == pytest.approx(30.0 / (6 * 448)) and made[True] < 0.9 * made[False]


def test_awq_clips_every_tile_where_its_own_error_is_least():
  (w, _), x = _case(2, k=40)
  quant = Quant(INT4, (1, 16))  # the last tile has 8 columns
  made = np.asarray(awq.clipped(jnp.asarray(w), moments.of(x), quant, GRID))
  shares = set()
  for row, tile in itertools.product(range(len(w)), (slice(0, 16), slice(16, 32), slice(32, 40))):
    part, amax = w[row, tile], np.abs(w[row, tile]).max()
    losses = []
    for share in 1 - np.arange(GRID // 2) / GRID:
      near = np.clip(part, -amax * np.float32(share), amax * np.float32(share))
      losses.append(
        _loss(part, oracle.fake_quantize(near[None], "int4", (1, 0), "f32")[0], x[:, tile])
      )
    share = np.abs(made[row, tile]).max() / amax
    chosen = round((1 - share) * GRID)
    assert losses[chosen] <= min(losses) * (1 + TIE) + 1e-6
    np.testing.assert_allclose(
      made[row, tile], np.clip(part, -amax * share, amax * share), rtol=1e-6
    )
    shares.add(chosen)
  assert len(shares) > 3


@pytest.mark.parametrize(
  "quant", [Quant(INT4, (1, 8), clip=Largest(0.6)), Quant(E2M1, (1, 4), Scale.FLOOR)], ids=str
)
def test_learned_rounding_comes_near_the_best_of_all(quant):
  """Of 2^8 roundings a row the best in float64 is a bound; the way there is monotone."""
  (w, _), x = _case(3, n=16, k=8)
  x[:, 5] = x[:, 4]  # not independent of it
  made, losses = learned_rounding.learn(jnp.asarray(w), moments.of(x), quant, 200)
  fmt, wide = quant.format.name, np.float64(made.scale).repeat(quant.tile[1], 1)
  grid = np.unique(oracle.cast(np.linspace(-8, 8, 1601), fmt).astype(np.float64))
  values = np.clip(w / wide, -quant.format.max, quant.format.max)
  above = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
  neighbours = np.stack([grid[above - 1], grid[above]])
  codes = np.asarray(made.data, np.float64)
  assert (np.isclose(codes, neighbours[0]) | np.isclose(codes, neighbours[1])).all()
  nearest = np.float64(quantize.quantize(jnp.asarray(w), quant).data)
  gram = np.float64(x).T @ np.float64(x)

  def loss(row, tried):
    error = tried * wide[row] - w[row]
    return np.einsum("tk,kl,tl->t", error, gram, error)

  choice = np.array(list(itertools.product((0, 1), repeat=8)))
  bound, own, plain = np.array([
    (loss(r, np.where(choice, neighbours[1, r], neighbours[0, r])).min(),
     loss(r, codes[r : r + 1])[0], loss(r, nearest[r : r + 1])[0])
    for r in range(len(w))
  ]).T  # fmt: skip
  assert (own >= bound * (1 - 1e-9)).all()
  assert (own <= plain * (1 + 1e-9)).all()
  # More than half of what rounding to the nearest leaves to gain.
  assert np.sum(own - bound) < 0.5 * np.sum(plain - bound)
  assert losses.shape == (201,) and (np.diff(losses) <= 0).all()
  np.testing.assert_allclose([losses[0], losses[-1]], [plain.sum(), own.sum()], rtol=1e-5)


def test_a_corrected_bias_gives_the_mean_output_back():
  (w, _), x = _case(4)
  made = w + np.float32(0.1) * np.sign(w)
  b = np.arange(len(w), dtype=np.float32)
  new = bias.corrected(b, w, made, moments.of(x), "layers/0/attn/q")
  mean = (np.float64(x) @ np.float64(w).T + b).mean(0)
  np.testing.assert_allclose((np.float64(x) @ np.float64(made).T + new).mean(0), mean, atol=1e-5)
  with pytest.raises(UserError, match="layers/0/mlp/up: it has no bias"):
    bias.corrected(None, w, made, moments.of(x), "layers/0/mlp/up")


def test_scales_between_channels_are_those_of_the_papers():
  x, w = np.array([8, 2, 0, np.inf, 1e30, 3]), np.array([2, 8, 1, 1, 1, np.nan])
  np.testing.assert_allclose(smooth.scales(x, w, 0.5), [2, 0.5, 1, 1, 2**20, 1])
  np.testing.assert_allclose(smooth.scales(x, w, 1.0)[:2], [8, 2])
  np.testing.assert_allclose(smooth.scales(x, w, 0.0)[:2], [1 / 2, 1 / 8])
  np.testing.assert_allclose(smooth.scales(x, w, 0.75)[0], 8**0.75 / 2**0.25, rtol=1e-6)
  s = smooth.equalization(x[:2], w[:2])
  np.testing.assert_allclose(x[:2] / s, w[:2] * s)
  with pytest.raises(ValueError, match="alpha=2 must be from 0 to 1"):
    smooth.scales(x, w, 2)


def test_learned_rounding_refuses_what_has_no_steps():
  (w, _), x = _case(n=4, k=16)
  for quant, steps, word in (
    (Quant(formats.LNS8, (1, 16)), 2, "logarithmic"),
    (Quant(INT4, (1, 16)), 0, "from 1 to 10,000"),
  ):
    with pytest.raises(UserError, match=word):
      learned_rounding.learn(w, moments.of(x), quant, steps)
