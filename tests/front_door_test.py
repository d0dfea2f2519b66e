"""The page "FP8 in ten minutes" is true: its code runs, in order, as a reader would run it."""

import re

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_page_runs(repository, capsys):
  path = repository / "experiments" / "fp8_in_ten_minutes.md"
  text = path.read_text()
  blocks = list(BLOCK.finditer(text))
  # None escapes for being fenced another way.
  assert len(blocks) == text.count("```") // 2 >= 8
  namespace = {"__name__": "page"}
  for block in blocks:
    # Line numbers of a traceback are those of the page.
    above = text.count("\n", 0, block.start(1))
    exec(compile("\n" * above + block[1], str(path), "exec"), namespace)
  assert "amax of g" in capsys.readouterr().out
