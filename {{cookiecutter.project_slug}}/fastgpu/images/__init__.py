"""Image files as rows: read, and decoded into pixels on their way to a pool.

files.py         image files, as convert.py and predict.py read them
decode.py        one encoded image: the pixels of any part of it, resized
parts.py         how images are prepared, and which part of one a row shows
column.py        a column of pixels, made of a column of encoded images
augment.py       what is drawn anew for each batch of images on the device
"""
