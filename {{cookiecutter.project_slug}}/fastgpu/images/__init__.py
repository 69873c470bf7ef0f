"""Image files as rows: read, and decoded into pixels on their way to a pool.

files.py         opens and prepares image files
decode.py        one encoded image: the pixels of any part of it, resized
parts.py         which part of an image a row shows
column.py        a column of pixels, made of a column of encoded images
augment.py       what is drawn anew for each batch of images on the device
"""
