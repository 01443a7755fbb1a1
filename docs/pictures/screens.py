"""``python docs/pictures/screens.py plan.html``: the picture of the page in the README, from the page of ``make demo``.
``python docs/pictures/screens.py FOLDER``: the gallery, from pages in the folder, which are made if they are not there. Both
need Chromium, as ``make test-browser`` does."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
#: The reports of the gallery: a name, what it is about, and the arguments of ``shardwise plan``.
GALLERY = (
    ("decoder", "A decoder of 2.5 billion parameters", "zoo:t2b:2b,remat --topology v5e:4x4 --mesh data=4,model=4"),
    ("llama", "Llama 3 with 70 billion parameters", "zoo:llama3:70b --topology v5p:4x4x4"),
    ("experts", "A mixture of experts", "zoo:mixtral --topology v5p:4x4x4"),
    ("prefill", "Inference: prefill", "zoo:itx:prefill --topology v5e:4x4"),
    ("graph", "A graph network", "zoo:gns --topology v5e:4x4"),
    ("pipeline", "A pipeline of four stages", "zoo:llama3:70b --topology v5p:4x4x4 --pipeline 4"),
)
ABOUT = """# Gallery

Six pages that `shardwise plan ... --report plan.html` writes, each with a picture of a layer (its tab *Model*). Times and
memory are predictions. `python docs/pictures/screens.py FOLDER` makes this page.
"""


def picture(browser: Any, file: Path, clicked: str, height: int, to: Path) -> list[str]:
    """Takes a picture of a page's model, and returns the verdict."""
    page = browser.new_page(viewport={"width": 1120, "height": height}, color_scheme="light")
    page.goto(file.resolve().as_uri())
    page.click("#tab-model")
    if clicked:
        page.locator(clicked).first.click()
        page.evaluate("scrollTo(0, 0)")
        page.mouse.move(0, 0)
    page.screenshot(path=to)
    verdict: list[str] = page.locator(".verdict p").evaluate_all("all => all.map(p => p.textContent)")
    page.close()
    return verdict


def gallery(browser: Any, folder: Path) -> None:
    text = ABOUT
    for name, title, words in GALLERY:
        file = folder / f"{name}.html"
        if not file.exists():
            command = [sys.executable, "-m", "shardwise", "plan", *shlex.split(words), "--report", file.name]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        verdict = picture(browser, file, "", 700, HERE / f"gallery-{name}.png")
        text += f"\n## {title}\n\n```sh\nshardwise plan {words}\n```\n\n{' '.join(verdict)}\n"
        text += f"\n![{title}: kernels of a layer, arrays with their sharded dimensions](pictures/gallery-{name}.png)\n"
    (HERE.parent / "gallery.md").write_text(text)


def main() -> None:
    given = Path(sys.argv[1])
    with sync_playwright() as running:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        if given.is_dir():
            gallery(browser, given)
        else:
            picture(browser, given, "#diagram li:nth-child(7) .dim.cut", 1010, HERE / "model.png")
        browser.close()


if __name__ == "__main__":
    main()
