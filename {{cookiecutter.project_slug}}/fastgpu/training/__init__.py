"""What happens to a batch on the device: step, optimizer, evaluation."""
