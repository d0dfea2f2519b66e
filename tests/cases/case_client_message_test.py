"""A client that cannot read an export: its error is told, and nothing advises to leave it out."""

import stat

import case_inputs


def test_a_client_that_refuses_is_not_called_one_that_lacks_packages(tmp_path):
  client = tmp_path / "python"
  said = "KeyError: 'Missing required keys in rope_parameters'"
  client.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
  client.chmod(client.stat().st_mode | stat.S_IXUSR)
  source, target = case_inputs.model_folder(tmp_path / "m"), tmp_path / "x"
  code, output = case_inputs.launch(
    tmp_path,
    [
      f"c.init.hf = c.weights.hf = {str(source)!r}",
      "c.model.preset, c.seq_len = 'hf', 64",
      "c.export.gate_text, c.export.gate_tokens = 'LICENSE', 64",
      f"c.export.client_python = {str(client)!r}",
    ],
    "--job=export", f"--out={target}", f"--workdir={tmp_path / 'run'}",
  )  # fmt: skip
  last = output.strip().splitlines()[-1]
  assert code == 1 and said in last and not target.exists(), output
  assert "install them" not in last and "client_python=''" not in last
