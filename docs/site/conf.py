"""Settings of Sphinx for `make docs`, which reads the pages as they are laid out in build/pages."""

project = "fastgpu-template"
html_title = project
extensions = ["myst_parser"]
myst_heading_anchors = 4  # links to headings, as GitHub makes them
root_doc = "README"
exclude_patterns = ["docs/site"]
html_theme = "furo"  # light, dark, or as the system has it
html_copy_source = False
