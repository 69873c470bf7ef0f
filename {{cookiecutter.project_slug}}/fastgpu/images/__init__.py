"""Image files as rows: read, and decoded into pixels on their way to a pool.

files.py         opens and prepares image files
encoded.py       rows that are image files: what part of one is decoded, and to which size
decoded.py       a column of pixels, made of a column of encoded images
augment.py       what is drawn anew for each batch of images on the device
"""
