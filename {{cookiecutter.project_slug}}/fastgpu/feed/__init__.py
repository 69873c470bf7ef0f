"""From a source of rows to pools on the device, ahead of the training loop."""
