"""How ``make docs`` builds the site. Tutorials are run while it is built, and a warning is an error."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from sphinx.domains.std import StandardDomain

import shardwise

# Pages plan for accelerators and run on host devices: none is to be opened, and none missed.
os.environ["JAX_PLATFORMS"] = "cpu"

# Notebooks run under settings of their own, not under those of whoever builds the site; a kernel that only this process talks
# to need not warn that it could be listened to.
_settings = tempfile.TemporaryDirectory()
_profile = Path(_settings.name, "profile_default")
_profile.mkdir()
(_profile / "ipython_kernel_config.py").write_text('get_config().IPKernelApp.log_level = "ERROR"\n')
os.environ["IPYTHONDIR"] = _settings.name

project = "Shardwise"
author = "the Shardwise authors"
release = version = shardwise.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["pictures/*.py", "requirements.txt"]

# Markdown, the same as GitHub shows.
myst_heading_anchors = 4

# Notebooks.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 180
nb_execution_show_tb = True  # a failing cell is a warning, and so an error, with the traceback
nb_merge_streams = True
nb_render_text_lexer = "text"

# The reference.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False

# Signatures name types of other packages, whose pages cannot be asked without a network, and inner ones of ours.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!shardwise).*"),
    (r"py:class", r"shardwise\.(capture|cost|dims|hardware|ir|lowering|plans|report|rewrite|search|verification)\..*"),
]

# The page.
html_theme = "furo"
html_title = f"Shardwise {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"
pygments_dark_style = "monokai"


def _readable(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are written to be read as they are. reStructuredText wants a mark between a literal and the letter after it,
    and the names of a list of arguments on one line."""
    text = re.sub(r"(``[^`\n]+``)(\w?)", lambda m: f"{m[1]}\\ {m[2]}" if m[2] else m[1], "\n".join(lines))
    text = re.sub(r"(?m)^( +\w+(?:, \w+)*,)\n +(?=\w+(?:, \w+)*:)", r"\1 ", text)
    lines[:] = text.split("\n")


def _apart_from_search(app: Any) -> None:
    """Sphinx has a page ``search`` of its own, and so have we: its is moved to ``find``."""
    handle = app.builder.handle_page

    def moved(name: str, context: dict[str, Any], template: str = "page.html", **more: Any) -> None:
        handle("find" if template == "search.html" else name, context, template, **more)

    app.builder.handle_page = moved


def _find(app: Any, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Links of the theme to the page for searching lead to ``find``. Pages link to each other in another way."""
    path_to = context["pathto"]
    context["pathto"] = lambda name, *more: path_to("find" if name == "search" else name, *more)


def setup(app: Any) -> None:
    StandardDomain._virtual_doc_names.pop("search", None)
    app.connect("builder-inited", _apart_from_search)
    app.connect("html-page-context", _find)
    app.connect("autodoc-process-docstring", _readable, priority=400)
