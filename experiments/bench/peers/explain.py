"""Compares what the workers wrote, and rebuilds it in NumPy with one rule changed at a time.

A rule says how a tile's amax becomes what its elements are multiplied by. That of ours must give
our codes, that of a peer the peer's codes, all of them; then what the peer multiplied is known, and
its products are compared with float64's of the same operands. What remains is summation in float32.
"""

import dataclasses

import inputs
import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
F32 = np.float32
MAX = {E4M3: F32(448), E5M2: F32(57344)}
PRODUCTS = ("y", "dx", "dw")

# --- rules: (x, amax, maximum of the format), float32 -> (x in the format's units, scale) ---------


def ours(x, amax, top):
  """Scale amax * (1 / 448), elements times its reciprocal; every operation rounds to float32."""
  scale = amax * F32(1 / top)
  return x * (1 / scale), scale


def quotient(x, amax, top):
  """Scale amax / 448, elements divided by it."""
  scale = amax / top
  return x / scale, scale


def quotient_reciprocal(x, amax, top):
  """Scale amax / 448, elements times its reciprocal."""
  scale = amax / top
  return x * (1 / scale), scale


def inverse_reciprocal(x, amax, top):
  """Scale 1 / (448 / amax), elements times its reciprocal."""
  scale = 1 / (top / amax)
  return x * (1 / scale), scale


def multiplier(x, amax, top):
  """Elements times 448 / amax, rounded from float64; divided by it again before the product."""
  factor = (np.float64(top) / amax.astype(np.float64)).astype(F32)
  return x * factor, 1 / factor.astype(np.float64)


def power_of_two(x, amax, top):
  """The smallest power of two not below amax / 448."""
  mantissa, exponent = np.frexp(amax.astype(np.float64) / top)
  scale = np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(F32)
  return x / scale, scale


def power_of_two_by_log2(x, amax, top):
  """2^ceil(log2(amax * (1 / 448))), log2 as XLA has it: log times 1 / log(2), both in float32."""
  logarithm = np.log((amax * F32(1 / top)).astype(np.float64)).astype(F32)
  scale = np.exp2(np.ceil(logarithm * F32(1 / np.log(2))))
  return x / scale, scale


F32_RULES = (ours, quotient, quotient_reciprocal, inverse_reciprocal, multiplier)
POW2_RULES = (power_of_two, power_of_two_by_log2)

# --- layouts: tiles of x [M, K], w [K, N] and g [M, N] as they lie; 0 is the whole axis -----------

