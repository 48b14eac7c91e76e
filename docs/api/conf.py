"""Configuration of Sphinx for `make docs`, which turns every warning into an error."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

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
napoleon_use_ivar = False

nitpicky = True
# The types of other libraries and of private modules have no page here.
nitpick_ignore_regex = [
    (r"py:.*", r"(accelerate|collections|contextlib|datetime|lightning|pathlib)\..*"),
    (r"py:.*", r"(ray|torch|transformers)\..*"),
    (r"py:.*", r"(ddpx\._C|ddpx\.timeline\.record|ddpx\.health\.peers\.Wrapper|ddpx\.\S+\._)\w*.*"),
    (r"py:.*", r"ddpx\.ddp\.(fronts\.front\.Front|interface\.logging_data\.Logger)"),
    (r"py:.*", r"ddpx\.reducer\.reducer\.Reducer"),
    (r"py:.*", r".*\b(PostSyncHook|Build|Wrap|StartMethod|MakeOptimizer|Stateful)"),
]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _own_signature)


def _own_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, text: str, returned: str
) -> tuple[str, str] | None:
    """The signature of `__init__`, where Sphinx finds `__new__` of a mocked base class."""
    init = getattr(obj, "__init__", None) if what == "class" else None
    if init is None or is_dataclass(obj) or text != "(*args: Any, **kwargs: Any)":
        return None
    own = signature(init, bound_method=True)
    own_text = stringify_signature(own, show_return_annotation=False, unqualified_typehints=True)
    return own_text, ""
