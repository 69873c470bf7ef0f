"""The machinery between the rows on disk and the step on the device. A flat package."""

TEMPLATE_VERSION = "0.1.0"
"""The release of fastgpu-template that this copy of the package comes from.

Report it with a bug. `cruft update` brings a newer release into the project, and this line with it.
"""
