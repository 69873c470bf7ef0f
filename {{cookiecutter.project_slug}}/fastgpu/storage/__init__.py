"""From bytes in files to rows, by many threads at once."""
