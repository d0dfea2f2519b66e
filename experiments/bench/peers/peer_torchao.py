"""torchao's float8 training with emulate=True, and MX blocks multiplied in float32. A worker.

See worker.py. Eager: what its own tests run on CPUs.
"""

import dataclasses

import numpy as np
import torch
import worker
from torchao.float8 import config as config_lib
from torchao.float8 import float8_linear, float8_scaling_utils
from torchao.prototype.mx_formats import config as mx_config
from torchao.prototype.mx_formats import mx_tensor

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def _linear(config, w):
  """A Float8Linear without bias whose weight is w' [N, K]."""
  plain = torch.nn.Linear(w.shape[0], w.shape[1], bias=False)
  plain.weight = torch.nn.Parameter(w.t().contiguous())
  return float8_linear.Float8Linear.from_float(plain, config)


def _codes(config, layer, x, w, g):
  uses = (
    ("x", x, config.cast_config_input, -1),
    ("w", w, config.cast_config_weight, 0),
    ("g", g, config.cast_config_grad_output, -1),
  )
  for name, t, cast, axis in uses:
    narrow = float8_scaling_utils.hp_tensor_to_float8_dynamic(
      t,
      cast.target_dtype,
      layer.linear_mm_config,
      scaling_granularity=cast.scaling_granularity,
      axiswise_dim=float8_scaling_utils.get_maybe_axiswise_dim(axis, cast.scaling_granularity),
      round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    yield f"{name}_codes", narrow._data.contiguous().view(torch.uint8).numpy()


def _float8(name, x, w, g):
  config = config_lib.Float8LinearConfig.from_recipe_name(name)
  config = dataclasses.replace(config, emulate=True)
  layer = _linear(config, w)
  x = x.clone().requires_grad_()

  def forward():
    with torch.no_grad():
      return layer(x)

  def both():
    x.grad = layer.weight.grad = None
    y = layer(x)
    y.backward(g)
    return y

  arrays = {"y": both().detach().numpy(), "dx": x.grad.numpy().copy()}
  arrays["dw"] = layer.weight.grad.t().numpy().copy()
  arrays |= _codes(config, layer, x.detach(), w, g)
  return arrays, {"forward": forward, "both": both}


def _mx(x, w):
  mode = mx_config.ScaleCalculationMode.RCEIL
  w_t = w.t().contiguous()

  def narrow():
    return [mx_tensor.to_mx(t, torch.float8_e4m3fn, 32, mode) for t in (x, w_t)]

  def read(scale, data):
    blocks = data.float().reshape(*scale.shape, 32)
    return (blocks * scale.float().unsqueeze(-1)).reshape(data.shape)

  def forward():
    (x_scale, x_data), (w_scale, w_data) = narrow()
    return torch.mm(read(x_scale, x_data), read(w_scale, w_data).t())

  (_, x_data), (_, w_data) = narrow()
  arrays = {
    "y": forward().numpy(),
    "x_codes": x_data.view(torch.uint8).numpy(),
    "w_codes": w_data.view(torch.uint8).t().contiguous().numpy(),
  }
  return arrays, {"forward": forward}


def make(*operands):
  x, w, g = (torch.from_numpy(np.ascontiguousarray(t)) for t in operands)
  found = {name: _float8(name, x, w, g) for name in RECIPES}
  return found | {"mxfp8": _mx(x, w)}


if __name__ == "__main__":
  worker.main(make, ("torchao", "torch", "numpy"))
