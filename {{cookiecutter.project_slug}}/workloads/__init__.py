"""What is trained: one module a workload, found by `workload:` in config.yaml. Your own code lives here."""
