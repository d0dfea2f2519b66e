"""The page of a report in a real browser: chromium without network, driven by selenium.

apt-get install chromium chromium-driver; make test-browser
"""

import base64
import io
import os

import numpy as np
import pytest
import run_files
from PIL import Image

from fp8jax.jobs import report
from fp8jax.sensitivity import page as sensitivity_page

pytestmark = [
  pytest.mark.browser,
  # selenium's own
  pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def browser():
  webdriver = pytest.importorskip("selenium.webdriver")
  options = webdriver.ChromeOptions()
  for argument in ("--headless=new", "--no-sandbox", "--window-size=1400,3000",
                   "--host-resolver-rules=MAP * ~NOTFOUND"):  # fmt: skip
    options.add_argument(argument)
  options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
  service = webdriver.ChromeService("/usr/bin/chromedriver")
  driver = webdriver.Chrome(options=options, service=service)
  yield driver
  driver.quit()


def drawn(browser, path):
  """Opens a page; how many charts it says it drew."""
  from selenium.webdriver.support.ui import WebDriverWait

  browser.get(f"file://{path}")
  body = browser.find_element("tag name", "body")
  WebDriverWait(browser, 120).until(
    lambda _: body.get_attribute("data-drawn") or body.get_attribute("data-failed")
  )
  assert body.get_attribute("data-failed") is None
  assert not browser.get_log("browser")  # also no warning of Vega's
  return int(body.get_attribute("data-drawn"))


def pixels(browser, chart):
  """uint8 [height, width, 4] of a chart's canvas."""
  canvas = browser.find_element("css selector", f"#{chart} canvas")
  data = browser.execute_script("return arguments[0].toDataURL('image/png')", canvas)
  return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))))


def test_report_draws_every_chart_and_its_slider_moves_the_heat_maps(browser, tmp_path):
  run_files.write_run(tmp_path, steps=200, snapshots=20, layers=30)
  report.run(str(tmp_path), [])
  assert drawn(browser, tmp_path / "report.html") == 9
  charts = [e.get_attribute("id") for e in browser.find_elements("css selector", ".vega-embed")]
  for chart in charts:
    colors = {tuple(c) for c in pixels(browser, chart).reshape(-1, 4)[::7]}
    assert len(colors) > 10, chart  # more than a frame
  before = pixels(browser, "heat_maps")
  slider = browser.find_element("css selector", "#heat_maps_bind input[type=range]")
  assert (slider.get_attribute("min"), slider.get_attribute("max")) == ("0", "19")
  browser.execute_script(
    "arguments[0].value = 3; arguments[0].dispatchEvent(new Event('input'));", slider
  )
  shown = browser.execute_async_script(
    "const done = arguments[0]; views.heat_maps.runAsync().then(v => done(v.signal('look')))"
  )
  after = pixels(browser, "heat_maps")
  assert int(shown) == 3 and (before != after).any(-1).mean() > 0.1
  if folder := os.environ.get("FP8JAX_SCREENSHOTS"):
    browser.save_screenshot(os.path.join(folder, "report.png"))


def test_sensitivity_draws_every_chart(browser, tmp_path):
  path, *_ = sensitivity_page.write(str(tmp_path), run_files.sensitivity_result())
  count = drawn(browser, path)
  charts = [e.get_attribute("id") for e in browser.find_elements("css selector", ".vega-embed")]
  assert count == len(charts) > 4
  for chart in charts:
    assert len({tuple(c) for c in pixels(browser, chart).reshape(-1, 4)[::7]}) > 5, chart


def test_comparison_draws_every_chart(browser, tmp_path):
  paths = run_files.write_rates(tmp_path, {"bf16": 0.0, "block_128": 0.01}, 80)
  path = report.compare(str(tmp_path / "out"), paths, "bf16")
  assert drawn(browser, path) == 4
  if folder := os.environ.get("FP8JAX_SCREENSHOTS"):
    browser.save_screenshot(os.path.join(folder, "compare.png"))
