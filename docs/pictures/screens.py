"""``python docs/pictures/screens.py plan.html``: the pictures of the page in the README, from the page of ``make demo``. Needs
Chromium, as ``make test-browser`` does."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

#: File, tab, what is clicked there, and the height.
PICTURES = (
    ("report.png", "overview", "", 850),
    ("model.png", "model", "#diagram li:nth-child(7) .dim.cut", 1010),
)


def main() -> None:
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-browser"), args=["--no-sandbox"]
        )
        for file, tab, clicked, height in PICTURES:
            page = browser.new_page(viewport={"width": 1120, "height": height}, color_scheme="light")
            page.goto(Path(sys.argv[1]).resolve().as_uri())
            page.click(f"#tab-{tab}")
            if clicked:
                page.locator(clicked).first.click()
                page.evaluate("scrollTo(0, 0)")
                page.mouse.move(0, 0)
            page.screenshot(path=Path(__file__).parent / file)
        browser.close()


if __name__ == "__main__":
    main()
