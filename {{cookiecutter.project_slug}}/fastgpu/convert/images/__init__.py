"""Images for convert.py: files of them, tables of labels, pixels in a CSV and arrays of pixels."""
