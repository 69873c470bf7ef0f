"""The machinery between the rows on disk and the step on the device."""

TEMPLATE_VERSION = "0.2.0"
"""The release of fastgpu-template that this engine comes from. Report it with a bug.

docs/engine.md of a project says how to bring a newer one into it.
"""
