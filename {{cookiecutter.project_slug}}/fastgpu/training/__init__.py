"""What happens to a batch on the device: augmentation, step, optimizer, evaluation."""
