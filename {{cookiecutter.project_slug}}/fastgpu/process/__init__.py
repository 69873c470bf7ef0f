"""The process: its launch, its config, its process group, its machine, and how it ends."""