# product: ((operand, tile), (operand, tile)); no tile is high precision.
ALL, ROW, COLUMN = (0, 0), (1, 0), (0, 1)
LAYOUTS = {
  "tensor": {"y": (ALL, ALL), "dx": (ALL, ALL), "dw": (ALL, ALL)},
  "row": {"y": (ROW, COLUMN), "dx": (ROW, ROW), "dw": (COLUMN, COLUMN)},
  "row, wgrad wide": {"y": (ROW, COLUMN), "dx": (ROW, ALL), "dw": (None, None)},
  "1x128": {"y": ((1, 128), (128, 1)), "dx": ((1, 128), (1, 128)), "dw": ((128, 1), (128, 1))},
  "1x128, 128x128": {
    "y": ((1, 128), (128, 128)), "dx": ((1, 128), (128, 128)), "dw": ((128, 1), (128, 1))
  },
  "1x32": {"y": ((1, 32), (32, 1)), "dx": ((1, 32), (1, 32)), "dw": ((32, 1), (32, 1))},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
  """A configuration of ours and what means the same elsewhere.

  Attributes:
    ours: recipe.
    peer: worker, e.g. "qwix".
    theirs: its configuration.
    layout: key of LAYOUTS.
    our_rule: of ours.
    rule: of the peer.
    gradients: format of g.
    is_shifted: the peer keeps the forward's codes of x and w for its gradients, and multiplies g by
      their scales before it makes g narrow.
    is_dequantized: the peer multiplies values of float32, codes times scales, not codes.
  """

  ours: str
  peer: str
  theirs: str
  layout: str
  our_rule: object
  rule: object
  gradients: type = E4M3
  is_shifted: bool = False
  is_dequantized: bool = False


PAIRS = (
  Pair("tensor_delayed", "flax", "direct", "tensor", ours, inverse_reciprocal, E5M2),
  Pair(
    "tensor_delayed", "flax", "qdq", "tensor", ours, inverse_reciprocal, E5M2, is_dequantized=True
  ),
  Pair(
    "tensor_current", "torchao", "tensorwise", "tensor", ours, multiplier, E5M2, is_dequantized=True
  ),
  Pair("tensor_current", "qwix", "tensor", "tensor", ours, ours, E5M2, is_shifted=True),
  Pair("row_f32", "qwix", "row", "row", ours, ours, is_shifted=True),
  Pair("rowwise", "torchao", "rowwise", "row", power_of_two, power_of_two),
  Pair(
    "rowwise_gw_hp", "torchao", "rowwise_with_gw_hp", "row, wgrad wide", power_of_two, power_of_two
  ),
  Pair("tile_128", "qwix", "tile_128", "1x128", ours, ours),
  Pair("block_128", "qwix", "block_128", "1x128, 128x128", ours, ours),
  Pair("mxfp8", "torchao", "mxfp8", "1x32", power_of_two, power_of_two),
  Pair("mxfp8", "qwix", "mxfp8", "1x32", power_of_two, power_of_two_by_log2),
)


def narrow(t, tile, fmt, rule):
  """(codes uint8, float64 values, scale per element) of a matrix, tiles of which share a scale."""
  if tile is None:
    return None, t.astype(np.float64), None
  extents = [n if e == 0 else e for n, e in zip(t.shape, tile)]
  padded = np.pad(t, [(0, -n % e) for n, e in zip(t.shape, extents)])
  rows, cols = (n // e for n, e in zip(padded.shape, extents))
  tiles = padded.reshape(rows, extents[0], cols, extents[1])
  amax = np.abs(tiles).max(axis=(1, 3), keepdims=True)
  scaled, scale = rule(tiles, np.where(amax > 0, amax, MAX[fmt]), MAX[fmt])
  data = np.clip(scaled, -MAX[fmt], MAX[fmt]).astype(fmt)

  def crop(a):
    return np.broadcast_to(a, tiles.shape).reshape(padded.shape)[: t.shape[0], : t.shape[1]]

  return crop(data).view(np.uint8), crop(data.astype(np.float64) * scale), crop(scale)


def operands(x, w, g, layout, rule, gradients, is_shifted=False):
  """({x, w, g: codes}, {product: (float64 lhs, float64 rhs)}) of y = x w, dx = g w', dw = x' g."""
  tiles = LAYOUTS[layout]
  x_codes, x_values, x_scale = narrow(x, tiles["y"][0], E4M3, rule)
  w_codes, w_values, w_scale = narrow(w, tiles["y"][1], E4M3, rule)
  found = {"y": (x_values, w_values)}
  if is_shifted:
    _, by_w, _ = narrow(g * w_scale[:1], tiles["dx"][0], gradients, rule)
    _, by_x, _ = narrow(g * x_scale[:, :1], tiles["dw"][1], gradients, rule)
    found["dx"] = by_w, w_codes.view(E4M3).astype(np.float64).T
    found["dw"] = x_codes.view(E4M3).astype(np.float64).T, by_x
    return {"x": x_codes, "w": w_codes}, found
  g_codes, g_values, _ = narrow(g, tiles["dx"][0], gradients, rule)
  found["dx"] = g_values, narrow(w, tiles["dx"][1], E4M3, rule)[1].T
  again = narrow(x, tiles["dw"][0], E4M3, rule)[1], narrow(g, tiles["dw"][1], gradients, rule)[1]
  found["dw"] = again[0].T, again[1]
  return {"x": x_codes, "w": w_codes, "g": g_codes}, found


# --- comparison ----------------------------------------------------------------------------------


def references(arrays) -> dict[str, np.ndarray]:
  """{case/product: float64}."""
  found = {}
  for case in (*inputs.SHAPES, inputs.TIES):
    x, w, g = (arrays[f"{case}/{t}"].astype(np.float64) for t in "xwg")
    found |= {f"{case}/y": x @ w, f"{case}/dx": g @ w.T, f"{case}/dw": x.T @ g}
  return found


def relative_error(got, want) -> float:
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def largest(a, b) -> float:
  """Largest difference over the largest magnitude."""
  return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


def errors(found, reference):
  """{configuration: {case: {product: relative error}}} of one worker."""
  result = {}
  for name in found:
    case, configuration, what = (*name.split("/"), "", "")[:3]
    if what in PRODUCTS:
      error = relative_error(found[name], reference[f"{case}/{what}"])
      result.setdefault(configuration, {}).setdefault(case, {})[what] = error
  return result


def compare(pair: Pair, case: str, arrays, mine, theirs):
  """What differs between ours and a peer's in one case, and whether their rule explains it."""
  at, there = f"{case}/{pair.ours}", f"{case}/{pair.theirs}"
  given = [arrays[f"{case}/{t}"] for t in "xwg"]
  _, factors = operands(*given, pair.layout, pair.rule, pair.gradients, pair.is_shifted)
  our_codes, our_factors = operands(*given, pair.layout, pair.our_rule, pair.gradients)
  seen = [t for t in "xwg" if f"{there}/{t}_codes" in theirs]
  rules = POW2_RULES if pair.rule in POW2_RULES else F32_RULES
  found = {
    "codes": {t: theirs[f"{there}/{t}_codes"].size for t in seen},
    "codes_that_differ": {
      t: _count(mine[f"{at}/{t}_codes"], theirs[f"{there}/{t}_codes"]) for t in seen
    },
    "peers_codes_missed_by_rule": {
      rule.__name__: sum(
        _count(made[t], theirs[f"{there}/{t}_codes"]) for t in seen if made[t] is not None
      )
      for rule in rules
      for made in [operands(*given, pair.layout, rule, pair.gradients)[0]]
    },
    "our_codes_missed_by_our_rule": sum(
      _count(our_codes[t], mine[f"{at}/{t}_codes"]) for t in our_codes
    ),
    "rule": pair.rule.__name__,
    "products": {},
  }
  is_same = pair.our_rule is pair.rule and not pair.is_shifted
  for what in PRODUCTS:
    if f"{there}/{what}" not in theirs:
      continue
    exact = codes_alone = factors[what][0] @ factors[what][1]
    our_exact = exact if is_same else our_factors[what][0] @ our_factors[what][1]
    if pair.is_dequantized:
      rounded = (f.astype(F32).astype(np.float64) for f in factors[what])
      exact = next(rounded) @ next(rounded)
    found["products"][what] = {
      "largest_difference": largest(theirs[f"{there}/{what}"], mine[f"{at}/{what}"]),
      "peer_to_numpy_with_its_rule": largest(theirs[f"{there}/{what}"], exact),
      "peer_to_numpy_without_rounding_values": largest(theirs[f"{there}/{what}"], codes_alone),
      "peer_to_numpy_with_our_rule": largest(theirs[f"{there}/{what}"], our_exact),
      "ours_to_numpy_with_our_rule": largest(mine[f"{at}/{what}"], our_exact),
    }
  return found


def summation(arrays, case="1024x1024x1024"):
  """What float32 sums cost in NumPy, of FP8 codes and of their values (codes times scales)."""
  rows = []
  for t in "xw":
    codes, _, scale = narrow(arrays[f"{case}/{t}"], ALL, E4M3, inverse_reciprocal)
    codes = codes.view(E4M3).astype(F32)
    rows.append((codes, codes * scale))
  found = {}
  for what, x, w in (("codes", rows[0][0], rows[1][0]), ("values", rows[0][1], rows[1][1])):
    got, want = x @ w, x.astype(np.float64) @ w.astype(np.float64)
    found[what] = {"left": largest(got, want), "exact_sums": float((got == want).mean())}
  return found


def _count(a, b) -> int:
  return int(np.sum(a != b))


def explain(arrays, found):
  """Everything about values, JSON-able.

  Args:
    arrays: what inputs.make gives.
    found: {worker: its arrays}.
  """
  reference = references(arrays)
  result = {"relative_error": {p: errors(f, reference) for p, f in found.items()}, "pairs": []}
  result["summation"] = summation(arrays)
  for pair in PAIRS:
    if pair.peer in found:
      cases = {
        case: compare(pair, case, arrays, found["fp8jax"], found[pair.peer])
        for case in (*inputs.SHAPES, inputs.TIES)
      }
      result["pairs"].append(
        {"ours": pair.ours, "peer": pair.peer, "theirs": pair.theirs, "cases": cases}
      )
  return result
