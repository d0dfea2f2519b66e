"""Writes configs.json: the values of every shipped configuration and arm, as a user gets them.

command: python tests/golden/write_configs.py

The base configuration is whole, the others are their differences from it. A value changes here only
where somebody means to change a default or a published setting.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "config"), str(HERE.parents[1])]


def values() -> dict[str, dict]:
  """{"whole": of configs/base.py, "FILE:ARM": {"changed": {key: value}, "without": [key]}}."""
  import shipped_configs_test as shipped

  from configs import base
  from fp8jax.config import identity

  whole = identity.flatten(base.get_config())
  found = {"whole": whole}
  for name, arm in shipped.CASES:
    flat = identity.flatten(shipped._config(name, arm))
    changed = {k: v for k, v in flat.items() if k not in whole or whole[k] != v}
    found[f"{name}:{arm}" if arm else name] = {
      "changed": changed, "without": [k for k in whole if k not in flat]
    }  # fmt: skip
  return found


if __name__ == "__main__":
  text = json.dumps(values(), indent=1, sort_keys=True)
  (HERE / "configs.json").write_text(text + "\n")
