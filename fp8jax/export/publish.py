"""The model card of an export, and its upload to the Hugging Face hub."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8jax.errors import UserError, one_line
from fp8jax.export import folder as export_folder

CARD = "README.md"


def write_card(
  folder: str, name: str, facts: Mapping[str, Any], base_model: str = "", is_reward: bool = False
):
  """Writes README.md: the facts of an export, for people and for the hub.

  Args:
    facts: {heading: value}; a mapping becomes a table, any other value its text.
    base_model: id of the model on the hub that training started from; "" for none.
  """
  import huggingface_hub  # extra `hf`

  tags = ["fp8jax", *(["fp8"] if facts["Weights"].get("FP8") else [])]
  data = huggingface_hub.ModelCardData(
    library_name="transformers", tags=tags, base_model=base_model or None,
    pipeline_tag="text-classification" if is_reward else "text-generation",
  )  # fmt: skip
  parts = [f"---\n{data.to_yaml()}\n---\n\n# {name}\n\nWritten by fp8jax `--job=export`.\n"]
  for heading, value in facts.items():
    parts.append(f"\n## {heading}\n\n{_text(value)}\n")
  huggingface_hub.ModelCard("".join(parts)).save(os.path.join(folder, CARD))


def _text(value) -> str:
  if not isinstance(value, Mapping):
    return str(value)
  return table(("", ""), value.items())


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """A table in Markdown."""
  lines = [columns, ["---"] * len(columns), *([str(k), *map(_cell, values)] for k, *values in rows)]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value) -> str:
  if isinstance(value, float):
    return f"{value:.4g}"
  text = json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value)
  return text.replace("|", "\\|").replace("\n", " ")


def check_login(repository: str):
  """Refuses an upload that could not succeed, before the work.

  Raises:
    UserError: nobody is logged in, or the hub is out of reach.
  """
  try:
    _api().whoami()
  except Exception as e:  # of the library, of its HTTP client and of sockets
    raise UserError(
      f"export.push_to={repository!r}: the Hugging Face hub knows nobody here: {one_line(e)}; log "
      "in with `hf auth login`, or set export.push_to='' and upload the folder later: "
      f"hf upload {repository} FOLDER"
    ) from e


def push(folder: str, repository: str) -> str:
  """Uploads the files of an export, and no others, to a repository that is made private if new.

  Returns:
    Its address.

  Raises:
    UserError: the hub refused; the folder stays, with the command that repeats the upload.
  """
  api = _api()
  try:
    made = api.create_repo(repository, private=True, exist_ok=True)
    api.upload_folder(
      repo_id=repository, folder_path=folder, allow_patterns=export_folder.files(folder),
      commit_message="fp8jax --job=export",
    )  # fmt: skip
  except Exception as e:  # as above
    raise UserError(
      f"export.push_to={repository!r}: the upload failed: {one_line(e)}; the folder is complete, "
      f"repeat the upload with: hf upload {repository} {folder}"
    ) from e
  return str(made)


def _api():
  import huggingface_hub  # extra `hf`

  return huggingface_hub.HfApi()
