"""The metrics of a step."""

from fp8jax.models.mixer import Aux


def of_aux(aux: Aux, tokens, num_layers: int):
  """Metrics beside the loss: "aux/NAME" of losses, per token and layers added up, and of
  statistics, per token and layer; Aux.sums as they are.

  Args:
    aux: sums over the tokens of a step, see models/mixer.py.
    tokens: their weights added up.
    num_layers: of the model.
  """
  losses = {f"aux/{name}": value / tokens for name, value in aux.losses.items()}
  statistics = {
    f"aux/{name}": value / (tokens * num_layers) for name, value in aux.statistics.items()
  }
  return {**losses, **statistics, **aux.sums}
