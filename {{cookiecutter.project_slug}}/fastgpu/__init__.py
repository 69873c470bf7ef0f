"""The machinery between the rows on disk and the step on the device. A flat package."""
