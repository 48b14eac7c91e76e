"""Configuration of Sphinx for `make docs`, which turns every warning into an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

project = "ddpx"
html_title = "ddpx: API reference"
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "sidebar_width": "240px"}
html_show_copyright = False
html_show_sourcelink = False
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
# The adapters' libraries take seconds to import, and not every machine has them.
autodoc_mock_imports = ["accelerate", "lightning", "ray", "transformers"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
# The types of other libraries and of private modules have no page here.
nitpick_ignore_regex = [
    (r"py:.*", r"(accelerate|collections|datetime|lightning|pathlib|ray|torch|transformers)\..*"),
    (r"py:.*", r"(ddpx\._C|ddpx\.timeline\.(raw|recorder))\..*"),
    (r"py:.*", r".*\b(PostSyncHook|Build|Wrap|StartMethod|MakeOptimizer|Stateful)"),
]
