"""Settings of Sphinx for `make docs`, which reads the pages as they are laid out in build/pages."""

import re
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

project = "fastgpu-template"
html_title = project
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4  # links to headings, as GitHub makes them
root_doc = "README"
exclude_patterns = ["docs/site/contents.md", ".github"]
html_theme = "furo"  # light, dark, or as the system has it
html_copy_source = False
smartquotes = False  # code of docstrings has quotes, too

# api.md: the names in `__all__` of each module, with what their docstrings say. These use Markdown's backticks.
default_role = "code"
autodoc_default_options = {"members": True, "exclude-members": "model_config, model_post_init, __new__"}
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 100

# Autodoc writes annotations into base classes, and pydantic would not accept those for a class that is made later.
for module in re.findall("automodule:: (.*)", Path(__file__).with_name("api.md").read_text()):
    import_module(module)
# The limits of a value are in config.md.
for section in import_module("fastgpu.process.config").Section.__subclasses__():
    section.__annotations__ = get_type_hints(section)


def edit_docstring(*arguments):
    """Of a module, show the first paragraph. Outside of code, an asterisk is one, and does not begin emphasis."""
    _, what, _, _, _, lines = arguments
    if what == "module" and "" in lines:
        del lines[lines.index("") + 1 :]
    lines[:] = [re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or r"\*", line) for line in lines]


def skip_member(*arguments):
    """Leave out fields of a NamedTuple that have no docstring of their own, and the `__init__` of a Protocol."""
    _, _, _, obj, is_skipped, _ = arguments
    is_field = str(getattr(obj, "__doc__", "")).startswith("Alias for field")
    return is_skipped or is_field or getattr(obj, "__name__", "") == "_no_init_or_replace_init"


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", edit_docstring)
    app.connect("autodoc-skip-member", skip_member)
