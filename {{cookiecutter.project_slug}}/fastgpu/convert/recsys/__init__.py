"""Users and items for convert.py: tables of ratings, and sparse matrices."""
