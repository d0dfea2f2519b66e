"""A format per site within a budget of BOPs, by gradient scores and by measurements.

The score of a site in a format is the KL that its rounding costs, estimated from one backward pass
per format (sensitivity/study.py); beside it the KL of that site alone in that format is measured.
Either is added up over sites, and the least sum within the budget is a knapsack with one format
per site, which integer programming solves exactly.

All measurements, of single sites and of mixtures, are one program: sites with options.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax.config import measured as measured_rules
from fp8jax.errors import UserError
from fp8jax.models import transformer
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Recipe
from fp8jax.search import cost
from fp8jax.search import space as space_lib
from fp8jax.sensitivity import rules as chosen_rules
from fp8jax.sensitivity.study import CHOOSE, REPORT, Study

FORMAT = "fp8jax formats 1"
# So many sites, those of the largest scores, are measured alone in every format.
_ALONE = 32
_RESAMPLES = 2000


def knapsack(losses: np.ndarray, costs: np.ndarray, budget: float) -> np.ndarray:
  """int [sites]: one option per site, of the least sum of losses within the budget, exactly.

  Args:
    losses, costs: of every option, at least 0.
    budget: of the sum of costs.

  Raises:
    UserError: the cheapest options exceed it.
  """
  from scipy import optimize  # JAX brings it

  least = costs.min(1).sum()
  if least > budget * (1 + 1e-9):
    raise UserError(f"a budget of {budget:.4g} is below {least:.4g}, the cheapest options' cost")
  sites, options = losses.shape
  one_each = np.kron(np.eye(sites), np.ones(options))
  solution = optimize.milp(
    (losses / losses.max()).ravel(),
    integrality=np.ones(losses.size), bounds=optimize.Bounds(0, 1),
    constraints=[
      optimize.LinearConstraint(one_each, 1, 1),
      optimize.LinearConstraint(costs.ravel()[None] / budget, -np.inf, 1 + 1e-9),
    ],
    options={"mip_rel_gap": 0.0},
  )  # fmt: skip
  return solution.x.reshape(losses.shape).argmax(1)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> list[float]:
  """[Spearman's rho, low, high] of paired numbers: 95 %, by resampling pairs."""
  from scipy import stats

  pairs_2N, draw = np.array([a, b], np.float64), np.random.default_rng(0)
  picked_RN = draw.integers(0, len(a), (_RESAMPLES, len(a)))
  all_R2N = np.concatenate([pairs_2N[None], pairs_2N[:, picked_RN].transpose(1, 0, 2)])
  rank = stats.rankdata(all_R2N, axis=-1)
  rank -= rank.mean(-1, keepdims=True)
  with np.errstate(invalid="ignore"):  # one pair drawn always
    rho_R = (rank[:, 0] * rank[:, 1]).sum(-1) / np.sqrt(np.square(rank).sum(-1).prod(-1))
  return [float(rho_R[0]), *np.nanquantile(rho_R[1:], (0.025, 0.975)).tolist()]


class FormatStudy(Study):
  """A study in which a set of sites is {site of a layer: (number of an option,)}."""

  def __init__(self, options: Sequence[Recipe], *args):
    """Args: recipes, the last of which quantizes nothing; and a Study's."""
    super().__init__(*args)
    self.options = tuple(options)
    macs = cost.macs_per_token(self.spec.model)
    self.space = space_lib.make({p.name: macs[p.name] for p in self.places}, self.options)

  def _switched(self, on: Mapping[str, Sequence[float]]):
    last = len(self.options) - 1
    return self.space.with_choice(
      self.sites, np.array([on.get(n, (last,))[0] for n in self.space.decisions], np.int32)
    )

  def mixture(self, choice: np.ndarray, half: str):
    """`measure` with an option at every site."""
    last = len(self.options) - 1
    on = {n: (int(c),) for n, c in zip(self.space.decisions, choice, strict=True) if c != last}
    return self.measure(f"options {''.join(str(int(c)) for c in choice)}", on, half)

  def scores(self) -> np.ndarray:
    """float64 [sites, options]: estimated KL of every site alone, nats per token."""
    scores = np.zeros(self.space.costs.shape)
    for o, option in enumerate(self.options[:-1]):
      sites = _in(self.sites, option)
      for i in range(len(self._batches[CHOOSE])):
        sums = self._records.get(
          f"estimated kl in {option.name}, batch {i}",
          functools.partial(self._estimate_one, i, 1, sites),
        )
        for d, name in enumerate(self.space.decisions):
          scores[d, o] += sum(sums[name][-1])  # of PARTS: both
    return scores / self.tokens(CHOOSE).sum()

  def alone(self, d: int, o: int) -> float:
    """Measured KL of one site in one option, nats per token."""
    name = self.space.decisions[d]
    return self.measure(f"{name} in {self.options[o].name}", {name: (o,)}, CHOOSE).kl.estimate


def _in(sites, recipe: Recipe):
  """The quantized sites in another recipe."""

  def one(site):
    if not site.recipe.fwd.is_quantized:
      return site
    return site_lib.fresh(recipe, site.name, site.layers, layout=site.layout, save=site.save)

  return site_lib.tree_map(one, sites)


def choose(study: FormatStudy, budget: float, base_rules) -> dict[str, Any]:
  """The results: scores, measurements and their agreement, and rules within the budget.

  Args:
    budget: BOPs of the sites as a share of BF16's.
    base_rules: rules that decide on all other sites.
  """
  space, names = study.space, [o.name for o in study.options]
  scores = study.scores()
  order = np.argsort(-scores.max(1), kind="stable")[:_ALONE]
  alone = {(d, o): study.alone(d, o) for d in order for o in range(len(names) - 1)}
  losses = {"gradient scores": scores}
  if len(order) == len(space.decisions):
    alone_too = np.zeros_like(scores)
    for (d, o), kl in alone.items():
      alone_too[d, o] = max(kl, 0.0)
    losses["measured alone"] = alone_too
  chosen = {arm: knapsack(of, space.costs, budget) for arm, of in losses.items()}
  for o, name in enumerate(names):
    chosen[f"all {name}"] = np.full(len(space.decisions), o)
  paths = [*site_tree.find_sites(transformer.site_params(study.spec.model))]
  layers = study.spec.model.num_layers
  every = rules_lib.all_names(paths, layers)
  arms = [
    {
      "arm": arm, "bops": space.cost(choice), **study.mixture(choice, REPORT).row(),
      "rules": chosen_rules.with_recipes(base_rules, every, space.assigned(choice), layers),
    }
    for arm, choice in chosen.items()
  ]  # fmt: skip
  groups = {name: [k for k in alone if k[1] == o] for o, name in enumerate(names[:-1])}
  return {
    "format": FORMAT,
    "model": study.spec.model.to_dict(),
    "sites": [{"name": p.name, "recipe": p.recipe} for p in study.places],
    "budgets": [{
      "key": "bops", "budget": f"at most {budget:g} of BF16's BOPs", "verdict": measured_rules.MET,
      "arms": arms,
    }],
    "scores": [
      {"site": space.decisions[d], "recipe": names[o], "estimated": float(scores[d, o]),
       "measured": alone.get((d, o))}
      for d in range(len(space.decisions)) for o in range(len(names) - 1)
    ],
    "spearman": {
      name: rank_correlation([scores[k] for k in some], [alone[k] for k in some])
      for name, some in {**groups, "all": [*alone]}.items() if len(some) > 2
    },
    "measured_alone": len(alone),
  }  # fmt: skip


def table(result: Mapping[str, Any]) -> list[str]:
  """The results for a terminal."""
  (budget,) = result["budgets"]
  lines = [f"{budget['budget']}; loss and KL on the half that nothing was chosen on"]
  for arm in budget["arms"]:
    loss, kl = arm["loss_percent"], arm["kl"]
    lines.append(
      f"  {arm['arm']:24} BOPs {arm['bops']:.4f}   {loss[0]:+8.3f} [{loss[1]:+.3f}, {loss[2]:+.3f}]"
      f" %   KL {kl[0]:.3g} [{kl[1]:.3g}, {kl[2]:.3g}]"
    )
  for name, (rho, low, high) in result["spearman"].items():
    lines.append(
      f"  scores against measurements, {name}: Spearman {rho:.2f} [{low:.2f}, {high:.2f}]"
    )
  return [*lines, f"  precision.rules = {tuple(map(tuple, budget['arms'][0]['rules']))}"]
