"""Rows, blocks and pools: what they are, and which row comes when."""
