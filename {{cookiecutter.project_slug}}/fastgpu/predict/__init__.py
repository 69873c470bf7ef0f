"""What predict.py is made of. docs/python.md uses it in programs of your own."""
